"""A recorded timeline: what each worker did when, as numbers and as files for viewers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from time import time
from typing import Any

from paceline.observe.timeline import export
from paceline.observe.timeline.files import Session, Span, mean_sample, read_sessions, timeline_files
from paceline.observe.timeline.lanes import SHOWN, Lane, make_lanes

# A worker writes every second: after this long without a write it is considered dead.
SILENT_S = 30.0
# Activities during which a worker is not idle.
BUSY = ("compute", "sync", "optimizer", "evaluation")
_SHORT_NAMES = {"optimizer": "optim", "checkpoint": "saving", "evaluation": "eval"}
_USE_TEXTS = {
    "gpu": "GPU {:.0f}%",
    "gpu_memory": "GPU memory {:.2f} GB",
    "cpu": "CPU {:.0f}% of a core",
    "memory": "memory {:.2f} GB",
    "host_cpu": "host CPU {:.0f}%",
    "host_memory": "host memory {:.2f} GB",
}


@dataclass(frozen=True)
class TimelineEvent:
    """Something that happened. `time`: seconds since the timeline began; `step`: completed steps at that time."""

    name: str
    rank: int
    time: float
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class IdleGap:
    """A time in which a worker computed nothing. `cause`: the kind that most of it was spent on."""

    rank: int
    start: float
    end: float
    step: int
    cause: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RecordedWorkerTime:
    """A worker's time by `SHOWN` kinds; the seconds add up to `total_s`.

    `use`: means of the system samples, such as "cpu" and "gpu" in percent. `writing_s`: checkpoints written to disk in
    the background.
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
        """The fraction of the time spent on a kind, 0 to 1."""
        return self.seconds[kind] / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class TimelineSummary:
    """All workers' time. `str` gives a table."""

    duration_s: float
    workers: tuple[RecordedWorkerTime, ...]

    def __str__(self) -> str:
        names = [_SHORT_NAMES.get(kind, kind) for kind in SHOWN]
        widths = [max(len(name) + 1, 7) for name in names]
        header = "worker   steps seconds" + "".join(map(str.rjust, names, widths))
        lines = [
            f"{w.rank:>6}{w.num_steps:>8}{w.total_s:>8.1f}"
            + "".join(f"{w.part(kind):>{width}.1%}" for kind, width in zip(SHOWN, widths, strict=True))
            for w in self.workers
        ]
        uses = [f"rank {w.rank}, {w.host} {w.device}: {_use_text(w.use)}" for w in self.workers]
        return "\n".join([header, *lines, "", *uses])


class Timeline:
    """The workers' lanes, by rank, on one clock. Times are seconds since `began`, which is Unix time.

    Also of a run that is still live or was killed. `lanes` contain the spans.
    """

    def __init__(self, name: str, began: float, lanes: Sequence[Lane], events: Sequence[TimelineEvent]) -> None:
        self.name = name
        self.began = began
        self.lanes = tuple(lanes)
        self.events = tuple(events)

    @classmethod
    def load(cls, run_folder: str | PathLike[str]) -> Timeline:
        """Load from a run's folder, or from the folder that was given as `timeline`."""
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
        start, end = self._range
        return end - start

    @property
    def _range(self) -> tuple[float, float]:
        extents = [extent for lane in self.lanes for extent in lane.extents]
        return min(start for start, _ in extents), max(end for _, end in extents)

    def between(self, first_step: int | None = None, last_step: int | None = None) -> Timeline:
        """The part from one step to another, both included. Condensed spans are included as a whole."""
        first, last = first_step or 0, last_step if last_step is not None else 1 << 62
        if first > last:
            raise ValueError(f"from step {first} to step {last} there is nothing: choose a later end")
        cut = Timeline(self.name, self.began, [_cut(lane, first, last) for lane in self.lanes], ())
        if not any(lane.extents for lane in cut.lanes):
            last_known = max((span.step for lane in self.lanes for span in lane.spans), default=0)
            raise ValueError(f"there is no step from {first} on: the timeline ends with step {last_known}")
        start, end = cut._range
        cut.events = tuple(event for event in self.events if start <= event.time <= end)
        return cut

    def summary(self) -> TimelineSummary:
        return TimelineSummary(self.duration_s, tuple(map(_worker_time, self.lanes)))

    def idle_gaps(self, min_s: float = 1.0) -> list[IdleGap]:
        """Times of at least `min_s` seconds in which a worker computed nothing, the longest first."""
        gaps = [gap for lane in self.lanes for gap in _gaps(lane, min_s)]
        return sorted(gaps, key=lambda gap: -gap.seconds)

    to_json = export.to_json
    to_csv = export.to_csv
    to_chrome = export.to_chrome
    to_html = export.to_html


