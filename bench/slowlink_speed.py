"""Samples per second of the ways to train together over links of limited speed.

The contestants take turns inside the workers. A turn begins with an untimed exchange, so that the timed steps find the
link as an exchange before them has left it: with one under way, if the way overlaps exchanges with training. The timed
steps are whole intervals between exchanges. Afterwards the limit is lifted until nothing is on its way any more, so
that no exchange takes place in another's turn.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from bench.cpu_quota import CpuQuota
from bench.far_apart import Task
from bench.far_apart_ways import (
    CADENCE,
    CHOOSING,
    IN_EVERY_STEP,
    NO_TALK,
    NO_TALK_OURS,
    interval_of,
    ring_bytes_per_step,
    sent_bytes,
    timed_loop,
)
from bench.harness import Contestant, alternate, isolated
from bench.namespaces import Link
from bench.workers import gloo_group

if TYPE_CHECKING:
    from paceline import StepRecord

WARMUP_STEPS = 3  # first allocations, DDP's second bucket layout, PowerSGD's start
CALIBRATION_STEPS = 8  # until the cadence has found its level, and the slow link its choice
SHORT_TURN = 4  # steps of those who exchange in every step; each waits for the link
MAX_LINK_S = 8.0  # in a turn
PROBE_BYTES = 128 << 10
QUIET_S, QUIET_BYTES = 0.1, 16 << 10  # no more was sent in this time: heartbeats, no exchange

Turn = tuple[str, float | None]  # a way, and the limit in Mbit/s


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


@dataclass
class Seen:
    """What a way of ours has told about itself, and what it has sent."""

    cadence: list[CadenceStep] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0  # in turns
    num_samples: int = 0

    @property
    def bytes_per_sample(self) -> float:
        return self.num_bytes / self.num_samples

    def see(self, name: str, told: Any) -> None:
        if name == CADENCE and hasattr(told, "timings"):
            self.cadence.append(CadenceStep.of(told))
        if getattr(told, "name", "") == "averaging":
            self.choice.update(told.details)


@dataclass(frozen=True)
class Speeds:
    """One worker's view: samples/s by way and limit, turn by turn. Of its own samples with `NO_TALK`, else of all."""

    link_mbit_per_s: dict[float, float]
    turns: dict[Turn, list[float]]
    choices: dict[float | None, dict[str, Any]]
    cadence_overheads: dict[float | None, float]
    bytes_per_sample: dict[Turn, float]  # that this host has sent


