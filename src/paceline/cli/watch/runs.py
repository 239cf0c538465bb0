"""The runs of a folder: one row of a table for each, from its status and the end of its metrics."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from paceline.cli.commands import CommandError
from paceline.cli.watch.safe_files import document, file_stat, read_bytes
from paceline.observe.json_lines import is_count, is_number, number_or_none
from paceline.observe.metrics import RESUMED_FROM, flat_items, is_resume, not_superseded, parse_records, step_of
from paceline.observe.run_files import MAX_CONFIG_BYTES, RunFiles, State, Status, read_status, state_of

TAIL_BYTES, LONG_TAIL_BYTES = 16 << 10, 1 << 20
NEWEST_LINES = 6
# The folder is read again after this time, or this many times the time that it took.
SCAN_INTERVAL_S, SCAN_INTERVAL_RATIO = 1.0, 50.0

_SAFE_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.+=-]{1,200}")


def id_of(name: str) -> str:
    """The name, or if that cannot be part of an address, a hash of it."""
    return name if _SAFE_ID.fullmatch(name) else f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


class RunEntry:
    """A run, with what is known of it from its files. `refresh` reads those that changed."""

    def __init__(self, root: Path) -> None:
        self.files = RunFiles(root)
        self.name = root.name
        self.id = id_of(root.name)
        self.status: Status | None = None
        self.state: State = "unknown"
        self.last: dict[str, Any] = {}  # by name, the newest values of the last lines
        self.names: dict[str, None] = {}  # of metrics that were seen, in order
        self.work: list[float] = []  # by worker, micro-batches of the last lines with the newest number of workers
        self.last_step = 0
        self.pace_s: float | None = None  # seconds per step
        self.lead: dict[str, Any] = {}  # the status of worker 0
        self.metrics_bytes = 0
        self.changed = self.metrics_changed = self.status_changed = 0.0
        self._lead = self.files.ranks / "rank-0.json"
        self._stats: dict[str, tuple[int, int, int]] = {}

    def refresh(self) -> bool:
        """Whether this is a run."""
        files = self.files
        status, metrics = file_stat(files.status), file_stat(files.metrics)
        if status is None and metrics is None:
            return False
        self.changed = max(each.st_mtime for each in (status, metrics) if each is not None)
        self.metrics_changed, self.status_changed = (
            0.0 if each is None else each.st_mtime for each in (metrics, status)
        )
        if self._has_changed("status", status):
            self.status = None if status is None else read_status(files)
        before = self._stats.get("metrics", (0, 0, 0))
        if self._has_changed("metrics", metrics):
            self.metrics_bytes = 0 if metrics is None else metrics.st_size
            tail = read_bytes(files.metrics, TAIL_BYTES, from_end=True) or b""
            if tail.count(b"\n") < 2 and len(tail) < self.metrics_bytes:  # long lines, of a thousand workers
                tail = read_bytes(files.metrics, LONG_TAIL_BYTES, from_end=True) or b""
            self._read_tail(tail, is_same=metrics is not None and before[0] == metrics.st_ino)
        if self._has_changed("lead", file_stat(self._lead)):
            self.lead = document(self._lead)
        self.state = state_of(files, self.status)
        return True

    def _has_changed(self, name: str, found: os.stat_result | None) -> bool:
        stamp = (0, 0, 0) if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        before, self._stats[name] = self._stats.get(name), stamp
        return stamp != before

    def _read_tail(self, tail: bytes, *, is_same: bool) -> None:
        """is_same: of the file whose tail was read before."""
        lines = parse_records(chosen_lines(tail, is_cut=len(tail) < self.metrics_bytes))
        counted = not_superseded(lines)
        shares = [found for record in counted if isinstance(found := record.get("shares"), list)]
        alike = [found for found in shares if len(found) == len(shares[-1]) and all(map(is_number, found))]
        timed = [record for record in counted if is_number(record.get("time"))]
        # Other threads read these at any time: they are replaced, not changed.
        self.last_step = step_of(lines[-1]) if lines else 0
        # The newest evaluation may be further back in the file.
        kept = {"eval": self.last["eval"]} if is_same and "eval" in self.last and not any(map(is_resume, lines)) else {}
        self.last = kept | dict(chain.from_iterable(record.items() for record in counted))
        self.work = [sum(column) for column in zip(*alike, strict=True)]
        self.pace_s = None
        if timed and timed[0]["step"] < timed[-1]["step"]:
            oldest, newest = timed[0], timed[-1]
            self.pace_s = (newest["time"] - oldest["time"]) / (newest["step"] - oldest["step"])

    @property
    def step(self) -> int:
        step: Any = self.lead.get("step")
        return max(self.last_step, int(step)) if is_count(step) else self.last_step

    @property
    def num_workers(self) -> int | None:
        for name in ("shares", "speeds"):
            if isinstance(numbers := self.last.get(name), list):
                return len(numbers)
        return None

    def row(self) -> dict[str, Any]:
        """See docs/watch-api.md."""
        status, state, step = self.status, self.state, self.step
        total = status.total_steps if status else None
        ended = status.ended if status else None
        is_live = state == "live"
        left_s = self.pace_s * max(total - step, 0) if is_live and self.pace_s is not None and total else None
        names = ("epoch", "loss", "lr", "samples_per_s", "tokens_per_s")
        numbers = {name: number_or_none(self.last.get(name)) for name in names}
        evaluation = self.last.get("eval")
        return {
            "id": self.id,
            "name": self.name,
            "config_name": self.files.config_name,
            "state": state,
            "reason": status.reason if status else None,
            "started": status.started if status else None,
            "ended": None if is_live else ended or self.changed,
            "changed": self.changed,
            "num_starts": status.num_starts if status else 1,
            "host": status.host if status else None,
            "step": step,
            "total_steps": total,
            "time_s": number_or_none(self.last.get("time")),
            "eta_s": left_s,
            **numbers,
            "num_workers": self.num_workers,
            "evaluation": list(flat_items({"eval": evaluation})) if isinstance(evaluation, dict) else [],
            "metrics_bytes": self.metrics_bytes,
        }

    def contains(self, words: Sequence[str]) -> bool:
        """Whether the name or the configuration contains all words, which are in lower case."""
        config = read_bytes(self.files.config, MAX_CONFIG_BYTES) or b""
        text = f"{self.name}\n{config.decode(errors='replace')}".lower()
        return all(word in text for word in words)


def chosen_lines(tail: bytes, *, is_cut: bool) -> list[bytes]:
    """The newest lines, one further back, and the last with an evaluation; all if the run was resumed meanwhile.

    is_cut: the first line is incomplete.
    """
    begin, end = tail.find(b"\n") + 1 if is_cut else 0, tail.rfind(b"\n")
    if RESUMED_FROM.encode() in tail:
        return tail[begin : max(end, begin)].split(b"\n")
    start = end
    for _ in range(NEWEST_LINES):
        start = max(tail.rfind(b"\n", begin, start), begin)
    older = [tail[begin : tail.find(b"\n", begin)]] if start > begin else []
    if (place := tail.rfind(b'"eval"', begin, start)) > 0:
        older.append(tail[tail.rfind(b"\n", 0, place) + 1 : tail.find(b"\n", place)])
    return [*older, *tail[start : max(end, start)].strip(b"\n").split(b"\n")]


class Runs:
    """The runs in a folder, or chosen ones. Thread-safe."""

    def __init__(self, folder: Path, chosen: Sequence[Path] | None = None) -> None:
        self.folder = folder
        self._chosen = chosen
        if twice := [name for name, count in Counter(path.name for path in chosen or ()).items() if count > 1]:
            raise CommandError(f"two of the runs are named {twice[0]}: rename a folder, or give only one of them", 2)
        self._known: dict[str, RunEntry] = {}  # by id
        self._lock = Lock()
        self._due = 0.0

    def all(self) -> list[RunEntry]:
        """The newest first."""
        with self._lock:
            if monotonic() >= self._due:
                began = monotonic()
                self._scan()
                took_s = monotonic() - began
                self._due = began + max(SCAN_INTERVAL_S, SCAN_INTERVAL_RATIO * took_s)
            return sorted(self._known.values(), key=lambda run: (-_started(run), run.name))

    def find(self, run_id: str) -> RunEntry | None:
        """With what is in its files now."""
        if run_id not in self._known:
            self.all()
        with self._lock:
            # A run that began after the last scan is known by its name.
            is_name = self._chosen is None and _SAFE_ID.fullmatch(run_id)
            run = self._known.get(run_id) or (RunEntry(self.folder / run_id) if is_name else None)
            if run is None or not run.refresh():
                self._known.pop(run_id, None)
                return None
            return self._known.setdefault(run_id, run)

    def _scan(self) -> None:
        paths = self._chosen
        if paths is None:
            try:
                with os.scandir(self.folder) as entries:
                    names = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            except OSError:
                names = []
            paths = [self.folder / name for name in names]
        known, self._known = self._known, {}
        for path in paths:
            run = known.get(id_of(path.name)) or RunEntry(path)
            if run.refresh():
                self._known[run.id] = run


def _started(run: RunEntry) -> float:
    return run.status.started if run.status else run.changed
