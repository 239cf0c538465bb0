"""A timeline as JSON and as a CSV table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.observe.json_lines import to_json as encode
from paceline.observe.timeline.lanes import Lane

if TYPE_CHECKING:
    from paceline.observe.timeline.timeline import Timeline

CSV_COLUMNS = ("rank", "host", "what", "name", "step", "start_s", "end_s", "details")


def to_json(timeline: Timeline) -> str:
    """`spans` are [kind, start, end, step]; times are seconds since `began`, rounded to microseconds."""
    summary = {worker.rank: worker for worker in timeline.summary().workers}
    return encode(
        {
            "name": timeline.name,
            "began": timeline.began,
            "duration_s": timeline.duration_s,
            "workers": [
                {
                    "rank": lane.rank,
                    "host": lane.host,
                    "device": lane.device,
                    "num_steps": lane.num_steps,
                    "total_s": _rounded(summary[lane.rank].total_s),
                    "seconds": {kind: _rounded(s) for kind, s in summary[lane.rank].seconds.items()},
                    "use": dict(summary[lane.rank].use),
                    "spans": [[s.kind, _rounded(s.start), _rounded(s.end), s.step] for s in lane.spans],
                    "writing": [[s.kind, _rounded(s.start), _rounded(s.end), s.step] for s in lane.writing],
                    "stretches": [part._asdict() for part in lane.stretches],
                    "samples": [{"time": _rounded(s.time), "seconds": s.seconds, **s.values} for s in lane.samples],
                }
                for lane in timeline.lanes
            ],
            "events": [
                {"name": e.name, "rank": e.rank, "time": _rounded(e.time), "step": e.step, "details": e.details}
                for e in timeline.events
            ],
            "idle_gaps": [
                {"rank": g.rank, "start": _rounded(g.start), "end": _rounded(g.end), "step": g.step, "cause": g.cause}
                for g in timeline.idle_gaps()
            ],
        }
    )


def to_csv(timeline: Timeline) -> str:
    """`what`: span, stretch, event, idle, sample. A stretch has a row for each of its kinds, with its seconds."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(CSV_COLUMNS)
    hosts = {lane.rank: lane.host for lane in timeline.lanes}
    for lane in timeline.lanes:
        table.writerows(_rows(lane))
    for event in timeline.events:
        at, details = f"{event.time:.6f}", encode(event.details)
        table.writerow((event.rank, hosts[event.rank], "event", event.name, event.step, at, at, details))
    for gap in timeline.idle_gaps():
        times = f"{gap.start:.6f}", f"{gap.end:.6f}"
        table.writerow((gap.rank, hosts[gap.rank], "idle", gap.cause, gap.step, *times, ""))
    return text.getvalue()


def _rows(lane: Lane) -> Iterator[tuple[Any, ...]]:
    who = lane.rank, lane.host
    for span in (*lane.spans, *lane.writing):
        yield (*who, "span", span.kind, span.step, f"{span.start:.6f}", f"{span.end:.6f}", "")
    for part in lane.stretches:
        times = f"{part.start:.6f}", f"{part.end:.6f}"
        for kind, seconds in part.seconds.items():
            details = encode({"seconds": _rounded(seconds), "last_step": part.last_step})
            yield (*who, "stretch", kind, part.first_step, *times, details)
    for sample in lane.samples:
        times = f"{sample.time - sample.seconds:.6f}", f"{sample.time:.6f}"
        for name, value in sample.values.items():
            yield (*who, "sample", name, "", *times, value)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
