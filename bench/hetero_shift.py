"""How fast shares follow when a worker's speed changes in the middle of a run: `python -m bench hetero --shift`."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

from torch import distributed

from bench.cpu_quota import CpuQuota, cpu_quota
from bench.harness import Result, Spread, alternate, circumstances, isolated
from bench.unequal import FREE_RANK, NUM_WORKERS, Task, alone, join, paceline
from bench.workers import gloo_group, run_workers

GOAL = 0.9  # of the limit that holds after a change, to be exceeded within so many steps
GOAL_STEPS = 6

NO_LIMIT = "no limit"


@dataclass(frozen=True)
class Phase:
    """Steps under one limit of a worker's cores."""

    begins: str
    cores: float | None

    @property
    def limit(self) -> str:
        return NO_LIMIT if self.cores is None else f"{self.cores:g} of a core"


def phases_of(task: Task) -> list[Phase]:
    return [Phase("start", None), Phase("cut", task.cores), Phase("restored", None)]


@dataclass(frozen=True)
class Trained:
    """One worker's run. Times are of the machine's clock, which is the same for all workers."""

    alone: dict[str, list[float]]  # samples/s under each limit
    start_s: float
    ends_s: list[float]  # of its steps
    shares: list[tuple[int, ...]]


def worker(task: Task, num_steps: int, quota: CpuQuota) -> Trained:
    """`num_steps` of training in each phase; what the workers do alone is measured before and after."""
    with gloo_group():
        rank = join(quota)

        def limit(cores: float | None) -> None:
            if rank == FREE_RANK:  # the limited worker may be halted just now
                quota.limit(cores)

        measure_alone = isolated(partial(alone, task))

        def alone_under(cores: float | None) -> float:
            limit(cores)
            return measure_alone()

        contestants = {phase.limit: partial(alone_under, phase.cores) for phase in phases_of(task)}
        num_turns = math.ceil(task.num_turns / 2)
        before = alternate(contestants, num_turns)
        limit(None)
        with closing(paceline(task)) as loop:
            next(loop)  # set-up
            distributed.barrier()
            start_s = time.monotonic()
            ends_s, shares = [], []
            for phase in phases_of(task):
                limit(phase.cores)
                for record in itertools.islice(loop, num_steps):
                    ends_s.append(time.monotonic())
                    shares.append(record.shares)
        after = alternate(contestants, num_turns)
        return Trained({name: before[name] + after[name] for name in before}, start_s, ends_s, shares)


@dataclass(frozen=True)
class Step:
    """`relative` is its throughput where the present limit is 1."""

    step: int
    limit: str
    seconds: float
    shares: tuple[int, ...]
    relative: float


def steps_of(task: Task, by_rank: Sequence[Trained], sums: Mapping[str, float], num_steps: int) -> list[Step]:
    """A step takes from the end of the one before to its own, each being that of the last worker."""
    ends_s = [max(ends) for ends in zip(*(own.ends_s for own in by_rank), strict=True)]
    seconds = [end - begin for begin, end in itertools.pairwise([max(own.start_s for own in by_rank), *ends_s])]
    limits = [phase.limit for phase in phases_of(task) for _ in range(num_steps)]
    return [
        Step(number, limit, step_s, shares, task.global_batch / step_s / sums[limit])
        for number, limit, step_s, shares in zip(
            range(1, len(limits) + 1), limits, seconds, by_rank[FREE_RANK].shares, strict=True
        )
    ]


@dataclass(frozen=True)
class Change:
    """How the throughput, relative to the new limit, followed a change.

    `first_above`: the first step above the goal, counted from the change; None if none was. `median` and `part_above`
    (the goal) are over the steps after the sixth.
    """

    name: str
    limit: str
    first_above: int | None
    median: float
    part_above: float
    first_six: list[float]

    @classmethod
    def of(cls, phase: Phase, relative: Sequence[float]) -> Change:
        """`relative`: of the steps since the change."""
        later = relative[GOAL_STEPS:]
        return cls(
            phase.begins,
            phase.limit,
            next((number for number, value in enumerate(relative, start=1) if value > GOAL), None),
            statistics.median(later),
            sum(value > GOAL for value in later) / len(later),
            list(relative[:GOAL_STEPS]),
        )


class ShiftResult(Result):
    """`ours` over `limit` is the median of the steps after the sixth, after the change where it is smaller."""

    def table(self) -> str:
        detail = self.detail
        lines = [f"{self.bench}: throughput of a step, relative to what the workers do alone under the same limit"]
        lines.append(f"{'':<24} {'alone':>7} {'> ' + str(GOAL) + ' at step':>13} {'median 7..':>10}   steps 1 to 6")
        for change in detail["changes"]:
            first_six = " ".join(f"{value:.2f}" for value in change["first_six"])
            lines.append(
                f"{change['name'] + ', ' + change['limit']:<24} {detail['sums'][change['limit']]:>7.2f} "
                f"{change['first_above'] or 'never':>13} {change['median']:>10.3f}   {first_six}"
            )
        shares = itertools.groupby(detail["steps"], key=lambda step: (step["limit"], step["shares"]))
        runs = [f"{len(list(steps))} x {own} {limit}" for (limit, own), steps in shares]
        return "\n".join([*lines, "shares: " + ", ".join(runs), *self.footer()])


def shift(task: Task, num_steps: int) -> Result:
    if task.cores is None:
        raise ValueError("quota=1 is no limit, so nothing would shift: choose quota < 1")
    if num_steps <= GOAL_STEPS:
        raise ValueError(f"steps={num_steps} ends before step {GOAL_STEPS + 1} after a change: choose more")
    with cpu_quota() as quota:
        by_rank: list[Trained] = run_workers(worker, NUM_WORKERS, task, num_steps, quota)
    alone_by_limit = {name: [own.alone[name] for own in by_rank] for name in by_rank[0].alone}
    sums = {name: statistics.median(map(sum, zip(*own, strict=True))) for name, own in alone_by_limit.items()}
    steps = steps_of(task, by_rank, sums, num_steps)
    changes = [
        Change.of(phase, [step.relative for step in steps[number * num_steps : (number + 1) * num_steps]])
        for number, phase in enumerate(phases_of(task))
        if number > 0
    ]
    worse = min(changes, key=lambda change: change.median)
    detail = {
        "changes": [asdict(change) for change in changes],
        "sums": sums,
        "alone_samples_per_s": {
            name: [asdict(Spread.of(values)) for values in own] for name, own in alone_by_limit.items()
        },
        "steps": [asdict(step) for step in steps],
        **circumstances(task.settings() | {"steps_per_phase": num_steps}),
    }
    limit = sums[worse.limit]
    return ShiftResult("hetero --shift", "samples/s", worse.median * limit, limit, {}, detail)
