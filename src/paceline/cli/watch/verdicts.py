"""The sentences that say what holds a run back."""

from __future__ import annotations

from time import monotonic
from typing import Any

from paceline.observe.run_files import RunFiles
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.read import read_evidence
from paceline.observe.verdicts.verdict import Verdict

# A page asks once a second, and reading the evidence takes some milliseconds.
INTERVAL_S = 2.0
_known: dict[str, tuple[float, list[dict[str, Any]]]] = {}


def verdicts_of(files: RunFiles) -> list[dict[str, Any]]:
    """The most important first; at most `INTERVAL_S` old. The keys are those of docs/watch-api.md."""
    made, found = _known.get(str(files.root), (0.0, []))
    if monotonic() - made >= INTERVAL_S:
        found = [_shown(verdict) for verdict in diagnose(read_evidence(files))]
        _known[str(files.root)] = monotonic(), found
    return found


def _shown(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind,
        "severity": verdict.severity,
        "text": verdict.text,
        "ranks": [] if verdict.rank is None else [verdict.rank],
        "since_step": verdict.since_step,
        "figures": [list(item) for item in verdict.figures.items()],
        "remedy": verdict.remedy or None,
    }
