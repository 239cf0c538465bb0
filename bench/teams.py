"""Two teams of workers that take turns, each with processes of its own.

Who runs in a process shares more with the others there than torch's settings: Paceline has it keep freed memory, on
huge pages and for good, which speeds up whoever follows. And teams may differ in size. The team whose turn it is not
sleeps.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any, TypeVar

from torch import distributed

from bench.harness import Contestant, alternate, turn_order
from bench.workers import results_of, working

TIMEOUT_S = 600.0

T = TypeVar("T")


@dataclass(frozen=True)
class Turns:
    """When it is this team's turn, and to tell the other team that it is theirs."""

    own: Semaphore
    others: Semaphore

    def take(self, work: Callable[[], T]) -> T:
        """What `work` gives on this worker, once it is the team's turn; all workers of the team call it together."""
        rank = distributed.get_rank()
        if rank == 0 and not self.own.acquire(timeout=TIMEOUT_S):
            raise RuntimeError(f"the other team did not end its turn in {TIMEOUT_S:g} s: look for its error")
        distributed.barrier()
        done = work()
        distributed.barrier()
        if rank == 0:
            self.others.release()
        return done

    def alternate(self, build: Callable[[], dict[str, Contestant]], num_turns: int) -> dict[str, list[float]]:
        """Each contestant's measurements on this worker, one per turn. They are built in the team's turn, too."""
        contestants = self.take(build)
        measured: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(num_turns):
            ordered = {name: contestants[name] for name in turn_order(list(contestants), turn)}
            for name, [value] in self.take(partial(alternate, ordered, 1)).items():
                measured[name].append(value)
        contestants.clear()  # their loops end here, while the group they talk over is still there
        return measured


@dataclass(frozen=True)
class Team:
    """`function(*arguments, turns)` is called on each of so many workers; it must be importable by name."""

    function: Callable[..., Any]
    num_workers: int
    arguments: Sequence[Any]


def run_teams(first: Team, second: Team) -> tuple[list[Any], list[Any]]:
    """What the functions gave, by team and rank."""
    context = multiprocessing.get_context("spawn")
    one, other = context.Semaphore(1), context.Semaphore(0)
    with (
        working(first.function, first.num_workers, *first.arguments, Turns(one, other)) as by_first,
        working(second.function, second.num_workers, *second.arguments, Turns(other, one)) as by_second,
    ):
        results = results_of([*by_first, *by_second])
    return results[: first.num_workers], results[first.num_workers :]