def _events(sessions: Sequence[Session], lanes: Sequence[Lane], *, is_silent: bool) -> list[TimelineEvent]:
    """Recorded events, starts, and sessions that ended without a record."""
    events = []
    for lane in lanes:
        own = [session for session in sessions if session.rank == lane.rank]
        for number, (session, (start, end)) in enumerate(zip(own, lane.extents, strict=True)):
            steps = [span for span in session.spans if span.kind == "optimizer"]
            completed = max(steps[0].first_step - 1, 0) if steps else 0
            events.append(TimelineEvent("restart" if number else "start", lane.rank, start, completed, {}))
            events += [
                TimelineEvent(name, lane.rank, start + at / 1e6, step, details)
                for name, step, at, details in session.events
            ]
            if session.end is None and (is_silent or session is not own[-1]):
                events.append(TimelineEvent("broken off", lane.rank, end, steps[-1].step if steps else 0, {}))
    return sorted(events, key=lambda event: (event.time, event.rank))


def _cut(lane: Lane, first: int, last: int) -> Lane:
    spans = [span for span in lane.spans if span.step >= first and span.first_step <= last]
    extents = []
    for start, end in lane.extents:
        if inside := [span for span in spans if start <= span.start <= end]:
            extents.append((inside[0].start, inside[-1].end))
    return replace(
        lane,
        spans=spans,
        writing=[span for span in lane.writing if first <= span.step <= last],
        samples=[s for s in lane.samples if any(start < s.time and s.time - s.seconds < end for start, end in extents)],
        extents=extents,
    )


def _worker_time(lane: Lane) -> RecordedWorkerTime:
    total_s = sum(end - start for start, end in lane.extents)
    seconds = dict.fromkeys(SHOWN, 0.0)
    for span in lane.spans:
        seconds[span.kind] += span.duration
    seconds["other"] = 0.0  # a part of it is in condensed spans
    seconds["other"] = max(total_s - sum(seconds.values()), 0.0)
    writing_s = sum(span.duration for span in lane.writing)
    use = mean_sample(lane.samples).values
    return RecordedWorkerTime(lane.rank, lane.host, lane.device, lane.num_steps, total_s, seconds, writing_s, use)


def _gaps(lane: Lane, min_s: float) -> Iterator[IdleGap]:
    for start, end in lane.extents:
        # The end and the step of the last activity, and what took how long since.
        busy_until, step, seconds = start, 0, {"other": 0.0}
        for span in [*(span for span in lane.spans if start <= span.start <= end), Span("compute", end, end, 0, 0)]:
            if span.kind not in BUSY and not span.is_condensed:
                seconds[span.kind] = seconds.get(span.kind, 0.0) + span.duration
                continue
            if (gap_s := span.start - busy_until) >= min_s:
                seconds["other"] = gap_s - sum(seconds.values())
                yield IdleGap(lane.rank, busy_until, span.start, step, max(seconds, key=lambda kind: seconds[kind]))
            busy_until, step, seconds = max(busy_until, span.end), span.step, {"other": 0.0}


def _use_text(use: Mapping[str, float]) -> str:
    known = {name: use[name] / 1e9 if "memory" in name else use[name] for name in _USE_TEXTS if name in use}
    return ", ".join(_USE_TEXTS[name].format(value) for name, value in known.items()) or "nothing was sampled"
