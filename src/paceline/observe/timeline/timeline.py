"""A recorded timeline: the workers' activities as numbers and as files for viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import time
from typing import Any

from paceline.observe.timeline import export
from paceline.observe.timeline.files import NOTED, SAMPLED, Session, read_sessions, timeline_files
from paceline.observe.timeline.lanes import SHOWN, IdleGap, Lane, make_lanes

# A worker writes every second: after this long without a write it is considered dead.
SILENT_S = 30.0
_SHORT_NAMES = {"optimizer": "optim", "checkpoint": "saving", "evaluation": "eval"}


@dataclass(frozen=True)
class TimelineEvent:
    """Something that happened. `time`: seconds since the timeline began; `step`: completed steps at that time."""

    name: str
    rank: int
    time: float
    step: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class TimelineSummary:
    """All workers' time. `str` gives a table."""

    duration_s: float
    workers: Sequence[Lane]

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


@dataclass
class Timeline:
    """The workers' lanes, by rank, on one clock. Times are seconds since `began`, which is Unix time.

    The run may still be live or have been killed. `lanes` contain the spans.
    """

    name: str
    began: float
    lanes: Sequence[Lane]
    events: Sequence[TimelineEvent]

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
            raise ValueError(f"the range from step {first} to step {last} is empty: choose a later end")
        cut = Timeline(self.name, self.began, [lane.between(first, last) for lane in self.lanes], ())
        if not any(lane.extents for lane in cut.lanes):
            last_known = max((span.step for lane in self.lanes for span in lane.spans), default=0)
            raise ValueError(f"there is no step from {first} on: the timeline ends with step {last_known}")
        start, end = cut._range
        cut.events = [event for event in self.events if start <= event.time <= end]
        return cut

    def summary(self) -> TimelineSummary:
        return TimelineSummary(self.duration_s, self.lanes)

    def idle_gaps(self, min_s: float = 1.0) -> list[IdleGap]:
        """Times of at least `min_s` seconds in which a worker computed nothing, the longest first."""
        gaps = [gap for lane in self.lanes for gap in lane.idle_gaps(min_s)]
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
                if name not in NOTED
            ]
            if session.end is None and (is_silent or session is not own[-1]):
                events.append(TimelineEvent("crashed", lane.rank, end, steps[-1].step if steps else 0, {}))
    return sorted(events, key=lambda event: (event.time, event.rank))


def _use_text(use: Mapping[str, float]) -> str:
    texts = []
    for name, (title, unit) in SAMPLED.items():
        if name in use:
            texts.append(f"{title} {use[name] / 1e9:.2f} GB" if unit == "bytes" else f"{title} {use[name]:.0f}{unit}")
    return ", ".join(texts) or "nothing was sampled"
