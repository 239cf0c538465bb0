"""Tokens per second of GPT-2 on one GPU, fed from a file, against the same loop fed from the device's own memory.

GPT-2 (124M) in bf16, 16 x 1024 tokens a step. What Paceline trains on comes from a memory-mapped file of token ids, in
random order, read ahead and copied over pinned memory beside the computation; or, as the limit, from a tensor that
lies on the GPU already. A plain loop over that tensor and one with torch's DataLoader over the file stand beside them.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.harness import Contestant, Result, Unavailable, alternate, isolated
from bench.mps import LENGTH, VOCABULARY, make_model, make_optimizer

ENDLESS = 10**9
WARMUP_STEPS = 8
FROM_FILE, ON_DEVICE = "paceline, from a file", "paceline, from the GPU"
BARE, LOADER = "bare loop, from the GPU", "bare loop, DataLoader"

Loop = Iterator[Any]


@dataclass(frozen=True)
class Task:
    batch: int
    num_steps: int
    num_turns: int
    num_windows: int


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def paceline(task: Task, data: Any) -> Loop:
    import paceline as pl

    with pl.Trainer.setup(make_model, make_optimizer, data=data, global_batch=task.batch) as trainer:
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
                yield


def bare(batches: Callable[[], Iterator[Tensor]]) -> Loop:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    while True:
        for batch in batches():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def from_tensor(task: Task, tokens: Tensor) -> Iterator[Tensor]:
    for rows in torch.randperm(len(tokens), device=tokens.device).split(task.batch):
        yield tokens[rows]


class Windows(Dataset[Tensor]):
    """What people write: a memory map, one window per index."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return len(self._tokens) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._tokens[index * LENGTH : (index + 1) * LENGTH].astype(np.int64))


def from_loader(task: Task, path: Path) -> Iterator[Tensor]:
    loader = DataLoader(
        Windows(path), batch_size=task.batch, shuffle=True, num_workers=2, pin_memory=True, drop_last=True
    )
    return (batch.cuda(non_blocking=True) for batch in loader)


def contestant(task: Task, loop: Loop) -> Contestant:
    def measure(num_steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        torch.cuda.synchronize()
        return num_steps * task.batch * LENGTH / (time.perf_counter() - start)

    measure(WARMUP_STEPS)
    return partial(measure, task.num_steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=16, help="windows of 1024 tokens a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="per turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="alternations (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    from paceline.data.sources.tokens import TokenFile

    task = Task(options.batch, options.steps, options.turns, num_windows=64 * options.batch)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, task.num_windows * LENGTH, dtype=np.uint16)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path = Path(folder, "tokens.bin")
        tokens.tofile(path)
        on_device = torch.from_numpy(tokens.astype(np.int64)).view(-1, LENGTH).cuda()
        loops: dict[str, Callable[[], Loop]] = {
            FROM_FILE: lambda: paceline(task, TokenFile(path, LENGTH, stride=LENGTH, targets=False)),
            ON_DEVICE: lambda: paceline(task, on_device),
            BARE: lambda: bare(partial(from_tensor, task, on_device)),
            LOADER: lambda: bare(partial(from_loader, task, path)),
        }
        contestants = {name: isolated(partial(_start, task, make)) for name, make in loops.items()}
        measured = alternate(contestants, task.num_turns)
        contestants.clear()
    return Result.of(
        "gpu_input",
        "tokens/s",
        measured,
        ours=FROM_FILE,
        limit=ON_DEVICE,
        better="higher",
        settings={**asdict(task), "model": "GPT-2 124M, bf16 autocast", "length": LENGTH},
        not_peers=(BARE,),
    )


def _start(task: Task, make: Callable[[], Loop]) -> Contestant:
    return contestant(task, make())
