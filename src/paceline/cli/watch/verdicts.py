"""The sentences that say what holds a run back."""

from __future__ import annotations

from typing import Any

from paceline.observe.run_files import RunFiles


def verdicts_of(files: RunFiles) -> list[dict[str, Any]]:  # noqa: ARG001
    """The most important first; empty if nothing is known. The keys are those of docs/watch-api.md.

    kind, severity ("error", "warning", "info" or "ok"), text, ranks, since_step, figures (names and values), remedy.
    """
    return []
