"""Turns the workers' separate recordings into lanes on one clock, with waiting separated from exchanging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median_high
from typing import TypeAlias

from paceline.observe.json_lines import is_number
from paceline.observe.timeline.files import Sample, Session, Span, in_order, mean_sample

# "wait": in the exchange, for slower workers. "other": everything else, such as setup, hooks, and user code between two
# steps.
SHOWN = ("compute", "data", "wait", "sync", "optimizer", "checkpoint", "evaluation", "other")
# Activities during which a worker is not idle.
BUSY = ("compute", "sync", "optimizer", "evaluation")

# Causes of idle gaps with another name than their kind.
_CAUSES = {"checkpoint": "saving"}

# Kind, first and last step of an exchange, and how often its rank repeated it later: a run that was killed and resumed
# repeats steps.
Key: TypeAlias = tuple[str, int, int, int]
Exchanges: TypeAlias = dict[Key, Span]


@dataclass(frozen=True)
class IdleGap:
    """A time in which a worker computed nothing. `cause`: the activity that took most of it.

    "data", "wait" (for slower workers), "saving", "garbage collection", "plotting", "logging" (of metrics), "hook" (of
    `trainer.every` and the like), "setup" (before the first step), or "other", such as code between two steps.
    """

    rank: int
    start: float
    end: float
    step: int
    cause: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Lane:
    """One worker's activities, in seconds since the timeline began.

    `spans` do not overlap. `writing`: checkpoints written to disk in the background. `noted`: slow activities outside
    of steps, such as a garbage collection; may overlap with others. `extents`: start and end of its processes.
    """

    rank: int
    host: str
    device: str
    spans: list[Span] = field(default_factory=list)
    writing: list[Span] = field(default_factory=list)
    noted: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    extents: list[tuple[float, float]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(span.step - span.first_step + 1 for span in self.spans if span.kind == "optimizer")

    @property
    def total_s(self) -> float:
        return sum(end - start for start, end in self.extents)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """By `SHOWN` kinds; they add up to `total_s`."""
        seconds = dict.fromkeys(SHOWN, 0.0)
        for span in self.spans:
            seconds[span.kind] += span.duration
        seconds["other"] = 0.0  # a part of it is in condensed spans
        seconds["other"] = max(self.total_s - sum(seconds.values()), 0.0)
        return seconds

    def part(self, kind: str) -> float:
        """The fraction of the time spent on a kind, 0 to 1."""
        return self.seconds[kind] / self.total_s if self.total_s else 0.0

    @property
    def writing_s(self) -> float:
        return sum(span.duration for span in self.writing)

    @property
    def use(self) -> Mapping[str, float]:
        """Means of the system samples, such as "cpu" and "gpu" in percent."""
        return mean_sample(self.samples).values

    def between(self, first_step: int, last_step: int) -> Lane:
        spans = [span for span in self.spans if span.step >= first_step and span.first_step <= last_step]
        extents = []
        for start, end in self.extents:
            if inside := [span for span in spans if start <= span.start <= end]:
                extents.append((inside[0].start, inside[-1].end))
        return replace(
            self,
            spans=spans,
            writing=[span for span in self.writing if first_step <= span.step <= last_step],
            samples=[s for s in self.samples if any(a < s.time and s.time - s.seconds < b for a, b in extents)],
            extents=extents,
        )

    def idle_gaps(self, min_s: float) -> Iterator[IdleGap]:
        for start, end in self.extents:
            busy_until, step, is_first = start, 0, True
            inside = [span for span in self.spans if start <= span.start <= end]
            idle: list[Span] = []  # since the last activity
            for span in [*inside, Span("compute", end, end, 0, 0)]:
                if span.kind not in BUSY and not span.is_condensed:
                    idle.append(span)
                    continue
                if span.start - busy_until >= min_s:
                    rest = "setup" if is_first and inside else "other"
                    cause = _cause(busy_until, span.start, [*idle, *self.noted], rest)
                    yield IdleGap(self.rank, busy_until, span.start, step, cause)
                busy_until, step, idle, is_first = max(busy_until, span.end), span.step, [], False


def _cause(start: float, end: float, spans: Sequence[Span], rest: str) -> str:
    """The name with most of this time; `rest` for time in no span. Of nested spans the inner one counts."""
    free, seconds = [(start, end)], {rest: 0.0}
    for span in sorted(spans, key=lambda span: span.duration):
        left = []
        for begin, stop in free:
            inside_begin, inside_stop = max(begin, span.start), min(stop, span.end)
            if inside_begin >= inside_stop:
                left.append((begin, stop))
                continue
            name = _CAUSES.get(span.kind, span.kind)
            seconds[name] = seconds.get(name, 0.0) + inside_stop - inside_begin
            left += [(begin, inside_begin), (inside_stop, stop)]
        free = [(begin, stop) for begin, stop in left if begin < stop]
    seconds[rest] += sum(stop - begin for begin, stop in free)
    return max(seconds, key=lambda name: seconds[name])


def make_lanes(sessions: Sequence[Session]) -> tuple[float, list[Lane]]:
    """The Unix time at which the timeline begins, and one lane per rank. Sessions are sorted by rank and time."""
    exchanges = _exchanges(sessions)
    # The last worker to arrive does not wait, so the shortest time is the exchange itself.
    shortest: dict[Key, float] = {}
    for key, span in (item for own in exchanges for item in own.items()):
        shortest[key] = min(shortest.get(key, inf), span.duration)
    clocks_ahead_s = _clocks_ahead(sessions, exchanges)
    origins = [session.unix_time - clocks_ahead_s[session.host] for session in sessions]
    began = min(origins)
    lanes: dict[int, Lane] = {}
    for session, own, origin in zip(sessions, exchanges, origins, strict=True):

        def at(microseconds: float, origin_s: float = origin - began) -> float:
            return round(origin_s + microseconds / 1e6, 6)

        spans = [span for span in session.spans if span.kind not in ("sync", "average", "writing")]
        for key, span in own.items():
            exchange_start = span.end - shortest[key]
            if session.size == 1:  # exchanges nothing
                spans.append(span._replace(kind="optimizer"))
            else:
                spans.append(Span("wait", span.start, exchange_start, span.step, span.first_step))
                spans.append(Span("sync", exchange_start, span.end, span.step, span.first_step))
        lane = lanes.setdefault(session.rank, Lane(session.rank, session.host, session.device))
        writing = [span for span in session.spans if span.kind == "writing"]
        for found, target in ((in_order(spans), lane.spans), (writing, lane.writing)):
            target += [Span(s.kind, at(s.start), at(s.end), s.step, s.first_step) for s in found]
        lane.noted += [
            Span(str(name), at(time - 1e6 * seconds), at(time), step, step)
            for name, step, time, details in session.events
            if is_number(seconds := details.get("seconds")) and seconds > 0
        ]
        lane.samples += [sample._replace(time=at(sample.time)) for sample in session.samples]
        lane.extents.append((at(0), at(session.last_time)))
    return began, [lanes[rank] for rank in sorted(lanes)]


def _exchanges(sessions: Sequence[Session]) -> list[Exchanges]:
    """Of each session."""
    num_repeated: Counter[tuple[int, str, int, int]] = Counter()
    found = []
    for session in reversed(sessions):
        spans = [span for span in session.spans if span.kind in ("sync", "average")]
        names = [(session.rank, span.kind, span.first_step, span.step) for span in spans]
        found.append({(*name[1:], num_repeated[name]): span for name, span in zip(names, spans, strict=True)})
        num_repeated.update(names)
    return found[::-1]


def _clocks_ahead(sessions: Sequence[Session], exchanges: Sequence[Exchanges]) -> dict[str, float]:
    """How many seconds each host's clock is ahead of the first one's: all workers get an exchange's result together."""
    received: dict[str, dict[Key, float]] = {}
    for session, own in zip(sessions, exchanges, strict=True):
        of_host = received.setdefault(session.host, {})
        for key, span in own.items():
            if span.kind == "sync" and not span.is_condensed:
                of_host.setdefault(key, session.unix_time + span.end / 1e6)
    reference = received[sessions[0].host]
    return {
        host: median_high([time - reference[key] for key, time in times.items() if key in reference] or [0.0])
        for host, times in received.items()
    }
