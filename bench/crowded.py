"""Samples per second of more workers than cores, against as many workers as cores: who waits must not burn a core.

Two teams train the model of `bench scaling`, one of them with twice as many workers, and every worker takes a
micro-batch per step. Each team has its own processes, started once; the teams take turns, and the one whose turn it is
not sleeps. The time of a turn is that of its slowest worker. One intra-op thread each, AdamW, shuffled tokens in
memory; peers are torch DDP in both sizes.

The smaller team also trains the larger one's run, with two micro-batches per worker. Its optimizer then takes half as
many steps on every core, so this is more than the larger team can reach.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import distributed

from bench import scaling
from bench.harness import Contestant, Result, isolated
from bench.scaling import DDP, OURS, Task
from bench.teams import Team, Turns, run_teams
from bench.workers import gloo_group

CROWDING = 2


def name_of(loop: str, task: Task) -> str:
    each = f", {task.num_micro_batches} each" if task.num_micro_batches > 1 else ""
    return f"{loop}, {task.num_workers} workers{each}"


LOOPS: dict[str, Callable[[Task, int], scaling.Loop]] = {
    DDP: scaling.torch_ddp,
    OURS: partial(scaling.paceline, quiet=True),
}


def team(tasks: list[Task], loops: Sequence[str], turns: Turns) -> dict[str, list[float]]:
    """What each contestant of a team does in samples per second, as fast as this worker is, turn by turn."""
    with gloo_group():
        rank = distributed.get_rank()

        def build() -> dict[str, Contestant]:
            return {
                name_of(name, task): isolated(partial(_samples_per_s, task, rank, LOOPS[name]))
                for task in tasks
                for name in loops
            }

        return turns.alternate(build, tasks[0].num_turns)


def _samples_per_s(task: Task, rank: int, loop: Callable[[Task, int], scaling.Loop]) -> Contestant:
    seconds_per_step = scaling.contestant(task, rank, loop)
    return lambda: task.num_workers * task.samples_per_worker / seconds_per_step()


def measure(few: list[Task], many: list[Task], loops: Sequence[str] = tuple(LOOPS)) -> dict[str, list[float]]:
    """Samples per second of every contestant of both teams, by turn: those of its slowest worker."""
    by_team = run_teams(*(Team(team, tasks[0].num_workers, (tasks, loops)) for tasks in (few, many)))
    return {
        name: [min(of_all) for of_all in zip(*(own[name] for own in by_rank), strict=True)]
        for by_rank in by_team
        for name in by_rank[0]
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="of the smaller team (default: one per core)")
    parser.add_argument("--turns", type=int, default=21, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    few = Task(options.workers, options.micro_batch, 1, options.turns, options.seconds)
    many = replace(few, num_workers=CROWDING * options.workers)
    settings: dict[str, Any] = {**asdict(many), "threads_per_worker": 1}
    same_run = replace(few, num_micro_batches=CROWDING)
    return Result.of(
        "crowded",
        "samples/s",
        measure([few, same_run], [many]),
        ours=name_of(OURS, many),
        limit=name_of(OURS, few),
        better="higher",
        settings=settings,
        not_peers=(name_of(OURS, same_run),),
    )
