"""The sentences that say what holds a run back."""

from __future__ import annotations

from typing import Any

from paceline.observe.run_files import RunFiles
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.read import read_evidence


def verdicts_of(files: RunFiles) -> list[dict[str, Any]]:
    """The most important first. The keys are those of docs/watch-api.md.

    kind, severity ("error", "warning", "info" or "ok"), text, ranks, since_step, figures (names and values), remedy.
    """
    return [
        {
            "kind": verdict.kind,
            "severity": verdict.severity,
            "text": verdict.text,
            "ranks": [] if verdict.rank is None else [verdict.rank],
            "since_step": verdict.since_step,
            "figures": dict(verdict.figures),
            "remedy": verdict.remedy,
        }
        for verdict in diagnose(read_evidence(files))
    ]
