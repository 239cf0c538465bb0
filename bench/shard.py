"""Memory and speed of workers that divide the optimizer's state among them.

The limit is Paceline without dividing. The peers are torch DDP with ZeroRedundancyOptimizer, and FSDP2 (`fully_shard`
per layer), both over Gloo. Everyone trains the same transformer with AdamW, one intra-op thread per worker.

Speed: the workers are started once, and the contestants take turns inside them behind a barrier.

Memory: each contestant in processes of its own. A worker first runs forward and backward of the bare model, then
trains; what the second peak exceeds the first by is the state: sums of gradients, optimizer and whatever is in flight.
On a CPU it is the proportional set size, in which memory that n processes share counts 1/n; on a GPU what torch has
allocated. FSDP2 divides the weights too, which the difference credits it with.

    python -m bench shard --json
    python -m bench shard --device cuda        # memory only: ranks on one GPU over Gloo
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.harness import Result, turn_order
from bench.models import LanguageModel
from bench.workers import gloo_group, run_workers

LENGTH, NUM_SAMPLES, LR = 64, 512, 1e-3
SAMPLE_S = 0.01
NUM_SAMPLED = 2  # steps

DIVIDED, WHOLE = "paceline, divided", "paceline, whole"
EXACT, WHOLE_EXACT = "paceline exact, divided", "paceline exact, whole"
ZERO, FSDP = "DDP, ZeroRedundancy", "torch FSDP2"
OURS = (WHOLE, DIVIDED, WHOLE_EXACT, EXACT)
SPEED = (WHOLE, DIVIDED, ZERO, FSDP)

Loop = Iterator[None]  # yields after each optimizer step


@dataclass(frozen=True)
class Task:
    num_workers: int
    micro_batch: int
    num_micro_batches: int
    num_turns: int
    num_steps: int
    width: int
    num_layers: int
    vocabulary: int
    device: str = "cpu"


def make_model(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(
        vocabulary=task.vocabulary, length=LENGTH, width=task.width, num_layers=task.num_layers, num_heads=8
    )


def make_tokens(task: Task) -> Tensor:
    return torch.randint(task.vocabulary, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def batches_of(task: Task, rank: int) -> Iterator[Tensor]:
    tokens = make_tokens(task)[rank :: task.num_workers].to(task.device)
    yield from itertools.cycle(tokens.split(task.micro_batch))


def ours(task: Task, rank: int, *, shard: str | None = None, exact: bool = False) -> Loop:  # noqa: ARG001
    import paceline as pl

    with pl.Trainer.setup(
        partial(make_model, task),
        partial(torch.optim.AdamW, lr=LR),
        data=make_tokens(task),
        global_batch=task.micro_batch * task.num_micro_batches * task.num_workers,
        micro_batch=task.micro_batch,
        exact=exact,
        shard=shard,
        device=None if task.device == "cuda" else "cpu",
        balancing=pl.Balancing(shares="equal"),
        runtime=pl.Runtime(threads=1, quiet=True, capture="off", backend="gloo" if task.device == "cuda" else None),
    ) as trainer:
        for epoch in trainer.epochs(max_steps=1_000_000):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                if trainer.step() is not None:
                    yield


def train(task: Task, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    batches = batches_of(task, rank)
    while True:
        optimizer.zero_grad(set_to_none=True)
        for batch in itertools.islice(batches, task.num_micro_batches):
            (model(batch) / task.num_micro_batches).backward()
        optimizer.step()
        yield


def zero(task: Task, rank: int) -> Loop:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model(task).to(task.device), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return train(task, rank, model, optimizer)


def fsdp(task: Task, rank: int) -> Loop:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(task.device, (task.num_workers,))
    model: Any = make_model(task).to(task.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(task, rank, model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


CONTESTANTS: dict[str, Callable[[Task, int], Loop]] = {
    WHOLE: ours,
    DIVIDED: partial(ours, shard="optimizer"),
    WHOLE_EXACT: partial(ours, exact=True),
    EXACT: partial(ours, shard="optimizer", exact=True),
    ZERO: zero,
    FSDP: fsdp,
}


def measure_speed(task: Task) -> dict[str, list[float]]:
    """In each worker: seconds per step by contestant and turn, of the slowest worker."""
    measured: dict[str, list[float]] = {name: [] for name in SPEED}
    with gloo_group():
        rank = distributed.get_rank()
        loops = {name: CONTESTANTS[name](task, rank) for name in SPEED}
        for loop in loops.values():
            next(loop)
        for turn in range(task.num_turns):
            for name in turn_order(SPEED, turn):
                gc.collect()
                distributed.barrier()
                begin = time.perf_counter()
                for _ in itertools.islice(loops[name], task.num_steps):
                    pass
                distributed.barrier()
                measured[name].append((time.perf_counter() - begin) / task.num_steps)
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]
    return measured


def measure_memory(task: Task, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """In each worker: the peaks of the bare model's forward and backward, and of training, in bytes by contestant."""
    # Modules take memory too: everybody's are loaded before the first peak.
    for module in ("paceline.api.trainer", "torch.distributed.fsdp", "torch.distributed.optim"):
        importlib.import_module(module)
    found = {}
    with gloo_group():
        rank = distributed.get_rank()
        model, batches = make_model(task).to(task.device), batches_of(task, rank)
        with peak_of(task.device) as bare:
            for batch in itertools.islice(batches, NUM_SAMPLED):
                model.zero_grad(set_to_none=True)
                model(batch).backward()
        del model, batch
        for name in names:
            gc.collect()
            loop = CONTESTANTS[name](task, rank)
            next(loop)
            distributed.barrier()
            with peak_of(task.device) as training:
                for _ in itertools.islice(loop, NUM_SAMPLED):
                    pass
            distributed.barrier()
            loop.close()  # type: ignore[attr-defined]
            del loop
            found[name] = {"bare": bare[0], "training": training[0], "state": training[0] - bare[0]}
    return found


