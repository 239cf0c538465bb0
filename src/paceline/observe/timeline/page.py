"""A timeline as one HTML page that opens offline.

The page gets numbers and draws them itself. Of a long run it gets the last steps one by one, as many as a browser takes
in at once, and stretches of steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline.observe.json_lines import to_json
from paceline.observe.timeline.lanes import SHOWN, Lane, Span, Stretch

if TYPE_CHECKING:
    from paceline.observe.timeline.timeline import Timeline

MAX_SPANS = 400_000
MAX_EVENTS = 3_000
MAX_GAPS = 20
_STEPS_PER_STRETCH = 64


def to_html(timeline: Timeline, *, max_spans: int = MAX_SPANS) -> str:
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # What a browser would take for the end of the script may stand in a name.
    data = to_json(_page_data(timeline, max_spans)).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return template.replace("/*DATA*/null", data, 1)


def _page_data(timeline: Timeline, max_spans: int) -> dict[str, Any]:
    first_step = _first_step_in_detail(timeline.lanes, max_spans)
    summary = timeline.summary()
    return {
        "name": timeline.name,
        "began": timeline.began,
        "duration": _microseconds(timeline.duration_s),
        "kinds": SHOWN,
        "workers": [
            {
                "rank": lane.rank,
                "host": lane.host,
                "device": lane.device,
                "steps": lane.num_steps,
                "use": {name: round(value, 1) for name, value in worker.use.items()},
                "extents": [[_microseconds(start), _microseconds(end)] for start, end in lane.extents],
                "spans": _packed([span for span in lane.spans if span.step >= first_step]),
                "stretches": [_stretch_row(part) for part in _stretches(lane, first_step)],
                "writing": _packed(lane.writing),
                "samples": {name: _series(lane, name) for name in ("gpu", "cpu", "host_cpu")},
            }
            for lane, worker in zip(timeline.lanes, summary.workers, strict=True)
        ],
        "events": [
            [event.name, event.rank, _microseconds(event.time), event.step, to_json(event.details)]
            for event in timeline.events[-MAX_EVENTS:]
        ],
        "gaps": [
            [gap.rank, _microseconds(gap.start), _microseconds(gap.end), gap.step, gap.cause]
            for gap in timeline.idle_gaps()[:MAX_GAPS]
        ],
    }


def _first_step_in_detail(lanes: Sequence[Lane], max_spans: int) -> int:
    """The same on all lanes."""
    num_each = max_spans // max(len(lanes), 1)
    return max((lane.spans[-num_each].step + 1 for lane in lanes if len(lane.spans) > num_each), default=0)


def _stretches(lane: Lane, first_step: int) -> list[Stretch]:
    old = [span for span in lane.spans if span.step < first_step]
    return [*lane.stretches, *(_sum(list(group)) for _, group in groupby(old, lambda s: s.step // _STEPS_PER_STRETCH))]


def _sum(spans: Sequence[Span]) -> Stretch:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end - span.start
    steps = {span.step for span in spans}
    return Stretch(spans[0].start, spans[-1].end, spans[0].step, spans[-1].step, len(steps), seconds)


def _packed(spans: Sequence[Span]) -> list[int]:
    """Four numbers each: kind, microseconds since the end of the one before, duration, steps since the one before."""
    numbers: list[int] = []
    at = step = 0
    for span in spans:
        start, end = _microseconds(span.start), _microseconds(span.end)
        kind = SHOWN.index(span.kind) if span.kind in SHOWN else SHOWN.index("checkpoint")
        numbers += (kind, start - at, end - start, span.step - step)
        at, step = end, span.step
    return numbers


def _stretch_row(part: Stretch) -> list[int]:
    times = [_microseconds(part.seconds.get(kind, 0.0)) for kind in SHOWN]
    return [_microseconds(part.start), _microseconds(part.end), part.first_step, part.last_step, *times]


def _series(lane: Lane, name: str) -> list[list[float]]:
    return [[_microseconds(s.time), _microseconds(s.seconds), s.values[name]] for s in lane.samples if name in s.values]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
