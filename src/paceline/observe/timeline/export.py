"""A timeline as JSON, CSV, Chrome trace and HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from paceline.observe import json_lines
from paceline.observe.timeline.files import SAMPLED, Span, merge_spans
from paceline.observe.timeline.lanes import Lane

if TYPE_CHECKING:
    from paceline.observe.timeline.timeline import Timeline

CSV_COLUMNS = ("rank", "host", "what", "name", "step", "start_s", "end_s", "details")
# The HTML page shows this many spans one by one, the newest; older steps are summed over intervals.
MAX_SPANS = 200_000
_STEPS_PER_INTERVAL = 64
# In Chrome traces each worker's background writing has a separate thread.
_WRITING_TID = 100_000


def to_json(timeline: Timeline, lanes: Sequence[Lane] | None = None) -> str:
    """Everything, as one JSON object. Times are seconds since `began`.

    `spans` are [kind, start, end, step, first step]; the steps differ where old spans were condensed to sums. lanes:
    instead of the timeline's own.
    """
    fields = ("rank", "host", "device", "num_steps", "total_s", "seconds", "writing_s", "use", "extents", "spans")
    workers = [
        {name: getattr(lane, name) for name in (*fields, "writing", "noted")}
        | {"samples": [{"time": time, "seconds": seconds, **values} for time, seconds, values in lane.samples]}
        for lane in (timeline.lanes if lanes is None else lanes)
    ]
    return json_lines.to_json(
        {
            **{name: getattr(timeline, name) for name in ("name", "began", "duration_s")},
            "workers": workers,
            "events": [asdict(event) for event in timeline.events],
            "idle_gaps": [asdict(gap) for gap in timeline.idle_gaps()],
        }
    )


def to_csv(timeline: Timeline) -> str:
    """A CSV table. `what`: span, event, idle or sample. The details of a condensed span name its first step."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(CSV_COLUMNS)
    hosts = {lane.rank: lane.host for lane in timeline.lanes}
    for rank, what, name, step, start, end, details in _csv_rows(timeline):
        table.writerow((rank, hosts[rank], what, name, step, f"{start:.6f}", f"{end:.6f}", details))
    return text.getvalue()


def _csv_rows(timeline: Timeline) -> Iterator[tuple[Any, ...]]:
    for lane in timeline.lanes:
        for span in (*lane.spans, *lane.writing):
            details = json_lines.to_json({"first_step": span.first_step}) if span.is_condensed else ""
            yield lane.rank, "span", span.kind, span.step, span.start, span.end, details
        for sample in lane.samples:
            for name, value in sample.values.items():
                yield lane.rank, "sample", name, "", sample.time - sample.seconds, sample.time, value
    for event in timeline.events:
        details = json_lines.to_json(event.details)
        yield event.rank, "event", event.name, event.step, event.time, event.time, details
    for gap in timeline.idle_gaps():
        yield gap.rank, "idle", gap.cause, gap.step, gap.start, gap.end, ""


def to_chrome(timeline: Timeline) -> str:
    """Chrome's trace format, for ui.perfetto.dev and chrome://tracing: a process per host, a thread per worker."""
    hosts = list(dict.fromkeys(lane.host for lane in timeline.lanes))
    pids = {lane.rank: hosts.index(lane.host) for lane in timeline.lanes}
    names = [_chrome_name("process_name", pid, 0, name=host or "host") for pid, host in enumerate(hosts)]
    events = [
        _chrome_event("i", e.name, pids[e.rank], e.rank, e.time, s="t", args={"step": e.step, **e.details})
        for e in timeline.events
    ]
    for lane in timeline.lanes:
        pid = pids[lane.rank]
        threads = {lane.rank: (f"rank {lane.rank} ({lane.device})", lane.spans)}
        if lane.writing:
            threads[_WRITING_TID + lane.rank] = f"rank {lane.rank}, writing checkpoints", lane.writing
        for tid, (name, spans) in threads.items():
            names.append(_chrome_name("thread_name", pid, tid, name=name))
            names.append(_chrome_name("thread_sort_index", pid, tid, sort_index=tid))
            for span in spans:
                steps = {"first_step": span.first_step} if span.is_condensed else {}
                args, duration_us = {"step": span.step, **steps}, round(span.duration * 1e6, 3)
                events.append(_chrome_event("X", span.kind, pid, tid, span.start, dur=duration_us, args=args))
        for sample in lane.samples:
            for name, value in sample.values.items():
                title, unit = SAMPLED[name]
                counter = f"{title} of rank {lane.rank}"
                events.append(_chrome_event("C", counter, pid, lane.rank, sample.time, args={unit: value}))
    events.sort(key=lambda event: event["ts"])
    other = {"run": timeline.name, "unix_time_of_0": timeline.began}
    return json_lines.to_json({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other})


def _chrome_event(phase: str, name: str, pid: int, tid: int, time_s: float, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": round(time_s * 1e6, 3), **fields}


def _chrome_name(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def to_html(timeline: Timeline, *, max_spans: int = MAX_SPANS) -> str:
    """A self-contained HTML page. max_spans: older steps are summed."""
    num_each = max_spans // max(len(timeline.lanes), 1)
    long_lanes = [lane for lane in timeline.lanes if len(lane.spans) > num_each]
    first_step = max((lane.spans[-num_each].step + 1 for lane in long_lanes), default=0)  # shown in detail
    lanes = []
    for lane in timeline.lanes:
        spans: list[Span] = []
        for start, end in lane.extents:
            inside = [span for span in lane.spans if start <= span.start <= end]
            spans += merge_spans([span for span in inside if span.step < first_step], _STEPS_PER_INTERVAL)
            spans += [span for span in inside if span.step >= first_step]
        lanes.append(replace(lane, spans=spans))
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Names must not end the page's script element.
    text = to_json(timeline, lanes).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return template.replace("/*DATA*/null", text, 1)
