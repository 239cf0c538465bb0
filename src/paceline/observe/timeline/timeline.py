"""A run's timeline, read back: what each worker did when, in numbers and as files for others to show."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from time import time
from typing import Any

from paceline.observe.timeline.lanes import SHOWN, Lane, Sample, Span, make_lanes
from paceline.observe.timeline.sessions import Session, read_sessions, timeline_files

# A worker writes every second: one that was silent for longer is gone.
SILENT_S = 30.0
# While a worker does one of these it is not idle.
BUSY = ("compute", "sync", "optimizer", "evaluation")
# In a table that fits a terminal.
_SHORT = {"optimizer": "optim", "checkpoint": "saving", "evaluation": "eval"}


@dataclass(frozen=True)
class TimelineEvent:
    """Something that happened: `time` in seconds since the timeline began, after `step` completed steps."""

    name: str
    rank: int
    time: float
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class IdleGap:
    """A time in which a worker had nothing to compute; `cause` is the kind that most of it went into."""

    rank: int
    start: float
    end: float
    step: int
    cause: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class WorkerTime:
    """Where a worker's time went: `seconds` by kind, which add up to `total_s`.

    `use`: means of what was sampled, by name, such as "cpu" and "gpu" in percent. `writing_s`: checkpoints on their way
    to the disk, behind the rest.
    """

    rank: int
    host: str
    device: str
    num_steps: int
    total_s: float
    seconds: Mapping[str, float]
    writing_s: float
    use: Mapping[str, float]

    def part(self, kind: str) -> float:
        return self.seconds[kind] / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class TimelineSummary:
    """All workers' time; print it for a table."""

    duration_s: float
    workers: tuple[WorkerTime, ...]

    def __str__(self) -> str:
        names = [_SHORT.get(kind, kind) for kind in SHOWN]
        widths = [max(len(name) + 1, 7) for name in names]
        header = "worker   steps seconds" + "".join(map(str.rjust, names, widths))
        lines = [
            f"{w.rank:>6}{w.num_steps:>8}{w.total_s:>8.1f}"
            + "".join(f"{w.part(kind):>{width}.1%}" for kind, width in zip(SHOWN, widths, strict=True))
            for w in self.workers
        ]
        uses = [f"rank {w.rank}, {w.host} {w.device}: {_use_text(w)}" for w in self.workers]
        return "\n".join([header, *lines, "", *uses])


class Timeline:
    """Lanes of workers, by rank, on one clock; all times in seconds since `began`, which is Unix time.

    Also of a run that still goes on, or was broken off. `lanes` have the spans.
    """

    def __init__(self, name: str, began: float, lanes: Sequence[Lane], events: Sequence[TimelineEvent]) -> None:
        self.name = name
        self.began = began
        self.lanes = tuple(lanes)
        self.events = tuple(events)

    @classmethod
    def load(cls, run_folder: str | PathLike[str]) -> Timeline:
        """From a run's folder, or from the folder that was given as `timeline`."""
        folder = Path(run_folder)
        files = timeline_files(folder)
        sessions = read_sessions(files)
        if not sessions:
            raise ValueError(
                f"{folder} has no timeline: record one with Runtime(timeline=folder), or trainer.timeline: true "
                "in a project file"
            )
        began, lanes = make_lanes(sessions)
        is_silent = all(time() - path.stat().st_mtime > SILENT_S for path in files)
        name = folder.resolve().parent.name if folder.resolve().name == "timeline" else folder.resolve().name
        return cls(name, began, lanes, _events(sessions, lanes, is_silent=is_silent))

    @property
    def duration_s(self) -> float:
        times = [time for lane in self.lanes for extent in lane.extents for time in extent]
        return max(times) - min(times)

    def between(self, first_step: int | None = None, last_step: int | None = None) -> Timeline:
        """The part from one step to another, both included. Condensed stretches are taken whole."""
        first, last = first_step or 0, last_step if last_step is not None else 1 << 62
        if first > last:
            raise ValueError(f"from step {first} to step {last} there is nothing: choose a later end")
        lanes = [_cut(lane, first, last) for lane in self.lanes]
        if not any(lane.extents for lane in lanes):
            last_known = max((span.step for lane in self.lanes for span in lane.spans), default=0)
            raise ValueError(f"there is no step from {first} on: the timeline ends with step {last_known}")
        start, end = (
            min(extent[0] for lane in lanes for extent in lane.extents),
            max(extent[1] for lane in lanes for extent in lane.extents),
        )
        return Timeline(self.name, self.began, lanes, [event for event in self.events if start <= event.time <= end])

    def summary(self) -> TimelineSummary:
        return TimelineSummary(self.duration_s, tuple(map(_time_of, self.lanes)))

    def idle_gaps(self, min_s: float = 1.0) -> list[IdleGap]:
        """Where workers had nothing to compute for at least so long, the longest first."""
        gaps = [gap for lane in self.lanes for gap in _gaps(lane, min_s)]
        return sorted(gaps, key=lambda gap: -gap.seconds)

    def to_json(self) -> str:
        """Everything, as one object."""
        from paceline.observe.timeline.tables import to_json

        return to_json(self)

    def to_csv(self) -> str:
        """A row for every span, stretch, event and sample."""
        from paceline.observe.timeline.tables import to_csv

        return to_csv(self)

    def to_chrome(self) -> str:
        """Chrome's trace format, which ui.perfetto.dev and chrome://tracing open."""
        from paceline.observe.timeline.chrome import to_chrome

        return to_chrome(self)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        from paceline.observe.timeline.page import to_html

        return to_html(self)


