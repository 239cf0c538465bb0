"""What the measurements of slow links add up to: a row for each way, over workers that never talk and over DDP."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.far_apart import Task
from bench.far_apart_ways import (
    CADENCE,
    DDP,
    GRADIENTS,
    IN_EVERY_STEP,
    NO_TALK,
    NO_TALK_OURS,
    OVERHEAD_TARGET,
    SLOW_LINK,
    WAYS,
    ring_bytes_per_step,
)


@dataclass(frozen=True)
class Loss:
    """Of one run with one seed, on samples held out."""

    task: Task
    way: str
    loss: float


@dataclass(frozen=True)
class Speed:
    """Samples/s of one way on one link, turn by turn. The turns of one session, which has a number, go together."""

    task: Task
    way: str
    mbit: float | None  # None: the link does not matter
    session: str
    turns: tuple[float, ...]
    link_mbit_per_s: tuple[float, ...] = ()  # by rank
    choice: Mapping[str, Any] | None = None
    overhead: float | None = None  # of a cadence
    bytes_per_sample: float = 0.0  # that a host sent in the turns, headers included


@dataclass(frozen=True)
class Row:
    """One way in one scenario. A number is None where it was not measured. computed: by the link and its bytes."""

    name: str
    speed: float | None  # over workers that never talk
    slowest_turn: float | None
    fastest_turn: float | None
    is_computed: bool  # speed, from the bytes
    fewer_bytes: float | None  # how many times fewer than DDP's
    loss: float | None  # over synchronous training's, mean of the seeds
    least_loss: float | None
    largest_loss: float | None
    num_seeds: int


@dataclass(frozen=True)
class Scenario:
    """A task on a link, with all that was measured of it."""

    task: Task
    mbit: float
    speeds: tuple[Speed, ...]  # of this link, and of those whom it does not matter to
    losses: tuple[Loss, ...]

    def speed_of(self, way: str) -> Speed | None:
        return next((each for each in self.speeds if each.way == way), None)

    @property
    def choice(self) -> Mapping[str, Any]:
        own = self.speed_of(SLOW_LINK)
        return (own and own.choice) or {}

    def losses_of(self, way: str) -> dict[int, Loss]:
        """By seed."""
        of_way = [each for each in self.losses if each.way == way]
        return {each.task.seed: each for each in of_way if replace(each.task, seed=0) == self.task}

    def bytes_of(self, way: str) -> float:
        """Per sample, sent by a host: counted, or else computed where that is possible."""
        speed = self.speed_of(way)
        return speed.bytes_per_sample if speed else ring_bytes_per_step(self.task, way) / self.task.global_batch

    def limits(self, session: str) -> Sequence[float]:
        """Samples/s of workers that never talk, by turn: of the faster ones by their medians."""
        never = [each for each in self.speeds if each.way in (NO_TALK, NO_TALK_OURS) and each.session == session]
        return max((each.turns for each in never), key=statistics.median, default=())

    def row(self, way: str) -> Row | None:
        speed, sent, losses = self.speed_of(way), self.bytes_of(way), self.losses_of(way)
        ratios: list[float] = []
        is_computed = False
        if speed is not None:
            limits = self.limits(speed.session)
            ratios = [own / limit for own, limit in zip(speed.turns, limits, strict=True)] if limits else []
        elif losses and sent and (never := self.speed_of(NO_TALK)):
            is_computed = True
            # At most: as if the link was used all the time, and the rest took no time where it overlaps.
            link, limit = 1e6 * self.mbit / 8 / sent, statistics.median(self.limits(never.session))
            ratios = [1 / (1 / link + 1 / limit) / limit if way in IN_EVERY_STEP else min(1.0, link / limit)]
        base = self.losses_of(GRADIENTS)
        own = [each.loss / base[seed].loss for seed, each in losses.items() if seed in base]
        if not ratios and not own:
            return None
        return Row(
            way,
            *((statistics.median(ratios), min(ratios), max(ratios)) if ratios else (None, None, None)),
            is_computed,
            self.bytes_of(DDP) / sent if sent and way not in (NO_TALK, NO_TALK_OURS) else None,
            *((statistics.fmean(own), min(own), max(own)) if own else (None, None, None)),
            len(own),
        )

    def rows(self) -> list[Row]:
        return [row for way in WAYS if (row := self.row(way)) is not None]

    def table(self) -> list[str]:
        task = self.task
        lines = [
            f"{task.source}, {self.mbit:g} Mbit/s, {task.num_hosts} hosts, {task.num_parameters / 1e6:.2f}M parameters",
            f"{'':<28} {'/ no talk':>10} {'by turn':>16} {'fewer bytes':>12} {'loss / synchronous':>20}   by seed",
        ]
        for row in self.rows():
            speed = "" if row.speed is None else f"{row.speed:.3f}{'*' if row.is_computed else ' '}"
            turns = "" if row.speed is None or row.is_computed else f"{row.slowest_turn:.3f} .. {row.fastest_turn:.3f}"
            fewer = "" if row.fewer_bytes is None else f"{row.fewer_bytes:.1f}"
            loss = "" if row.loss is None else f"{row.loss:.4f}"
            seeds = "" if row.loss is None else f"{row.least_loss:.4f} .. {row.largest_loss:.4f} ({row.num_seeds})"
            lines.append(f"{row.name:<28} {speed:>10} {turns:>16} {fewer:>12} {loss:>20}   {seeds}".rstrip())
        if any(row.is_computed for row in self.rows()):
            lines.append("* computed, at most: its bytes over the link's speed")
        if self.choice:
            lines.append(f"slow link: {self.choice['reason']}")
        if (cadence := self.speed_of(CADENCE)) is not None and cadence.overhead is not None:
            lines.append(f"cadence: overhead {cadence.overhead:.3f}, target {OVERHEAD_TARGET}")
        if ours := self.speed_of(SLOW_LINK):
            measured = " ".join(f"{speed:.3g}" for speed in ours.link_mbit_per_s)
            lines.append(f"the link carried {measured} Mbit/s, by rank")
        return lines

    def fields(self) -> dict[str, Any]:
        return {
            "settings": {**self.task.settings(), "mbit": self.mbit},
            "rows": [asdict(row) for row in self.rows()],
            "choice": dict(self.choice),
            "turns": {each.way: each.turns for each in self.speeds},
            "losses": {way: [each.loss for each in self.losses_of(way).values()] for way in WAYS},
        }


def scenarios_of(
    tasks: Iterable[Task], mbits: Sequence[float], speeds: Sequence[Speed], losses: Sequence[Loss]
) -> list[Scenario]:
    """Of the newest session with each task, and all losses."""
    found = []
    for task in tasks:
        of_task = [each for each in speeds if each.task == task]
        for mbit in mbits:
            # The newest come last: a way that was measured twice counts once.
            newest = {each.way: each for each in of_task if each.mbit in (None, mbit)}
            sessions = {each.session for each in newest.values()}
            never = [each for each in of_task if each.mbit is None and each.session in sessions]
            chosen = {id(each): each for each in (*newest.values(), *never)}
            found.append(Scenario(task, mbit, tuple(chosen.values()), tuple(losses)))
    return found
