"""Samples per second of two workers on a slow link, and the loss that each way of training together ends with.

Two network namespaces are two hosts with one worker each, and 100 Mbit/s in each direction between them. The limit is
two workers that never talk: each trains on its half by itself, their rates summed. Everyone who trains together has
the same model, micro-batches, optimizer and global batch; only with a cadence the batch is what the link makes it.

Speed: the contestants take turns inside the workers, behind a barrier; a turn is whole steps of a run that goes on
from turn to turn, and takes as long as its slowest worker. With averaging a turn is a whole round, from the middle of
one to the middle of the next: an exchange that overlaps with training begins and ends within it.

Loss: everyone trains once over the same samples of a fixed random Markov source, from the same weights, and is
evaluated on samples held out. The link does not change what they compute, so its limit is lifted for this; except for
the cadence, whose steps follow it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import distributed

from bench.far_apart import (
    CADENCE,
    CONTESTANTS,
    DDP,
    GRADIENTS,
    NO_TALK,
    OVERHEAD_TARGET,
    OVERLAPPED_BF16,
    SYNCHRONOUS,
    Task,
    final_loss,
    least_loss,
    loss_of,
    timed_loop,
)
from bench.harness import Contestant, Result, Unavailable, alternate, isolated
from bench.namespaces import NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.workers import gloo_group, run_workers

if TYPE_CHECKING:
    from paceline import StepRecord

WARMUP_STEPS = 2  # first allocations, DDP's second bucket layout
SYNCHRONOUS_STEPS = 4  # in a turn; each waits for the link
CALIBRATION_STEPS = 3  # until the cadence has found its level
PROBE_BYTES = 12 << 20

OURS = OVERLAPPED_BF16


def link_mbit_per_s() -> float:
    """What this worker can send while it receives as much."""
    other = 1 - distributed.get_rank()
    outgoing, incoming = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8)
    distributed.barrier()
    start = time.perf_counter()
    # The receiving first: Gloo tells the other side that it may send, and would do so behind our own bytes.
    for pending in (distributed.irecv(incoming, other), distributed.isend(outgoing, other)):
        assert pending is not None
        pending.wait()
    return 8e-6 * PROBE_BYTES / (time.perf_counter() - start)


@dataclass(frozen=True)
class CadenceStep:
    """Shares and times by rank. A worker's `sync_s` is that of the step before: it can only tell afterwards."""

    shares: tuple[int, ...]
    micro_batch_s: tuple[float, ...]
    sync_s: tuple[float, ...]

    @classmethod
    def of(cls, record: StepRecord) -> CadenceStep:
        timings = record.timings
        return cls(record.shares, tuple(t.micro_batch for t in timings), tuple(t.sync for t in timings))


def overhead_of(steps: Sequence[CadenceStep]) -> float:
    """Time in exchanges over the compute time of the slowest worker; of the last step the exchange is not known."""
    pairs = list(itertools.pairwise(steps))
    # Who comes last to an exchange waits for nobody: its time is what the exchange itself takes.
    sync_s = sum(min(after.sync_s) for _, after in pairs)
    compute_s = sum(max(n * s for n, s in zip(step.shares, step.micro_batch_s, strict=True)) for step, _ in pairs)
    return sync_s / compute_s


def turns_of(task: Task, name: str) -> tuple[int, int]:
    """Steps before the first turn, and in a turn."""
    if name in SYNCHRONOUS:
        return WARMUP_STEPS, SYNCHRONOUS_STEPS
    if name == CADENCE:
        return CALIBRATION_STEPS, 1
    return task.every + task.every // 2, task.every


def contestant(task: Task, name: str, cadence: list[CadenceStep]) -> Contestant:
    """Samples per second over a turn, started together with the other worker. `cadence` takes the cadence's steps."""

    def see(record: StepRecord) -> None:
        if name == CADENCE:
            cadence.append(CadenceStep.of(record))

    loop = timed_loop(task, name, see)

    def measure(num_steps: int) -> float:
        distributed.barrier()
        start = time.perf_counter()
        num_samples = sum(itertools.islice(loop, num_steps))
        return num_samples / (time.perf_counter() - start)

    num_untimed, num_steps = turns_of(task, name)
    measure(num_untimed)
    return partial(measure, num_steps)


@dataclass(frozen=True)
class Measured:
    """One worker's view. Its turns in samples/s are of its own samples with `NO_TALK`, else of everybody's."""

    link_mbit_per_s: float
    turns: dict[str, list[float]]
    cadence: list[CadenceStep]
    losses: dict[str, float]


def lift_limit(link: Link) -> None:
    distributed.barrier()
    if distributed.get_rank() == 0:
        link.limit(None)
    distributed.barrier()