@contextmanager
def peak_of(device: str) -> Iterator[list[float]]:
    """The largest memory of this process inside the block, in bytes."""
    peak = [0.0]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        torch.cuda.synchronize()
        peak[0] = float(torch.cuda.max_memory_allocated())
        return
    is_over = threading.Event()

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], proportional_set_size())
            if is_over.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def proportional_set_size() -> float:
    [kilobytes] = re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return 1024.0 * float(kilobytes)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="worker processes (default: 2 4)")
    parser.add_argument("--turns", type=int, default=7, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="per worker and step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the transformer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the transformer (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: memory only, on one GPU")
    parser.add_argument("--part", choices=("speed", "memory"), help="measure only this (default: both)")


def run(options: argparse.Namespace) -> Result:
    """The ratio is that of the speeds with the first number of workers."""
    tasks = [
        Task(
            num_workers,
            options.micro_batch,
            options.micro_batches,
            options.turns,
            options.steps,
            options.width,
            options.layers,
            options.vocabulary,
            options.device,
        )
        for num_workers in options.workers
    ]
    count = sum(parameter.numel() for parameter in make_model(tasks[0]).parameters())
    memory = {} if options.part == "speed" else {str(task.num_workers): _memory(task) for task in tasks}
    if options.part == "memory" or options.device == "cuda":
        result = _memory_result(tasks[0], memory[str(tasks[0].num_workers)], count)
    else:
        result, *others = [_speed(task, count) for task in tasks]
        for task, other in zip(tasks[1:], others, strict=True):
            ratio = other.detail["ratio_by_turn"][DIVIDED]["median"]
            result.detail["notes"].append(f"{task.num_workers} workers: {DIVIDED} over {WHOLE}, by turn: {ratio:.3f}")
            result.detail[f"speed_{task.num_workers}"] = other.detail["spread"]
    result.detail["memory"] = memory
    for task in tasks if memory else ():
        result.detail["notes"] += _lines(task, memory[str(task.num_workers)])
    return result


def _speed(task: Task, count: int) -> Result:
    measured = run_workers(measure_speed, task.num_workers, task)[0]
    samples = task.micro_batch * task.num_micro_batches * task.num_workers
    rates = {name: [samples / seconds for seconds in values] for name, values in measured.items()}
    settings = {**asdict(task), "parameters": count}
    return Result.of("shard", "samples/s", rates, ours=DIVIDED, limit=WHOLE, better="higher", settings=settings)


def _memory_result(task: Task, memory: dict[str, dict[str, float]], count: int) -> Result:
    """A result without speeds: the ratio is that of the state's memory with the fewest workers."""
    values = {name: [found["state"] / 1e6] for name, found in memory.items()}
    settings = {**asdict(task), "parameters": count}
    return Result.of("shard", "MB of state", values, ours=DIVIDED, limit=WHOLE, better="lower", settings=settings)


def _memory(task: Task) -> dict[str, dict[str, float]]:
    """By contestant, of the worker that needs most."""
    # On a GPU torch counts what is allocated, so that one process can measure all.
    teams = [OURS] if task.device == "cuda" else [(name,) for name in CONTESTANTS]
    found: dict[str, dict[str, float]] = {}
    for names in teams:
        workers = run_workers(measure_memory, task.num_workers, task, names)
        found |= {name: max((worker[name] for worker in workers), key=lambda each: each["state"]) for name in names}
    return found


def _lines(task: Task, memory: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for name, found in memory.items():
        base = memory[WHOLE_EXACT if "exact" in name else WHOLE]["state"]
        lines.append(
            f"{task.num_workers} workers, {name}: peak {found['training'] / 1e6:.0f} MB per worker, of which state "
            f"{found['state'] / 1e6:.0f} MB, {found['state'] / base:.3f} of whole"
        )
    return lines
