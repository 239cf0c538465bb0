"""A timeline as JSON, CSV, Chrome trace and HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from paceline.observe import json_lines
from paceline.observe.timeline.files import merge_stretches
from paceline.observe.timeline.lanes import SHOWN, Lane, Span

if TYPE_CHECKING:
    from paceline.observe.timeline.timeline import Timeline

CSV_COLUMNS = ("rank", "host", "what", "name", "step", "start_s", "end_s", "details")
# The HTML page shows this many spans one by one, the newest; older steps are summed, like events and gaps beyond these.
MAX_SPANS = 400_000
MAX_EVENTS = 3_000
MAX_GAPS = 20
_STEPS_PER_STRETCH = 64
# In Chrome traces each worker's background writing has a separate thread.
_WRITING_TID = 100_000
_COUNTERS = {
    "cpu": ("CPU of rank {}", "% of a core"),
    "memory": ("memory of rank {}", "bytes"),
    "gpu": ("GPU of rank {}", "%"),
    "gpu_memory": ("GPU memory of rank {}", "bytes"),
    "host_cpu": ("CPU of the host", "% of all cores"),
    "host_memory": ("memory of the host", "bytes"),
}


def to_json(timeline: Timeline) -> str:
    """Everything, as one JSON object. `spans` are [kind, start, end, step]; times are seconds since `began`."""
    workers = [
        {
            **asdict(worker),
            "spans": lane.spans,
            "writing": lane.writing,
            "stretches": [part._asdict() for part in lane.stretches],
            "samples": [{"time": sample.time, "seconds": sample.seconds, **sample.values} for sample in lane.samples],
        }
        for lane, worker in zip(timeline.lanes, timeline.summary().workers, strict=True)
    ]
    return json_lines.to_json(
        {
            "name": timeline.name,
            "began": timeline.began,
            "duration_s": timeline.duration_s,
            "workers": workers,
            "events": [asdict(event) for event in timeline.events],
            "idle_gaps": [asdict(gap) for gap in timeline.idle_gaps()],
        }
    )


def to_csv(timeline: Timeline) -> str:
    """A CSV table. `what`: span, stretch, event, idle or sample. A stretch has a row per kind, with its seconds."""
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
            yield lane.rank, "span", span.kind, span.step, span.start, span.end, ""
        for part in lane.stretches:
            for kind, seconds in part.seconds.items():
                details = json_lines.to_json({"seconds": round(seconds, 6), "last_step": part.last_step})
                yield lane.rank, "stretch", kind, part.first_step, part.start, part.end, details
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
        tids = {lane.rank: f"rank {lane.rank} ({lane.device})"}
        if lane.writing:
            tids[_WRITING_TID + lane.rank] = f"rank {lane.rank}, writing checkpoints"
        for tid, name in tids.items():
            names.append(_chrome_name("thread_name", pids[lane.rank], tid, name=name))
            names.append(_chrome_name("thread_sort_index", pids[lane.rank], tid, sort_index=tid))
        events += _chrome_lane(lane, pids[lane.rank])
    events.sort(key=lambda event: event["ts"])
    other = {"run": timeline.name, "unix_time_of_0": timeline.began}
    return json_lines.to_json({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other})


def _chrome_lane(lane: Lane, pid: int) -> Iterator[dict[str, Any]]:
    blocks: list[tuple[int, str, float, float, dict[str, Any]]] = [
        *((lane.rank, s.kind, s.start, s.end, {"step": s.step}) for s in lane.spans),
        *((_WRITING_TID + lane.rank, s.kind, s.start, s.end, {"step": s.step}) for s in lane.writing),
    ]
    for part in lane.stretches:
        seconds = {f"{kind}_s": value for kind, value in part.seconds.items()}
        details = {"first_step": part.first_step, "last_step": part.last_step, **seconds}
        name = f"steps {part.first_step} to {part.last_step}"
        blocks.append((lane.rank, name, part.start, part.end, details))
    for tid, name, start, end, details in blocks:
        yield _chrome_event("X", name, pid, tid, start, dur=round((end - start) * 1e6, 3), args=details)
    for sample in lane.samples:
        for name, value in sample.values.items():
            title, unit = _COUNTERS[name]
            yield _chrome_event("C", title.format(lane.rank), pid, lane.rank, sample.time, args={unit: value})


def _chrome_event(phase: str, name: str, pid: int, tid: int, time_s: float, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": round(time_s * 1e6, 3), **fields}


def _chrome_name(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def to_html(timeline: Timeline, *, max_spans: int = MAX_SPANS) -> str:
    """A self-contained HTML page. max_spans: older steps are summed."""
    num_each = max_spans // max(len(timeline.lanes), 1)
    long_lanes = [lane for lane in timeline.lanes if len(lane.spans) > num_each]
    first_step = max((lane.spans[-num_each].step + 1 for lane in long_lanes), default=0)  # shown in detail
    data = {
        "name": timeline.name,
        "began": timeline.began,
        "kinds": SHOWN,
        "workers": [
            {
                "rank": lane.rank,
                "host": lane.host,
                "device": lane.device,
                "steps": lane.num_steps,
                "total": _us(worker.total_s),
                "times": [_us(worker.seconds[kind]) for kind in SHOWN],
                "use": {name: round(value, 1) for name, value in worker.use.items()},
                "extents": [[_us(start), _us(end)] for start, end in lane.extents],
                "spans": _packed([span for span in lane.spans if span.step >= first_step]),
                "stretches": _stretch_rows(lane, first_step),
                "writing": _packed(lane.writing),
                "samples": {
                    name: [[_us(s.time), _us(s.seconds), s.values[name]] for s in lane.samples if name in s.values]
                    for name in ("gpu", "cpu", "host_cpu")
                },
            }
            for lane, worker in zip(timeline.lanes, timeline.summary().workers, strict=True)
        ],
        "events": [[e.name, e.rank, _us(e.time), e.step, e.details] for e in timeline.events[-MAX_EVENTS:]],
        "gaps": [[g.rank, _us(g.start), _us(g.end), g.step, g.cause] for g in timeline.idle_gaps()[:MAX_GAPS]],
    }
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # Names must not end the page's script element.
    text = json_lines.to_json(data).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return template.replace("/*DATA*/null", text, 1)


def _stretch_rows(lane: Lane, first_step: int) -> list[list[int]]:
    """Stretches of the file, then those of spans before `first_step`; see `files`, with SHOWN kinds."""
    rows = [
        [p.first_step, p.last_step, p.num_steps, _us(p.start), _us(p.end), *(_us(p.seconds.get(k, 0.0)) for k in SHOWN)]
        for p in lane.stretches
    ]
    old = (
        [s.step, s.step, 0, _us(s.start), _us(s.end), *(_us(s.end - s.start) * (s.kind == kind) for kind in SHOWN)]
        for s in lane.spans
        if s.step < first_step
    )
    return [*rows, *merge_stretches(old, _STEPS_PER_STRETCH)]


def _packed(spans: Sequence[Span]) -> list[int]:
    """Four numbers per span: kind, microseconds since the previous end, duration, steps since the previous one."""
    numbers: list[int] = []
    at = step = 0
    for span in spans:
        start, end = _us(span.start), _us(span.end)
        kind = SHOWN.index(span.kind) if span.kind in SHOWN else SHOWN.index("checkpoint")
        numbers += (kind, start - at, end - start, span.step - step)
        at, step = end, span.step
    return numbers


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