def _events(sessions: Sequence[Session], lanes: Sequence[Lane], *, is_silent: bool) -> list[TimelineEvent]:
    """What workers wrote down, and what their files show: starts, and ends that nobody had the time to write down."""
    events = []
    for lane in lanes:
        own = [session for session in sessions if session.rank == lane.rank]
        for number, (session, (start, end)) in enumerate(zip(own, lane.extents, strict=True)):
            events.append(TimelineEvent("restart" if number else "start", lane.rank, start, _first_step(session), {}))
            events += [
                TimelineEvent(name, lane.rank, start + at / 1e6, step, details)
                for name, step, at, details in session.events
            ]
            if session.end is None and (is_silent or session is not own[-1]):
                last_step = session.steps[-1][0] if session.steps else 0
                events.append(TimelineEvent("broken off", lane.rank, end, last_step, {}))
    return sorted(events, key=lambda event: (event.time, event.rank))


def _first_step(session: Session) -> int:
    """How many steps were completed when it began."""
    firsts = [row[0] for rows in (session.stretches, session.steps) for row in rows[:1]]
    return max(firsts[0] - 1, 0) if firsts else 0


def _cut(lane: Lane, first: int, last: int) -> Lane:
    spans = [span for span in lane.spans if first <= span.step <= last]
    stretches = [part for part in lane.stretches if part.last_step >= first and part.first_step <= last]
    extents = []
    for start, end in lane.extents:
        inside = [(part.start, part.end) for part in spans if start <= part.start <= end]
        inside += [(part.start, part.end) for part in stretches if start <= part.start <= end]
        if inside:
            extents.append((min(begin for begin, _ in inside), max(until for _, until in inside)))
    return replace(
        lane,
        num_steps=len({span.step for span in spans if span.kind == "optimizer"})
        + sum(part.num_steps for part in stretches),
        spans=spans,
        stretches=stretches,
        writing=[span for span in lane.writing if first <= span.step <= last],
        samples=[s for s in lane.samples if any(start < s.time and s.time - s.seconds < end for start, end in extents)],
        extents=extents,
    )


def _time_of(lane: Lane) -> WorkerTime:
    total_s = sum(end - start for start, end in lane.extents)
    seconds = dict.fromkeys(SHOWN, 0.0)
    for span in lane.spans:
        seconds[span.kind] += span.end - span.start
    for stretch in lane.stretches:
        for kind, value in stretch.seconds.items():
            seconds[kind] += value
    seconds["other"] = max(total_s - sum(seconds.values()), 0.0)
    writing_s = sum(span.end - span.start for span in lane.writing)
    return WorkerTime(
        lane.rank, lane.host, lane.device, lane.num_steps, total_s, seconds, writing_s, _means(lane.samples)
    )


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    for sample in samples:
        for name, value in sample.values.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = total + value * sample.seconds, weight + sample.seconds
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def _gaps(lane: Lane, min_s: float) -> list[IdleGap]:
    busy = sorted(
        [(span.start, span.end, span.step) for span in lane.spans if span.kind in BUSY]
        + [(part.start, part.end, part.last_step) for part in lane.stretches]
    )
    idle = [span for span in lane.spans if span.kind not in BUSY]
    gaps = []
    for start, end in lane.extents:
        until, step = start, 0
        inside = [part for part in busy if start <= part[0] <= end]
        for begin, finish, number in [*inside, (end, end, inside[-1][2] if inside else 0)]:
            if begin - until >= min_s:
                gaps.append(IdleGap(lane.rank, until, begin, step, _cause(idle, until, begin)))
            until, step = max(until, finish), number
    return gaps


def _cause(idle: Sequence[Span], start: float, end: float) -> str:
    seconds = {"other": end - start}
    for span in idle[max(bisect(idle, start, key=lambda span: span.start) - 1, 0) :]:
        if span.start >= end:
            break
        inside = max(min(span.end, end) - max(span.start, start), 0.0)
        seconds[span.kind] = seconds.get(span.kind, 0.0) + inside
        seconds["other"] -= inside
    return max(seconds, key=lambda kind: seconds[kind])


def _use_text(worker: WorkerTime) -> str:
    texts = {
        "gpu": "GPU {:.0f}%",
        "gpu_memory": "GPU memory {:.2f} GB",
        "cpu": "CPU {:.0f}% of a core",
        "memory": "memory {:.2f} GB",
        "host_cpu": "host CPU {:.0f}%",
        "host_memory": "host memory {:.2f} GB",
    }
    known = [
        text.format(worker.use[name] / 1e9 if "memory" in name else worker.use[name])
        for name, text in texts.items()
        if name in worker.use
    ]
    return ", ".join(known) or "nothing was sampled"
