"""Milliseconds that a sum over the workers of two hosts takes: inside each host first, against flat Gloo.

Two network namespaces are two hosts, with a limited link between them, and each has two workers or more. Both ways are
open at the same time and take turns, each turn behind a meeting of all workers; its time is that of the slowest. Large
sums are bound by the link, of which a ring of all workers uses more; small ones by how often somebody is woken.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.harness import Result, Unavailable, alternate
from bench.namespaces import NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.parts import Goal, Parts, to_limit
from bench.workers import run_workers

OURS, FLAT = "inside the hosts first", "flat Gloo"
NUM_WARMUPS = 3


@dataclass(frozen=True)
class Task:
    """`num_calls` sums of `num_bytes` in a turn, one after the other."""

    mbit: float
    num_bytes: int
    num_calls: int
    workers_per_host: int
    num_turns: int


def tasks_of(options: argparse.Namespace) -> dict[str, Task]:
    numbers = {"8 MB": (8 << 20, 1), "64 KB": (64 << 10, 10), "4 KB": (4 << 10, 10)}
    return {
        name: Task(options.mbit, num_bytes, num_calls, options.workers, options.turns)
        for name, (num_bytes, num_calls) in numbers.items()
    }


GOALS = {
    "8 MB": Goal("to flat Gloo, by turn, at most", to_limit(OURS), 0.8, is_upper=True),
    "64 KB": Goal("to flat Gloo, by turn, at most", to_limit(OURS), 1.0, is_upper=True),
    "4 KB": Goal("to flat Gloo, by turn, at most", to_limit(OURS), 1.0, is_upper=True),
}


def worker(link: Link, task: Task) -> dict[str, list[float]]:
    """Milliseconds per call of each way, turn by turn."""
    host, local_rank = divmod(int(os.environ["RANK"]), task.workers_per_host)
    link.join(host, local_rank, task.workers_per_host)
    # Only now: what talks to the network is opened where the process is.
    from paceline.comm import connect
    from paceline.comm.base import Communicator
    from paceline.core.world import World

    world = World.from_environment("cpu")
    with closing(connect(world)) as ours, closing(connect(world, "gloo")) as flat:
        meeting = torch.zeros(1)

        def turn(communicator: Communicator, tensor: torch.Tensor) -> float:
            flat.all_reduce(meeting).wait()
            start = time.perf_counter()
            for _ in range(task.num_calls):
                communicator.all_reduce(tensor).wait()
            return 1e3 * (time.perf_counter() - start) / task.num_calls

        ways = {OURS: ours, FLAT: flat}
        turns = {
            name: partial(turn, way, way.empty(task.num_bytes // 4, torch.float32, world.device).zero_())
            for name, way in ways.items()
        }
        alternate(turns, NUM_WARMUPS)
        return alternate(turns, task.num_turns)


def contest(name: str, task: Task) -> Result:
    with slow_link(task.mbit) as link:
        by_rank: list[Mapping[str, list[float]]] = run_workers(worker, NUM_HOSTS * task.workers_per_host, link, task)
    slowest = {way: list(map(max, zip(*(own[way] for own in by_rank), strict=True))) for way in (OURS, FLAT)}
    unit = f"ms per sum of {name}"
    return Result.of("hosts", unit, slowest, ours=OURS, limit=FLAT, better="lower", settings=asdict(task))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=1000, help="of the link, in Mbit/s (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="on each host (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=41, help="alternations (default: %(default)s)")


def run(options: argparse.Namespace) -> Parts:
    if reason := missing_slow_link():
        raise Unavailable(reason)
    results = {name: contest(name, task) for name, task in tasks_of(options).items()}
    return Parts("hosts", results, GOALS)