def link_mbit_per_s(mbit: float = 1000.0) -> float:
    """What this worker can send to the next one while it receives as much from the one before. mbit: expected."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    outgoing, incoming = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8)

    def exchange() -> None:
        # The receiving first: Gloo tells the other side that it may send, and would do so behind our own bytes.
        received = distributed.irecv(incoming, (rank - 1) % size)
        sent = distributed.isend(outgoing, (rank + 1) % size)
        for pending in (received, sent):
            assert pending is not None
            pending.wait()

    distributed.barrier()
    exchange()  # uses up what may pass at once
    num_rounds, start = max(1, min(8, int(1e6 * mbit / 8 / PROBE_BYTES))), time.perf_counter()
    for _ in range(num_rounds):  # without a pause, in which the limit would allow another burst
        exchange()
    return 8e-6 * PROBE_BYTES * num_rounds / (time.perf_counter() - start)


def set_limit(link: Link, mbit: float | None) -> None:
    distributed.barrier()
    if distributed.get_rank() == 0:
        link.limit(mbit)
    distributed.barrier()


def drain(link: Link) -> None:
    """Let everything pass that is on its way, on all workers."""
    if distributed.get_rank() == 0:
        link.limit(None)
    before = -QUIET_BYTES
    while (now := sent_bytes()) - before >= QUIET_BYTES:
        before = now
        time.sleep(QUIET_S)
    distributed.barrier()


def turn_of(task: Task, name: str, num_steps: int) -> tuple[int, int]:
    """Untimed and timed steps of a turn of about `num_steps` steps."""
    if name in (NO_TALK, NO_TALK_OURS):
        return 1, num_steps
    if name in (*IN_EVERY_STEP, CADENCE):
        return 1, SHORT_TURN
    interval = interval_of(task, name)
    return interval, interval * max(1, round(num_steps / interval))


def is_timed(task: Task, name: str, mbit: float | None, num_steps: int) -> bool:
    """Whether a turn takes the link no longer than MAX_LINK_S."""
    if mbit is None:
        return True
    num_bytes = sum(turn_of(task, name, num_steps)) * ring_bytes_per_step(task, name)
    return 8e-6 * num_bytes / mbit <= MAX_LINK_S


def advance(loop: Iterator[int], num_steps: int) -> int:
    return sum(itertools.islice(loop, num_steps))


def started(link: Link, task: Task, name: str, mbit: float | None, seen: Seen) -> Iterator[int]:
    """A way at the end of an interval, ready for its first turn."""
    loop = timed_loop(task, name, partial(seen.see, name))
    advance(loop, 1)  # sends the weights to all, which takes long on a slow link
    if name in CHOOSING:
        set_limit(link, mbit)
    interval = interval_of(task, name)
    warmup = CALIBRATION_STEPS if name in CHOOSING else WARMUP_STEPS if interval == 1 else interval
    advance(loop, 0 if name == NO_TALK_OURS else warmup - 1)
    drain(link)
    return loop


def contestant(
    link: Link, task: Task, loop: Iterator[int], name: str, mbit: float | None, num_steps: int, seen: Seen
) -> Contestant:
    num_untimed, num_timed = turn_of(task, name, num_steps)

    def measure() -> float:
        set_limit(link, mbit)
        before = sent_bytes()
        num_before = advance(loop, num_untimed)
        start = time.perf_counter()
        num_samples = advance(loop, num_timed)
        rate = num_samples / (time.perf_counter() - start)
        drain(link)
        seen.num_bytes += sent_bytes() - before
        seen.num_samples += num_before + num_samples
        if distributed.get_rank() == 0:
            print(f"{name}, {mbit} Mbit/s: {rate:.1f} samples/s", file=sys.stderr, flush=True)
        return rate

    return measure


def key_of(name: str, mbit: float | None) -> Turn:
    """Of a loop: most ways do the same whatever the link, so that one loop serves for all limits."""
    return name, mbit if name in CHOOSING else None


def speed_worker(
    link: Link, quotas: Sequence[CpuQuota], task: Task, turns: Sequence[Turn], num_turns: int, num_steps: int
) -> Speeds:
    rank = int(os.environ["RANK"])
    if quotas:
        quotas[rank].add(os.getpid())
    link.join(rank)
    with gloo_group():
        links = {}
        for mbit in dict.fromkeys(mbit for _, mbit in turns if mbit is not None):
            set_limit(link, mbit)
            links[mbit] = link_mbit_per_s(mbit)
        drain(link)
        loops: dict[Turn, Iterator[int]] = {}
        seen: dict[Turn, Seen] = {}
        contestants: dict[Turn, Contestant] = {}
        for name, mbit in turns:

            def build(name: str = name, mbit: float | None = mbit) -> Contestant:
                key = key_of(name, mbit)
                if key not in loops:
                    seen[key] = Seen()
                    loops[key] = started(link, task, name, mbit, seen[key])
                return contestant(link, task, loops[key], name, mbit, num_steps, seen[key])

            contestants[name, mbit] = isolated(build)
        names = {f"{name} {mbit}": (name, mbit) for name, mbit in turns}
        by_name = alternate({name: contestants[turn] for name, turn in names.items()}, num_turns)
        for loop in loops.values():  # they end here, while the group they talk over is still there
            loop.close()  # type: ignore[attr-defined]
    return Speeds(
        links,
        {names[name]: values for name, values in by_name.items()},
        {mbit: each.choice for (_, mbit), each in seen.items() if each.choice},
        {
            mbit: overhead_of(each.cadence[CALIBRATION_STEPS:])
            for (_, mbit), each in seen.items()
            if len(each.cadence) > CALIBRATION_STEPS + 1
        },
        {(name, mbit): seen[key_of(name, mbit)].bytes_per_sample for name, mbit in turns},
    )
