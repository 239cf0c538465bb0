"""Live runs, and those that ended within an hour, in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from time import time

from paceline.cli.watch import view
from paceline.cli.watch.runs import RunEntry

ENDED_S = 3600.0

_Sample = tuple[str, dict[str, object], float | int | None]


def prometheus_text(runs: Sequence[RunEntry]) -> str:
    now = time()
    samples: dict[str, list[str]] = {}
    for run in runs:
        if now - run.changed < ENDED_S or run.state == "live":
            for name, labels, value in _samples(run, now):
                if value is not None:
                    shown = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
                    samples.setdefault(name, []).append(f"paceline_{name}{{{shown}}} {_number(value)}")
    lines = []
    for name, found in samples.items():
        lines += [f"# TYPE paceline_{name} gauge", *found]
    return "".join(f"{line}\n" for line in lines)


def _samples(run: RunEntry, now: float) -> Iterator[_Sample]:
    found = view.view(run)
    own: dict[str, object] = {"run": run.name}
    yield "live", own, int(found["state"] == "live")
    for name in ("step", "total_steps", "loss", "efficiency"):
        yield name, own, found[name]
    yield "samples_per_second", own, found["samples_per_s"]
    yield "last_step_age_seconds", own, None if found["last_step_at"] is None else now - found["last_step_at"]
    for name, value in found["evaluation"]:
        yield "metric", {**own, "name": name}, value
    for worker in found["workers"]:
        labels = {**own, "worker": worker["rank"]}
        yield "worker_share", labels, worker["share"]
        yield "worker_memory_bytes", labels, worker["memory_bytes"]
        yield "worker_device_memory_bytes", labels, worker["device_memory_bytes"]
        for lane, part in (worker["lanes"] or {}).items():
            yield "worker_time", {**labels, "lane": lane}, part


def _escaped(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
