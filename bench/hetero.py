"""Samples per second of two unequal workers that train one model together: one has 40% of a core.

The limit is what the two do alone: the same model, micro-batches and optimizer at the same time, without any exchange,
their rates summed. They have processes of their own, as who trains alone has; the same loops inside Paceline's
processes, which keep freed memory and have it on huge pages, are listed beside them.

Everyone who trains together has the same global batch, 32 micro-batches per step; the peers divide it equally and
accumulate 16 per worker without exchange. The workers are started once and the contestants take turns inside them,
behind a barrier; a turn is whole steps of a run that goes on from turn to turn, and takes as long as its slowest
worker. Everyone has one intra-op thread, AdamW, and shuffled tokens in memory. Short runs in exact mode show that
measured shares change who computes, not what: the weights are those of an equal split and of one worker.

With --shift nobody is limited at first, then one worker is cut to 40% of a core, then restored, while Paceline trains
on. What each step reaches of the limit at that moment shows how fast the shares follow.

A worker is limited by a cgroup's quota, enforced in periods of 100 ms: steps should take a second or more.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from bench import hetero_shift, scaling
from bench.cpu_quota import CpuQuota, cpu_quota, missing_cpu_quota
from bench.harness import Contestant, Result, Unavailable, isolated, missing_package
from bench.models import LanguageModel
from bench.scaling import LENGTH, VOCABULARY, make_model, make_optimizer
from bench.teams import Team, Turns, run_teams
from bench.unequal import FREE_RANK, NUM_WORKERS, Shares, Task, alone, join, paceline
from bench.workers import gloo_group, run_workers

if TYPE_CHECKING:
    from paceline.run.step.record import StepRecord

WARMUP_STEPS = 2  # first allocations, DDP's second bucket layout
SETTLING_STEPS = 6  # measured shares find their level
EXACT_STEPS = 4

ALONE, DDP, ACCELERATE, OURS, EQUAL = "alone", "torch DDP", "Accelerate", "paceline", "paceline, equal shares"
ALONE_INSIDE = "alone, in our processes"
PEERS: dict[str, tuple[str, ...]] = {DDP: (), ACCELERATE: ("accelerate",)}  # and the packages they need

Loop = Iterator[Any]  # yields after each optimizer step


def accelerate(task: Task) -> Loop:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.num_micro_batches // NUM_WORKERS)
    assert accelerator.num_processes == NUM_WORKERS, accelerator.state
    module = make_model()
    loader: DataLoader[Any] = DataLoader(task.tokens(), batch_size=task.micro_batch, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, batches = accelerator.prepare(module, make_optimizer(module.parameters()), loader)
    while True:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield


def noting_shares(loop: Iterator[StepRecord], shares: list[tuple[int, ...]]) -> Loop:
    for record in loop:
        shares.append(record.shares)
        yield


def together(task: Task, make_loop: Callable[[], Loop], num_untimed: int) -> Contestant:
    """Seconds per step of this worker over a turn, started together with the other."""
    loop = make_loop()

    def measure(num_steps: int) -> float:
        distributed.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        return (time.perf_counter() - start) / num_steps

    measure(num_untimed)
    step_s = torch.tensor(measure(1))
    distributed.all_reduce(step_s, distributed.ReduceOp.MAX)  # so that all workers agree on the number of steps
    return partial(measure, math.ceil(task.seconds / step_s.item()))


@dataclass(frozen=True)
class ExactRun:
    """What a short run in exact mode ended with, and how its steps were divided."""

    weights_sha256: str
    shares: list[tuple[int, ...]]


def exact_run(task: Task, shares: Shares) -> ExactRun:
    """Train a small model for some steps in the world this process is in."""
    import paceline as pl

    seen: list[tuple[int, ...]] = []
    with pl.Trainer.setup(
        partial(LanguageModel, vocabulary=VOCABULARY, length=LENGTH, width=64, num_layers=2),
        make_optimizer,
        data=task.tokens()[: EXACT_STEPS * task.global_batch],
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        balancing=pl.Balancing(shares=shares),
        exact=True,
    ) as trainer:
        trainer.every(1, lambda record: seen.append(record.shares))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                trainer.step()
        return ExactRun(sha256_of(trainer.model), seen)


def sha256_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class Measured:
    """One worker's turns: samples/s alone, else seconds per step. `shares` are those of every step of ours."""

    turns: dict[str, list[float]]
    shares: list[tuple[int, ...]]
    exact: dict[str, ExactRun]


def work_alone(task: Task, quota: CpuQuota, turns: Turns) -> list[float]:
    with gloo_group():
        join(quota)
        return turns.alternate(lambda: {ALONE: isolated(partial(alone, task))}, task.num_turns)[ALONE]


