"""Samples per second of more workers than cores, against as many workers as cores: who waits must not burn a core.

Both teams train the same run: the model of `bench scaling`, the same micro-batches and the same global batch, which one
team divides among twice as many workers. Each team has its own processes, started once; the teams take turns, and the
one whose turn it is not sleeps. The time of a turn is that of its slowest worker. One intra-op thread each, AdamW,
shuffled tokens in memory; peers are torch DDP in both sizes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any, TypeVar

from torch import distributed

from bench import scaling
from bench.harness import Contestant, Result, alternate, isolated
from bench.scaling import DDP, OURS, Task
from bench.workers import gloo_group, run_workers

CROWDING = 2
TIMEOUT_S = 120.0

T = TypeVar("T")


def name_of(loop: str, num_workers: int) -> str:
    return f"{loop}, {num_workers} workers"


def team(task: Task, own_turn: Semaphore, others_turn: Semaphore) -> dict[str, list[float]]:
    """One worker's measurements, in seconds per step, in the turns of its team."""
    loops: dict[str, Callable[[Task, int], scaling.Loop]] = {
        DDP: scaling.torch_ddp,
        OURS: partial(scaling.paceline, quiet=True),
    }
    with gloo_group():
        rank = distributed.get_rank()

        def in_turn(work: Callable[[], T]) -> T:
            if rank == 0 and not own_turn.acquire(timeout=TIMEOUT_S):
                raise RuntimeError(f"the other team did not end its turn in {TIMEOUT_S:g} s: look for its error")
            distributed.barrier()
            done = work()
            distributed.barrier()
            if rank == 0:
                others_turn.release()
            return done

        contestants: dict[str, Contestant] = {}
        for name, loop in loops.items():
            built = in_turn(partial(isolated, partial(scaling.contestant, task, rank, loop)))
            contestants[name_of(name, task.num_workers)] = partial(in_turn, built)
        measured = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        return measured


def measure(tasks: list[Task]) -> dict[str, list[float]]:
    """Samples per second of every contestant of both teams, by turn."""
    context = multiprocessing.get_context("spawn")
    turns = [context.Semaphore(1), context.Semaphore(0)]
    with ThreadPoolExecutor(len(tasks)) as threads:
        teams = [
            threads.submit(run_workers, team, task.num_workers, task, turns[i], turns[1 - i])
            for i, task in enumerate(tasks)
        ]
        found: dict[str, list[float]] = {}
        for task, running in zip(tasks, teams, strict=True):
            by_rank = running.result()
            for name in by_rank[0]:
                step_s = zip(*(own[name] for own in by_rank), strict=True)
                found[name] = [scaling.samples_per_s(OURS, each, task) for each in step_s]
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="of the smaller team (default: one per core)")
    parser.add_argument("--turns", type=int, default=31, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a turn (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    few = Task(options.workers, options.micro_batch, CROWDING, options.turns, options.seconds)
    many = Task(CROWDING * options.workers, options.micro_batch, 1, options.turns, options.seconds)
    settings: dict[str, Any] = {**asdict(many), "threads_per_worker": 1}
    return Result.of(
        "crowded",
        "samples/s",
        measure([few, many]),
        ours=name_of(OURS, many.num_workers),
        limit=name_of(OURS, few.num_workers),
        better="higher",
        settings=settings,
    )
