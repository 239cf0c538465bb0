"""A timeline in Chrome's trace format: a process per host, a thread per worker, counters for what was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.observe.json_lines import to_json
from paceline.observe.timeline.lanes import Lane, Span

if TYPE_CHECKING:
    from paceline.observe.timeline.timeline import Timeline

# A worker's checkpoints are written beside its lane, in one of their own.
WRITING_TID = 100_000
_COUNTERS = {
    "cpu": ("CPU of rank {}", "% of a core"),
    "memory": ("memory of rank {}", "bytes"),
    "gpu": ("GPU of rank {}", "%"),
    "gpu_memory": ("GPU memory of rank {}", "bytes"),
    "host_cpu": ("CPU of the host", "% of all cores"),
    "host_memory": ("memory of the host", "bytes"),
}

TraceEvent = dict[str, Any]


def to_chrome(timeline: Timeline) -> str:
    """Events by time, as viewers expect; times in microseconds since the timeline began."""
    hosts = list(dict.fromkeys(lane.host for lane in timeline.lanes))
    pids = {lane.rank: hosts.index(lane.host) for lane in timeline.lanes}
    events: list[TraceEvent] = []
    for lane in timeline.lanes:
        events += _lane_events(lane, pids[lane.rank])
    for event in timeline.events:
        details = {"step": event.step, **event.details}
        events.append(_event("i", event.name, pids[event.rank], event.rank, event.time, s="t", args=details))
    events.sort(key=lambda event: event["ts"])
    names = [_metadata("process_name", pid, 0, name=host or "host") for pid, host in enumerate(hosts)]
    for lane in timeline.lanes:
        names += _lane_names(lane, pids[lane.rank])
    other = {"run": timeline.name, "unix_time_of_0": timeline.began}
    return to_json({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other})


def _lane_names(lane: Lane, pid: int) -> list[TraceEvent]:
    tids = {lane.rank: f"rank {lane.rank} ({lane.device})"}
    if lane.writing:
        tids[WRITING_TID + lane.rank] = f"rank {lane.rank}, writing checkpoints"
    return [
        made
        for tid, name in tids.items()
        for made in (
            _metadata("thread_name", pid, tid, name=name),
            _metadata("thread_sort_index", pid, tid, sort_index=tid),
        )
    ]


def _lane_events(lane: Lane, pid: int) -> Iterator[TraceEvent]:
    for span in lane.spans:
        yield _complete(span, pid, lane.rank)
    for span in lane.writing:
        yield _complete(span, pid, WRITING_TID + lane.rank)
    for part in lane.stretches:
        steps = {"first_step": part.first_step, "last_step": part.last_step}
        span = Span(f"steps {part.first_step} to {part.last_step}", part.start, part.end, part.first_step)
        yield _complete(span, pid, lane.rank, **steps, **{f"{kind}_s": s for kind, s in part.seconds.items()})
    for sample in lane.samples:
        for name, value in sample.values.items():
            title, unit = _COUNTERS[name]
            yield _event("C", title.format(lane.rank), pid, lane.rank, sample.time, args={unit: value})


def _complete(span: Span, pid: int, tid: int, **details: Any) -> TraceEvent:
    duration = round((span.end - span.start) * 1e6, 3)
    return _event("X", span.kind, pid, tid, span.start, dur=duration, args=details or {"step": span.step})


def _event(phase: str, name: str, pid: int, tid: int, time_s: float, **fields: Any) -> TraceEvent:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": round(time_s * 1e6, 3), **fields}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
