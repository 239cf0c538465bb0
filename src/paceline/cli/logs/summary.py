"""Summaries of runs as text, JSON, a Markdown table, or one line each; and the table of all runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from paceline.cli.commands import or_dash
from paceline.observe import formats
from paceline.observe.json_lines import to_json
from paceline.observe.summary import Summary, text

FORMATS = ("text", "json", "md", "one-line")


def render(summaries: Sequence[Summary], form: str) -> str:
    if form == "json":
        documents = [json.loads(to_json(asdict(summary))) for summary in summaries]
        return json.dumps(documents if len(documents) != 1 else documents[0], indent=2, ensure_ascii=False)
    if form == "md":
        head = [
            "| run | state | steps | trained | loss | lowest | evaluation | samples/s |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
        ]
        return "\n".join([*head, *map(_markdown_row, summaries)])
    separator, render_one = ("\n", _line) if form == "one-line" else ("\n\n", text)
    return separator.join(map(render_one, summaries))


def table(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """The rows of `paceline logs list`, the header first."""
    rows = [
        (
            run.name,
            run.state,
            _steps(run),
            formats.loss(run.train_loss.last if run.train_loss else None),
            or_dash(run.samples_per_s, formats.rate),
            or_dash(run.training_s or None, formats.duration),
            or_dash(run.started, lambda time: formats.moment(time, "%Y-%m-%d %H:%M")),
        )
        for run in summaries
    ]
    return [("run", "state", "step", "loss", "samples/s", "trained", "started"), *rows]


def _markdown_row(run: Summary) -> str:
    cells = [
        run.name,
        run.state,
        _steps(run),
        formats.duration(run.training_s),
        formats.loss(run.train_loss.last if run.train_loss else None),
        formats.loss(run.train_loss.lowest if run.train_loss else None),
        ", ".join(_evaluations(run)) or "-",
        or_dash(run.samples_per_s, formats.rate),
    ]
    return f"| {' | '.join(formats.one_line(cell).replace('|', '/') for cell in cells)} |"


def _line(run: Summary) -> str:
    parts = [f"{run.name}: {run.state}", f"step {_steps(run)}"]
    parts += [f"loss {formats.loss(run.train_loss.last)}"] if run.train_loss else []
    parts += _evaluations(run)
    parts += [f"{or_dash(run.samples_per_s, formats.rate)} samples/s"] if run.samples_per_s is not None else []
    return formats.one_line(", ".join([*parts, formats.duration(run.training_s)]))


def _evaluations(run: Summary) -> list[str]:
    return [f"{name} {formats.loss(reached.last)}" for name, reached in run.evaluation.items()]


def _steps(run: Summary) -> str:
    return f"{run.step}" if run.total_steps is None else f"{run.step}/{run.total_steps}"
