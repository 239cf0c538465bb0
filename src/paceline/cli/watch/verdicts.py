"""The sentences that say what holds a run back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from paceline.cli.watch.runs import RunEntry
from paceline.observe.run_files import RunFiles
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.read import EvidenceReader, WorkerFile
from paceline.observe.verdicts.verdict import Verdict

# Several pages may show one run.
INTERVAL_S = 0.5
MAX_RUNS = 16


def verdicts_of(run: RunEntry, workers: Mapping[int, WorkerFile]) -> list[dict[str, Any]]:
    """The most important first; at most `INTERVAL_S` old. The keys are those of docs/watch-api.md."""
    return _judge(run.files.root).verdicts(run, workers)


class _Judge:
    """Of one run. It reads what is new in the run's files. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._evidence = EvidenceReader(RunFiles(root))
        self._lock = Lock()
        self._made_s, self._found = -INTERVAL_S, list[dict[str, Any]]()

    def verdicts(self, run: RunEntry, workers: Mapping[int, WorkerFile]) -> list[dict[str, Any]]:
        with self._lock:
            if monotonic() - self._made_s >= INTERVAL_S:
                evidence = self._evidence.read(state=run.state, status=run.status, workers=workers)
                self._found = [_shown(verdict) for verdict in diagnose(evidence)]
                self._made_s = monotonic()
            return self._found


_judge = lru_cache(maxsize=MAX_RUNS)(_Judge)


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
