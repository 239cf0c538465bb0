"""A run's folder: where its files lie, and how the run stands.

    runs/tiny_2026-11-15_14-30-00/
        config.yaml        the settings, as resolved
        environment.json   versions, host, devices, commit, command line
        status.json        running (by which process), finished, stopped, failed
        metrics.jsonl      see paceline.observe.metrics
        events.jsonl       see paceline.observe.event_log
        report.json        where the workers' time went
        checkpoints/  plots/  ranks/ (what each worker printed)  timeline/ (what it did when)

Rank 0 writes them, everybody reads them, also while the run goes on.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any, Literal

from paceline.observe.best_effort import attempt
from paceline.observe.json_lines import to_json

RUNS_FOLDER = "runs"
# A run on a host that cannot be asked counts as live while its files are younger than this.
SILENT_S = 600.0

_NAME = re.compile(r"(?P<config>.+)_(?P<date>\d{4}-\d\d-\d\d)_(?P<time>\d\d-\d\d-\d\d(?:-\d+)?)")

Ending = Literal["finished", "stopped", "failed"]
State = Literal["live", "finished", "stopped", "failed", "broken off", "unknown"]


@dataclass(frozen=True)
class RunFiles:
    """The paths in a run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline"

    @property
    def is_run(self) -> bool:
        """Whether a run lives here: it wrote its status or its metrics."""
        return self.status.is_file() or self.metrics.is_file()

    @property
    def config_name(self) -> str:
        """The folder's name without the time; all of it, if it was named otherwise."""
        match = _NAME.fullmatch(self.root.name)
        return match["config"] if match else self.root.name

    @property
    def time_of_day(self) -> str:
        """When it began, from the folder's name, such as "14:30:00"; empty if it was named otherwise."""
        match = _NAME.fullmatch(self.root.name)
        return match["time"].replace("-", ":", 2) if match else ""


@dataclass(frozen=True)
class Status:
    """How a run stands, as it wrote it down itself. Times are Unix times; `started` is the first of `num_starts`.

    `process_started` is the kernel's mark of when the process began, which tells it from a later one with its number.
    """

    state: Literal["running"] | Ending
    pid: int
    process_started: int | None
    host: str
    started: float
    num_starts: int = 1
    total_steps: int | None = None
    ended: float | None = None
    reason: str | None = None


_STATUS_TYPES: dict[str, Any] = {
    "state": str,
    "pid": int,
    "process_started": int | None,
    "host": str,
    "started": int | float,
    "num_starts": int,
    "total_steps": int | None,
    "ended": int | float | None,
    "reason": str | None,
}


def create_run_folder(parent: Path, config_name: str, now: datetime | None = None) -> RunFiles:
    """Make a new folder `parent/<config_name>_<time>`, with `-2` and so on where that is taken. For one process."""
    name = re.sub(r"[^\w.+=-]+", "_", config_name).strip("_.") or "run"
    name = f"{name}_{now or datetime.now():%Y-%m-%d_%H-%M-%S}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        root = parent / (name if number == 1 else f"{name}-{number}")
        try:
            root.mkdir()
        except FileExistsError:
            number += 1
        else:
            return prepare_run_folder(root)


def prepare_run_folder(root: Path) -> RunFiles:
    """A run's folder at a place of the user's choice, new or one to go on in."""
    files = RunFiles(root)
    for folder in (files.checkpoints, files.plots, files.ranks):
        folder.mkdir(parents=True, exist_ok=True)
    return files


@contextmanager
def running(files: RunFiles, total_steps: int | None = None) -> Iterator[None]:
    """Around a run, in the process that leads it: its status says "running", and afterwards how it ended.

    An exception is a failure, with its text as the reason; Ctrl-C and the exit code of a run that was asked to stop
    (75) are "stopped". A process that is killed writes nothing, which `state_of` finds out. A status that cannot be
    written is a warning.
    """
    status = _begun(files, total_steps)
    _write_status(files, status)
    try:
        yield
    except BaseException as error:
        state, reason = _ending_of(error)
        _end(files, status, state, reason)
        raise
    _end(files, status, "finished", None)


def note_total_steps(files: RunFiles, total_steps: int | None) -> None:
    """How many steps the run has: known only when its parts are built, after it was begun."""
    status = read_status(files)
    if status is not None:
        _write_status(files, replace(status, total_steps=total_steps))


def mark_ended(files: RunFiles, state: Ending, reason: str | None = None) -> None:
    """For who outlives the run's process, such as its launcher: how it ended, unless it said so itself."""
    status = read_status(files)
    if status is not None and status.state == "running":
        _end(files, status, state, reason)


def read_status(files: RunFiles) -> Status | None:
    """The run's own word on how it stands; None if there is none that can be read."""
    if not files.status.is_file():  # a pipe, say, would be waited for
        return None
    try:
        found = json.loads(files.status.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    known: dict[str, Any] = {name: found.get(name) for name in _STATUS_TYPES}
    is_well_formed = all(isinstance(value, _STATUS_TYPES[name]) for name, value in known.items())
    return Status(**known) if is_well_formed else None


def state_of(files: RunFiles, status: Status | None) -> State:
    """How the run stands now. "broken off": its process is gone and left no word; "unknown": nobody can tell."""
    if status is None:
        return "unknown"
    if status.state != "running":
        return status.state if status.state in ("finished", "stopped", "failed") else "unknown"
    if status.host == socket.gethostname():
        return "live" if _is_alive(status) else "broken off"
    return "live" if time() - last_sign(files) < SILENT_S else "unknown"


def last_sign(files: RunFiles) -> float:
    """When the run last wrote its metrics or status, as Unix time; 0 if it never did."""
    return max((path.stat().st_mtime for path in (files.metrics, files.status) if path.is_file()), default=0.0)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The whole file or, for who reads meanwhile and after a crash, what was there before."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(f"{to_json(value, indent=2)}\n", encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _begun(files: RunFiles, total_steps: int | None) -> Status:
    before = read_status(files)
    return Status(
        state="running",
        pid=os.getpid(),
        process_started=_process_started(os.getpid()),
        host=socket.gethostname(),
        started=round(time(), 3) if before is None else before.started,
        num_starts=1 if before is None else before.num_starts + 1,
        total_steps=total_steps,
    )


def _end(files: RunFiles, status: Status, state: Ending, reason: str | None) -> None:
    status = read_status(files) or status  # which knows the total by now
    _write_status(files, replace(status, state=state, ended=round(time(), 3), reason=reason))


def _write_status(files: RunFiles, status: Status) -> None:
    with attempt(files.status):
        write_json(files.status, asdict(status))


def _ending_of(error: BaseException) -> tuple[Ending, str | None]:
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "finished", None
        if error.code == os.EX_TEMPFAIL:
            return "stopped", "asked to stop"
        return "failed", f"exit code {error.code}"
    text = str(error).strip().split("\n", 1)[0]
    return "failed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_alive(status: Status) -> bool:
    if status.process_started is not None:
        return _process_started(status.pid) == status.process_started
    try:
        os.kill(status.pid, 0)
    except (OSError, OverflowError, TypeError):
        return False
    return True


def _process_started(pid: int) -> int | None:
    """In the kernel's ticks since boot; None for a process that is gone, or where the kernel does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])