def worker(link: Link, task: Task) -> Measured:
    link.join(int(os.environ["RANK"]))
    with gloo_group():
        link_speed = link_mbit_per_s()
        cadence: list[CadenceStep] = []
        contestants = {name: isolated(partial(contestant, task, name, cadence)) for name in CONTESTANTS}
        turns = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        losses = {CADENCE: final_loss(task, CADENCE)}
        lift_limit(link)
        losses |= {name: final_loss(task, name) for name in CONTESTANTS if name != CADENCE}
        return Measured(link_speed, turns, cadence, losses)


def samples_per_s(name: str, values: Sequence[float]) -> float:
    """Of all workers, from what each one measured in the same turn."""
    return sum(values) if name == NO_TALK else min(values)


def link_bound(task: Task, no_talk: float) -> tuple[float, float]:
    """Seconds that an exchange in fp32 takes, and the part of the no-talk speed left to who waits for it each round."""
    exchange_s = 8e-6 * 4 * task.num_parameters / task.mbit
    round_s = task.every * task.global_batch / no_talk
    return exchange_s, round_s / (round_s + exchange_s)


def contest(task: Task) -> Result:
    with slow_link(task.mbit) as link:
        by_rank: list[Measured] = run_workers(worker, NUM_HOSTS, link, task)
    turns = {name: list(zip(*(own.turns[name] for own in by_rank), strict=True)) for name in CONTESTANTS}
    result = Result.of(
        "slowlink",
        "samples/s",
        {name: [samples_per_s(name, values) for values in by_turn] for name, by_turn in turns.items()},
        ours=OURS,
        limit=NO_TALK,
        better="higher",
        settings=task.settings(),
        not_peers=tuple(name for name in CONTESTANTS if name not in (NO_TALK, DDP)),
    )
    spread = result.detail["spread"]
    result.detail["speed_ratios"] = {name: spread[name]["median"] / result.limit for name in CONTESTANTS}
    add_link(result, task, [own.link_mbit_per_s for own in by_rank])
    add_cadence(result, task, by_rank[0].cadence)
    # Who trained together ended with one loss; those who never talked, each with its own.
    add_losses(result, task, {name: statistics.fmean(own.losses[name] for own in by_rank) for name in CONTESTANTS})
    return result


def add_link(result: Result, task: Task, mbit_per_s: Sequence[float]) -> None:
    exchange_s, bound = link_bound(task, result.limit)
    result.detail.update(link_mbit_per_s=mbit_per_s, exchange_s=exchange_s, blocking_bound=bound)
    result.detail["notes"].append(
        f"link: {' and '.join(f'{speed:.1f}' for speed in mbit_per_s)} Mbit/s at the same time; an exchange in fp32 "
        f"takes {exchange_s:.3f} s, which leaves {bound:.3f} of the limit to who waits every {task.every} steps"
    )
    if exchange_s > task.every * task.global_batch / result.limit / 2:
        result.detail["notes"].append("an exchange takes longer than half a round: overlapped figures are too good")


def add_cadence(result: Result, task: Task, steps: Sequence[CadenceStep]) -> None:
    shares = steps[-1].shares
    overhead = overhead_of(steps[CALIBRATION_STEPS:])
    result.detail["cadence"] = {
        "overhead": overhead,
        "overhead_over_target": overhead / OVERHEAD_TARGET,  # the goal: at most 1.5
        "steps": [asdict(step) for step in steps],
    }
    result.detail["notes"].append(
        f"cadence: overhead {overhead:.3f}, target {OVERHEAD_TARGET}; its last step had {shares} micro-batches: "
        f"{task.num_samples} samples are {task.num_samples / task.micro_batch / sum(shares):.1f} such steps"
    )


def add_losses(result: Result, task: Task, losses: Mapping[str, float]) -> None:
    before = loss_of(task.make_model())
    to_synchronous = {name: loss / losses[GRADIENTS] for name, loss in losses.items()}
    result.detail.update(losses=losses, loss_ratios=to_synchronous, loss_before=before, least_loss=least_loss())
    result.detail["notes"].append(
        f"{'':<26} {'loss':>9} {'/ synchronous':>14}   after {task.num_samples} samples; {before:.3f} before, "
        f"{least_loss():.3f} is the least possible"
    )
    for name, loss in sorted(losses.items(), key=lambda item: item[1]):
        result.detail["notes"].append(f"{name:<26} {loss:>9.4f} {to_synchronous[name]:>14.3f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=100, help="of the link, in Mbit/s (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the transformer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--every", type=int, default=32, help="steps between averages (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8192, help="to train on for the loss (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="alternations (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only show that it runs: a tiny model, few samples")


def task_of(options: argparse.Namespace) -> Task:
    if options.quick:
        return Task(options.mbit, 32, 1, micro_batch=4, every=8, num_samples=256, num_turns=2)
    return Task(
        options.mbit,
        options.width,
        options.layers,
        options.micro_batch,
        options.every,
        options.samples,
        options.turns,
    )


def run(options: argparse.Namespace) -> Result:
    task = task_of(options)
    if reason := missing_slow_link():
        raise Unavailable(reason)
    return contest(task)
