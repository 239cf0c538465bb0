"""From what workers recorded, each by itself, to lanes on one clock: with waiting told from exchanging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from paceline.observe.timeline.layout import KINDS, SAMPLED, parts_of
from paceline.observe.timeline.sessions import Session

# What a worker's time goes into. "wait": in the exchange, for slower workers. "other": beside all that, such as setting
# up, hooks, and your own code between two steps.
SHOWN = ("compute", "data", "wait", "sync", "optimizer", "checkpoint", "evaluation", "other")


class Span(NamedTuple):
    """Seconds since the timeline began."""

    kind: str
    start: float
    end: float
    step: int


class Stretch(NamedTuple):
    """Steps of long ago, summed up: `seconds` by kind, somewhere from start to end."""

    start: float
    end: float
    first_step: int
    last_step: int
    num_steps: int
    seconds: Mapping[str, float]


class Sample(NamedTuple):
    """The mean over the `seconds` before `time`. `values` by name; what could not be read is left out."""

    time: float
    seconds: float
    values: Mapping[str, float]


@dataclass
class Lane:
    """One worker's course. `writing`: checkpoints on their way to the disk, behind the rest; `extents`: start and end
    of its processes, one after the other."""

    rank: int
    host: str
    device: str
    num_steps: int = 0
    spans: list[Span] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    writing: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    extents: list[tuple[float, float]] = field(default_factory=list)


# Of each rank a step is there as often as the run went over it; the newest has number 0, on all ranks.
Occurrence: TypeAlias = tuple[int, int]


def make_lanes(sessions: Sequence[Session]) -> tuple[float, list[Lane]]:
    """The Unix time at which the timeline begins, and a lane per rank."""
    steps = [_numbered(index, sessions) for index in range(len(sessions))]
    exchanges = _Exchanges(sessions, steps)
    clocks_ahead_s = _clocks_ahead(sessions, steps)
    origins = [session.unix_time - clocks_ahead_s[session.host] for session in sessions]
    began = min(origins)
    lanes: dict[int, Lane] = {}
    for session, numbered, origin in zip(sessions, steps, origins, strict=True):
        lane = lanes.setdefault(session.rank, Lane(session.rank, session.host, session.device))
        _Drawer(session, origin - began, exchanges).draw(numbered, lane)
    return began, [lanes[rank] for rank in sorted(lanes)]


class _Drawer:
    """Adds a session to its lane."""

    def __init__(self, session: Session, origin_s: float, exchanges: _Exchanges) -> None:
        self._session = session
        self._origin_s = origin_s
        self._exchanges = exchanges

    def draw(self, steps: Mapping[Occurrence, list[int]], lane: Lane) -> None:
        session = self._session
        lane.extents.append((self._at(0), self._at(session.last_sign)))
        spans = [span for occurrence, step in steps.items() for span in self._step(occurrence, step)]
        for kind, number, start, duration in session.spans:
            span = Span(kind, self._at(start), self._at(start + duration), number)
            (lane.writing if kind == "writing" else spans).append(span)
        lane.spans += _one_after_the_other(sorted(spans, key=lambda span: span.start))
        lane.stretches += [self._stretch(row) for row in session.stretches]
        lane.num_steps += len(steps) + sum(row[2] for row in session.stretches)
        for time, seconds, *values in session.samples:
            known = {name: value for name, value in zip(SAMPLED, values, strict=True) if value is not None}
            lane.samples.append(Sample(self._at(time), seconds, known))

    def _at(self, microseconds: int) -> float:
        return self._origin_s + microseconds / 1e6

    def _step(self, occurrence: Occurrence, step: Sequence[int]) -> Iterable[Span]:
        own_times = iter(self._exchanges.of_steps[occurrence])
        for kind, start, end in parts_of(step):
            begins = [(kind, start)]
            if kind == "sync":
                exchanging_from = end - next(own_times)
                is_alone = self._session.size == 1
                begins = [("optimizer", start)] if is_alone else [("wait", start), ("sync", exchanging_from)]
            for (name, begin), (_, until) in zip(begins, [*begins[1:], ("", end)], strict=True):
                if until > begin:
                    yield Span(name, self._at(begin), self._at(until), step[0])

    def _stretch(self, row: Sequence[int]) -> Stretch:
        first, last, num_steps, start, end, *times = row
        seconds = {kind: time / 1e6 for kind, time in zip(KINDS, times, strict=True) if kind != "writing"}
        sync_s = seconds.pop("sync")
        if self._session.size == 1:
            seconds["optimizer"] += sync_s
        else:
            seconds["sync"] = self._exchanges.of_stretches[first, last, num_steps] / 1e6
            seconds["wait"] = sync_s - seconds["sync"]
        return Stretch(self._at(start), self._at(end), first, last, num_steps, seconds)


class _Exchanges:
    """What exchanges take by themselves, in microseconds: who comes last waits for nobody, and so takes the least."""

    def __init__(self, sessions: Sequence[Session], steps: Sequence[Mapping[Occurrence, list[int]]]) -> None:
        self.of_steps: dict[Occurrence, tuple[int, int]] = {}
        self.of_stretches: dict[tuple[int, int, int], int] = {}
        for occurrence, step in (item for numbered in steps for item in numbered.items()):
            gradients, replicas = step[-3], step[-1]
            least = self.of_steps.get(occurrence, (gradients, replicas))
            self.of_steps[occurrence] = min(least[0], gradients), min(least[1], replicas)
        for first, last, num_steps, _, _, *times in (row for session in sessions for row in session.stretches):
            key, sync = (first, last, num_steps), times[KINDS.index("sync")]
            self.of_stretches[key] = min(self.of_stretches.get(key, sync), sync)


def _numbered(index: int, sessions: Sequence[Session]) -> dict[Occurrence, list[int]]:
    """A session's steps, each with the number of later sessions of its rank that have it too."""
    later = [{step[0] for step in other.steps} for other in sessions[index + 1 :] if other.rank == sessions[index].rank]
    return {(step[0], sum(step[0] in numbers for numbers in later)): step for step in sessions[index].steps}


def _clocks_ahead(sessions: Sequence[Session], steps: Sequence[Mapping[Occurrence, list[int]]]) -> dict[str, float]:
    """How far hosts' clocks are ahead of the first one's, in seconds: all workers have an exchange's result at once."""
    received: dict[str, dict[Occurrence, float]] = {}
    for session, numbered in zip(sessions, steps, strict=True):
        of_host = received.setdefault(session.host, {})
        for occurrence, step in numbered.items():
            of_host.setdefault(occurrence, session.unix_time + sum(step[1:-2]) / 1e6)
    reference = received[sessions[0].host]
    ahead = {}
    for host, times in received.items():
        differences = sorted(time - reference[step] for step, time in times.items() if step in reference)
        ahead[host] = differences[len(differences) // 2] if differences else 0.0
    return ahead


def _one_after_the_other(spans: Sequence[Span]) -> Iterable[Span]:
    """A host runs ahead of its GPU: what it does between two steps begins, for the device, when the step is done."""
    end = 0.0
    for span in spans:
        if span.end > end:
            yield span if span.start >= end else span._replace(start=end)
            end = span.end