def work_together(task: Task, peers: Sequence[str], quota: CpuQuota, turns: Turns) -> Measured:
    with gloo_group():
        rank = join(quota)
        exact: dict[str, ExactRun] = {}
        shares: list[tuple[int, ...]] = []
        loops: dict[str, Callable[[], Loop]] = {
            DDP: lambda: scaling.torch_ddp(task.equal_split, rank),
            ACCELERATE: lambda: accelerate(task),
            OURS: lambda: noting_shares(paceline(task), shares),
            EQUAL: lambda: paceline(task, shares="equal"),
        }

        def build() -> dict[str, Contestant]:
            exact["2 workers, measured shares"] = exact_run(task, "measured")
            exact["2 workers, equal shares"] = exact_run(task, "equal")
            contestants = {ALONE_INSIDE: isolated(partial(alone, task))}
            for name in (*peers, OURS, EQUAL):
                num_untimed = SETTLING_STEPS if name == OURS else WARMUP_STEPS
                contestants[name] = isolated(partial(together, task, loops[name], num_untimed))
            return contestants

        return Measured(turns.alternate(build, task.num_turns), shares, exact)


def samples_per_s(name: str, values: Sequence[float], task: Task) -> float:
    """Of all workers, from what each one measured in the same turn."""
    return sum(values) if name in (ALONE, ALONE_INSIDE) else task.global_batch / max(values)


def whole_number_limit(speeds: Sequence[float], num_micro_batches: int) -> float:
    """How much of the summed speed the best division into whole micro-batches reaches."""
    from paceline.plan.shares import shares

    seconds = max(count / speed for count, speed in zip(shares(num_micro_batches, speeds), speeds, strict=True))
    return num_micro_batches / seconds / sum(speeds)


def compare_exact(by_rank: Sequence[Mapping[str, ExactRun]], one_worker: ExactRun) -> dict[str, Any]:
    """Whether all replicas of all runs ended with the same weights, their hashes, and how the steps were divided."""
    hashes = {name: [runs[name].weights_sha256 for runs in by_rank] for name in by_rank[0]}
    hashes["1 worker"] = [one_worker.weights_sha256]
    return {
        "exact_weights_equal": len(set(itertools.chain(*hashes.values()))) == 1,
        "exact_weights_sha256": hashes,
        "exact_shares": {name: run.shares for name, run in by_rank[FREE_RANK].items()},
    }


def contest(task: Task, peers: Sequence[str]) -> Result:
    skipped = {name: reason for name in peers if (reason := missing_package(*PEERS[name]))}
    with cpu_quota(task.cores) as quota:
        taking_part = [name for name in peers if name not in skipped]
        alone_by_rank, by_rank = run_teams(
            Team(work_alone, NUM_WORKERS, (task, quota)),
            Team(work_together, NUM_WORKERS, (task, taking_part, quota)),
        )
    (one_worker,) = run_workers(exact_run, 1, task, "measured")

    turns = {ALONE: list(zip(*alone_by_rank, strict=True))}
    turns |= {name: list(zip(*(own.turns[name] for own in by_rank), strict=True)) for name in by_rank[0].turns}
    result = Result.of(
        "hetero",
        "samples/s",
        {name: [samples_per_s(name, values, task) for values in by_turn] for name, by_turn in turns.items()},
        ours=OURS,
        limit=ALONE,
        better="higher",
        settings=task.settings(),
        packages=("accelerate",),
        skipped=skipped,
        not_peers=(EQUAL, ALONE_INSIDE),
    )
    speeds = [statistics.median(own) for own in alone_by_rank]
    shares = by_rank[FREE_RANK].shares
    detail = {
        "ratio_to_equal_shares": result.ours / result.detail["spread"][EQUAL]["median"],
        "ratio_to_alone_in_our_processes": result.ours / result.detail["spread"][ALONE_INSIDE]["median"],
        "alone_samples_per_s": speeds,
        "whole_number_limit": whole_number_limit(speeds, task.num_micro_batches),
        "shares": shares,
        **compare_exact([own.exact for own in by_rank], one_worker),
    }
    result.detail.update(detail)
    result.detail["notes"] += [
        f"alone {' + '.join(f'{speed:.2f}' for speed in speeds)} samples/s, of which whole micro-batches reach "
        f"{detail['whole_number_limit']:.3f}; last shares {shares[-1]}",
        f"weights in exact mode with measured shares, equal shares and one worker: "
        f"{'equal' if detail['exact_weights_equal'] else 'NOT EQUAL'}",
    ]
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shift", action="store_true", help="cut the quota in the middle of a run and restore it")
    parser.add_argument("--quota", type=float, default=0.4, help="cores of the limited worker (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=32, help="per step, of all workers (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=15, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn, at least (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument(
        "--steps", type=int, default=20, help="with --shift: before, between and after changes (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> Result:
    task = Task(options.quota, options.micro_batch, options.micro_batches, options.turns, options.seconds)
    if reason := missing_cpu_quota():
        raise Unavailable(reason)
    return hetero_shift.shift(task, options.steps) if options.shift else contest(task, options.peers)
