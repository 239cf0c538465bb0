"""Summaries of runs as text, JSON, a Markdown table, or a line each; and the list of all runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from paceline.cli.commands import columns
from paceline.observe import formats
from paceline.observe.json_lines import to_json
from paceline.observe.summary import Glance, Summary, text

FORMATS = ("text", "json", "md", "one-line")


def render(summaries: Sequence[Summary], form: str) -> str:
    if form == "json":
        documents = [json.loads(to_json(asdict(summary))) for summary in summaries]
        return json.dumps(documents if len(documents) != 1 else documents[0], indent=2, ensure_ascii=False)
    if form == "md":
        return _markdown(summaries)
    if form == "one-line":
        return "\n".join(_line(summary) for summary in summaries)
    return "\n\n".join(text(summary) for summary in summaries)


def table(glances: Sequence[Glance]) -> str:
    """`paceline logs list`."""
    rows = [
        (
            glance.name,
            glance.state,
            _steps(glance.step, glance.total_steps),
            formats.loss(glance.loss),
            "-" if glance.samples_per_s is None else formats.rate(glance.samples_per_s),
            "-" if glance.training_s is None else formats.duration(glance.training_s),
            _when(glance.started),
        )
        for glance in glances
    ]
    return columns([("run", "state", "step", "loss", "samples/s", "trained", "started"), *rows], numbers=range(2, 6))


def _markdown(summaries: Sequence[Summary]) -> str:
    lines = [
        "| run | state | steps | trained | loss | lowest | evaluation | samples/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for summary in summaries:
        loss = summary.train_loss
        cells = [
            summary.name,
            summary.state,
            _steps(summary.step, summary.total_steps),
            formats.duration(summary.training_s),
            formats.loss(loss.last if loss else None),
            formats.loss(loss.lowest if loss else None),
            _evaluation(summary) or "-",
            "-" if summary.samples_per_s is None else formats.rate(summary.samples_per_s),
        ]
        lines.append(f"| {' | '.join(formats.one_line(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _line(summary: Summary) -> str:
    parts = [f"{summary.name}: {summary.state}", f"step {_steps(summary.step, summary.total_steps)}"]
    if summary.train_loss:
        parts.append(f"loss {formats.loss(summary.train_loss.last)}")
    if evaluation := _evaluation(summary):
        parts.append(evaluation)
    if summary.samples_per_s is not None:
        parts.append(f"{formats.rate(summary.samples_per_s)} samples/s")
    parts.append(formats.duration(summary.training_s))
    return formats.one_line(", ".join(parts))


def _evaluation(summary: Summary) -> str:
    return ", ".join(f"{name} {formats.loss(reached.last)}" for name, reached in summary.evaluation.items())


def _steps(step: int, total: int | None) -> str:
    return f"{step}" if total is None else f"{step}/{total}"


def _when(started: float | None) -> str:
    return "-" if started is None else formats.moment(started, "%Y-%m-%d %H:%M")
