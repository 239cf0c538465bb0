"""Tokens per second of two unequal workers on one GPU: CUDA MPS gives one 70% of the multiprocessors, the other 30%.

The limit is what the two do alone: the same GPT-2 (124M, TF32), micro-batches and optimizer at the same time, without
any exchange, their rates summed. Everyone who trains together has the same global batch, by default half a million
tokens, GPT-2's own; DDP divides it equally and accumulates without exchange. Both exchange over Gloo, since NCCL
refuses workers that share a GPU. Contestants take turns inside the two workers, behind a barrier.

In TF32, since cuBLAS's bf16 and fp16 products came out wrong (checked against float64) under most of MPS's
percentages on the H200 this was written on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from bench.harness import Contestant, Result, Unavailable, alternate, isolated
from bench.hetero import whole_number_limit
from bench.workers import gloo_group, run_workers

NUM_WORKERS = 2
LENGTH, VOCABULARY = 1024, 50257
ENDLESS = 10**9
WARMUP_STEPS, SETTLING_STEPS = 2, 5
ALONE, DDP, OURS, EQUAL = "alone", "torch DDP", "paceline", "paceline, equal shares"

Loop = Iterator[Any]  # yields after each optimizer step


@dataclass(frozen=True)
class Task:
    """`percentages`: of the multiprocessors, by rank. A step has `num_micro_batches` of all workers together."""

    percentages: tuple[int, ...]
    micro_batch: int
    num_micro_batches: int
    num_turns: int
    seconds: float

    @property
    def per_worker(self) -> int:
        return self.num_micro_batches // NUM_WORKERS

    @property
    def tokens_per_step(self) -> int:
        return self.num_micro_batches * self.micro_batch * LENGTH


def make_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)).cuda()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def make_tokens(task: Task) -> Tensor:
    """Some steps' worth, on the host."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (4 * task.num_micro_batches * task.micro_batch, LENGTH), generator=generator)


def batches(task: Task) -> Iterator[Tensor]:
    tokens = make_tokens(task)
    for start in itertools.cycle(range(0, len(tokens), task.micro_batch)):
        yield tokens[start : start + task.micro_batch].cuda(non_blocking=True)


def torch_ddp(task: Task) -> Loop:
    model = nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.parameters())
    source = batches(task)
    while True:
        for number, batch in enumerate(itertools.islice(source, task.per_worker), start=1):
            with nullcontext() if number == task.per_worker else model.no_sync():
                (loss_of(model, batch) / task.per_worker).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def paceline(task: Task, *, shares: Any = "measured", reports: list[Any] | None = None) -> Loop:
    import paceline as pl

    with pl.Trainer.setup(
        make_model,
        make_optimizer,
        data=make_tokens(task),
        global_batch=task.num_micro_batches * task.micro_batch,
        micro_batch=task.micro_batch,
        balancing=pl.Balancing(shares=shares),
    ) as trainer:
        seen: list[tuple[int, ...]] = []
        try:
            for epoch in trainer.epochs(ENDLESS):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    if record := trainer.step():
                        seen.append(record.shares)
                        yield
        finally:
            if reports is not None:
                reports += [seen, trainer.report()]


def alone(task: Task) -> Contestant:
    """Tokens per second of this worker by itself, while the other works by itself, both equally long."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    source = batches(task)

    def measure() -> float:
        distributed.barrier()
        start = time.perf_counter()
        num_done, elapsed_s = 0, 0.0
        while elapsed_s < task.seconds:
            (loss_of(model, next(source)) / task.per_worker).backward()
            num_done += 1
            if num_done % task.per_worker == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            elapsed_s = time.perf_counter() - start
        return num_done * task.micro_batch * LENGTH / elapsed_s

    measure()
    return measure


def together(task: Task, loop: Loop, num_untimed: int) -> Contestant:
    """Tokens per second of all workers over a turn, started together."""

    def measure(num_steps: int) -> float:
        torch.cuda.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        torch.cuda.synchronize()
        slowest_s = torch.tensor(time.perf_counter() - start)
        distributed.all_reduce(slowest_s, distributed.ReduceOp.MAX)
        return num_steps * task.tokens_per_step / slowest_s.item()

    measure(num_untimed)
    return partial(measure, max(1, round(task.seconds * measure(1) / task.tokens_per_step)))


def worker(task: Task) -> tuple[dict[str, list[float]], list[Any]]:
    # Read when the CUDA context is made.
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(task.percentages[int(os.environ["RANK"])])
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // NUM_WORKERS))
    with gloo_group():
        reports: list[Any] = []
        makers: dict[str, Callable[[], Contestant]] = {
            ALONE: partial(alone, task),
            DDP: lambda: together(task, torch_ddp(task), WARMUP_STEPS),
            OURS: lambda: together(task, paceline(task, reports=reports), SETTLING_STEPS),
            EQUAL: lambda: together(task, paceline(task, shares="equal"), WARMUP_STEPS),
        }
        contestants = {name: isolated(make) for name, make in makers.items()}
        turns = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        return turns, reports


@contextmanager
def mps_daemon() -> Iterator[None]:
    """CUDA's multi-process service, for processes started meanwhile."""
    folder = tempfile.mkdtemp(prefix="paceline-mps-")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ.update(variables)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)
        for name in variables:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)


def contest(task: Task) -> Result:
    with mps_daemon():
        by_rank = run_workers(worker, NUM_WORKERS, task)
    measured: Sequence[dict[str, list[float]]] = [turns for turns, _ in by_rank]
    combined = {name: measured[0][name] for name in measured[0]}
    combined[ALONE] = [sum(values) for values in zip(*(own[ALONE] for own in measured), strict=True)]
    result = Result.of(
        "mps",
        "tokens/s",
        combined,
        ours=OURS,
        limit=ALONE,
        better="higher",
        settings={**asdict(task), "model": "GPT-2 124M, TF32", "length": LENGTH, "backend": "gloo"},
        not_peers=(EQUAL,),
    )
    speeds = [statistics.median(own[ALONE]) for own in measured]
    shares, report = by_rank[0][1]
    limit = whole_number_limit(speeds, task.num_micro_batches)
    result.detail.update(alone_tokens_per_s=speeds, whole_number_limit=limit, shares=shares, report=asdict(report))
    result.detail["notes"] += [
        f"alone {' + '.join(f'{speed:.0f}' for speed in speeds)} tokens/s, of which whole micro-batches reach "
        f"{limit:.3f}; last shares {shares[-1]}",
        str(report),
    ]
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--percentages", type=int, nargs=NUM_WORKERS, default=[70, 30], help="default: 70 30")
    parser.add_argument("--micro-batches", type=int, default=64, help="per step, of all workers (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise Unavailable("nvidia-cuda-mps-control was not found: it needs an NVIDIA GPU and CUDA's MPS")
    return contest(
        Task(tuple(options.percentages), options.micro_batch, options.micro_batches, options.turns, options.seconds)
    )
