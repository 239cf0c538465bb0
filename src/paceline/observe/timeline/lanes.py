"""From the workers' separate recordings to lanes on one clock, with waiting separated from exchanging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_high
from typing import NamedTuple, TypeAlias

from paceline.observe.timeline.files import KINDS, SAMPLED, Session, parts_of

# "wait": in the exchange, for slower workers. "other": everything else, such as setup, hooks, and user code between two
# steps.
SHOWN = ("compute", "data", "wait", "sync", "optimizer", "checkpoint", "evaluation", "other")


class Span(NamedTuple):
    """Times are seconds since the timeline began."""

    kind: str
    start: float
    end: float
    step: int


class Stretch(NamedTuple):
    """Condensed steps: `seconds` by kind, within start and end."""

    start: float
    end: float
    first_step: int
    last_step: int
    num_steps: int
    seconds: Mapping[str, float]


class Sample(NamedTuple):
    """Means over the `seconds` before `time`, by name. Values that could not be read are missing."""

    time: float
    seconds: float
    values: Mapping[str, float]


@dataclass
class Lane:
    """One worker. `writing`: checkpoints written in the background. `extents`: start and end of its processes."""

    rank: int
    host: str
    device: str
    num_steps: int = 0
    spans: list[Span] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    writing: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    extents: list[tuple[float, float]] = field(default_factory=list)


# A step, and how often its rank repeated it later: a run that was killed and resumed repeats steps.
Occurrence: TypeAlias = tuple[int, int]
Steps: TypeAlias = dict[Occurrence, list[int]]


def make_lanes(sessions: Sequence[Session]) -> tuple[float, list[Lane]]:
    """The Unix time at which the timeline begins, and one lane per rank. Sessions are sorted by rank and time."""
    steps = [_steps_of(session, sessions[i + 1 :]) for i, session in enumerate(sessions)]
    clocks_ahead_s = _clocks_ahead(sessions, steps)
    origins = [session.unix_time - clocks_ahead_s[session.host] for session in sessions]
    began = min(origins)
    exchanges = _Exchanges(sessions, steps)
    lanes: dict[int, Lane] = {}
    for session, own_steps, origin in zip(sessions, steps, origins, strict=True):
        lane = lanes.setdefault(session.rank, Lane(session.rank, session.host, session.device))
        _add_session(lane, session, own_steps, origin - began, exchanges)
    return began, [lanes[rank] for rank in sorted(lanes)]


class _Exchanges:
    """The duration of each exchange in microseconds: its minimum over the workers, as the last one does not wait."""

    def __init__(self, sessions: Sequence[Session], steps: Sequence[Steps]) -> None:
        self.of_steps: dict[Occurrence, tuple[int, int]] = {}  # of gradients, and of replicas
        self.of_stretches: dict[tuple[int, int, int], int] = {}
        for occurrence, step in (item for numbered in steps for item in numbered.items()):
            gradients, replicas = self.of_steps.get(occurrence, (step[-3], step[-1]))
            self.of_steps[occurrence] = min(gradients, step[-3]), min(replicas, step[-1])
        for row in (row for session in sessions for row in session.stretches):
            key, sync = (row[0], row[1], row[2]), row[5 + KINDS.index("sync")]
            self.of_stretches[key] = min(self.of_stretches.get(key, sync), sync)


def _add_session(lane: Lane, session: Session, steps: Steps, origin_s: float, exchanges: _Exchanges) -> None:
    def at(microseconds: int) -> float:
        return round(origin_s + microseconds / 1e6, 6)

    spans = []
    for occurrence, step in steps.items():
        durations = iter(exchanges.of_steps[occurrence])
        for kind, start, end in parts_of(step):
            parts = [(kind, start), ("", end)]
            if kind == "sync":
                exchange_start = end - next(durations)
                parts = [("wait", start), ("sync", exchange_start), ("", end)]
                if session.size == 1:
                    parts = [("optimizer", start), ("", end)]
            spans += [
                Span(name, at(begin), at(until), step[0])
                for (name, begin), (_, until) in pairwise(parts)
                if until > begin
            ]
    for kind, number, start, duration in session.spans:
        span = Span(kind, at(start), at(start + duration), number)
        (lane.writing if kind == "writing" else spans).append(span)
    lane.spans += _without_overlap(sorted(spans, key=lambda span: span.start))
    for first, last, num_steps, start, end, *times in session.stretches:
        seconds = {kind: time / 1e6 for kind, time in zip(KINDS, times, strict=True) if kind != "writing"}
        sync_s = seconds.pop("sync")
        if session.size == 1:
            seconds["optimizer"] += sync_s
        else:
            seconds["sync"] = exchanges.of_stretches[first, last, num_steps] / 1e6
            seconds["wait"] = sync_s - seconds["sync"]
        lane.stretches.append(Stretch(at(start), at(end), first, last, num_steps, seconds))
    lane.num_steps += len(steps) + sum(row[2] for row in session.stretches)
    for time, seconds_covered, *values in session.samples:
        known = {name: value for name, value in zip(SAMPLED, values, strict=True) if value is not None}
        lane.samples.append(Sample(at(time), seconds_covered, known))
    lane.extents.append((at(0), at(session.last_time)))


def _steps_of(session: Session, later: Iterable[Session]) -> Steps:
    repeated = [{step[0] for step in other.steps} for other in later if other.rank == session.rank]
    return {(step[0], sum(step[0] in numbers for numbers in repeated)): step for step in session.steps}


def _clocks_ahead(sessions: Sequence[Session], steps: Sequence[Steps]) -> dict[str, float]:
    """How many seconds each host's clock is ahead of the first one's: all workers get an exchange's result together."""
    received: dict[str, dict[Occurrence, float]] = {}
    for session, own_steps in zip(sessions, steps, strict=True):
        of_host = received.setdefault(session.host, {})
        for occurrence, step in own_steps.items():
            of_host.setdefault(occurrence, session.unix_time + sum(step[1:-2]) / 1e6)
    reference = received[sessions[0].host]
    return {
        host: median_high([time - reference[step] for step, time in times.items() if step in reference] or [0.0])
        for host, times in received.items()
    }


def _without_overlap(spans: Sequence[Span]) -> Iterable[Span]:
    """The host runs ahead of its GPU: its activity between two steps starts when the device has finished the step."""
    end = 0.0
    for span in spans:
        if span.end > end:
            yield span if span.start >= end else span._replace(start=end)
            end = span.end
