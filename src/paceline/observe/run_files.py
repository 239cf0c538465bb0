"""A run's folder: the paths of its files, and the state of the run.

    runs/tiny_2026-11-15_14-30-00/
        config.yaml        the resolved settings
        environment.json   versions, host, devices, commit, command line
        status.json        running (with the process), finished, stopped or failed
        metrics.jsonl      see paceline.observe.metrics
        events.jsonl       see paceline.observe.events
        report.json        the workers' times
        plan.json          the prediction of `paceline plan --run`
        checkpoints/  plots/  ranks/ (the workers' output and status)  timeline/ (the workers' activities)

Rank 0 writes them, and each worker its status (see paceline.observe.worker_status). Any process may read them, also
during the run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from functools import cached_property, lru_cache
from itertools import count, islice
from pathlib import Path
from time import time
from typing import Any, Literal, get_type_hints

from paceline.observe.best_effort import attempt, describe
from paceline.observe.json_lines import replace_file, to_json

RUNS_FOLDER = "runs"
MAX_CONFIG_BYTES = 256 << 10
# YAML's aliases can make a few bytes as large as memory: further settings are left out.
MAX_SETTINGS = 5000
MAX_DEPTH = 64
# A run on another host counts as live while its files are younger than this.
SILENT_S = 600.0

_NAME = re.compile(r"(?P<config>.+)_(?P<date>\d{4}-\d\d-\d\d)_(?P<time>\d\d-\d\d-\d\d(?:-\d+)?)")

State = Literal["live", "finished", "stopped", "failed", "crashed", "unknown"]


def _path(name: str) -> cached_property[Path]:
    """Computed on demand: a list of a thousand runs needs few of the paths."""
    return cached_property(lambda files: files.root / name)


@dataclass
class RunFiles:
    """The paths in a run's folder."""

    root: Path

    config = _path("config.yaml")
    environment = _path("environment.json")
    status = _path("status.json")
    metrics = _path("metrics.jsonl")
    events = _path("events.jsonl")
    report = _path("report.json")
    plan = _path("plan.json")
    checkpoints = _path("checkpoints")
    plots = _path("plots")
    ranks = _path("ranks")
    timeline = _path("timeline")

    def worker(self, rank: int) -> Path:
        """A worker's own status; see paceline.observe.worker_status."""
        return self.ranks / f"rank-{rank}.json"

    @property
    def is_run(self) -> bool:
        """Whether a run wrote its status or metrics here. False for a folder that may not be read."""
        return _is_file(self.status) or _is_file(self.metrics)

    @property
    def config_name(self) -> str:
        """The folder's name without the time, or the whole name of a folder that the user named."""
        match = _NAME.fullmatch(self.root.name)
        return match["config"] if match else self.root.name

    @property
    def time_of_day(self) -> str:
        """When the run started, from the folder's name: "14:30:00"; empty for a folder that the user named."""
        match = _NAME.fullmatch(self.root.name)
        return match["time"].replace("-", ":", 2) if match else ""


@dataclass(frozen=True)
class Status:
    """The state of a run as it recorded it. Times are Unix times; `started` is the first of `num_starts` starts.

    state: "running", "finished", "stopped" or "failed". process_started: the kernel's start time of the process, which
    distinguishes it from a later process with the same pid.
    """

    state: str
    pid: int
    process_started: int | None
    host: str
    started: float | int
    num_starts: int = 1
    total_steps: int | None = None
    ended: float | int | None = None
    reason: str | None = None


_STATUS_TYPES = get_type_hints(Status)


def create_run_folder(parent: Path, config_name: str, now: datetime | None = None) -> RunFiles:
    """Create `parent/<config_name>_<time>`, with `-2` and so on appended if it exists."""
    name = re.sub(r"[^\w.+=-]+", "_", config_name).strip("_.") or "run"
    name = f"{name}_{now or datetime.now():%Y-%m-%d_%H-%M-%S}"
    root = parent / name
    for number in count(2):
        try:
            root.mkdir(parents=True)
            break
        except FileExistsError:
            root = parent / f"{name}-{number}"
    return prepare_run_folder(root)


def prepare_run_folder(root: Path) -> RunFiles:
    """Create the folders of a run at `root`, which may exist."""
    files = RunFiles(root)
    for folder in (files.checkpoints, files.plots, files.ranks):
        folder.mkdir(parents=True, exist_ok=True)
    return files


@contextmanager
def running(files: RunFiles, total_steps: int | None = None) -> Iterator[None]:
    """Wraps a run in its leading process: status.json has the state "running", and afterwards how the run ended.

    An exception means "failed", with its text as the reason. Ctrl-C, the exit code of a requested stop (75) and a
    termination signal mean "stopped". A killed process writes nothing, which `state_of` detects. Failure to write the
    status is a warning.
    """
    before = read_status(files)
    status = Status(
        state="running",
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        host=socket.gethostname(),
        started=round(time(), 3) if before is None else before.started,
        num_starts=1 if before is None else before.num_starts + 1,
        total_steps=total_steps,
    )
    _write_status(files, status)
    state, reason = "finished", None
    try:
        yield
    except BaseException as error:
        state, reason = _end_of(error)
        raise
    finally:
        found = read_status(files) or status  # has the total by now
        if (found.pid, found.host) == (status.pid, status.host):  # else another worker leads the run since
            _write_status(files, replace(found, state=state, ended=round(time(), 3), reason=reason))


def note_total_steps(files: RunFiles, total_steps: int | None) -> None:
    """Record the number of steps, which is known only after the run's parts are built."""
    status = read_status(files)
    if status is not None:
        _write_status(files, replace(status, total_steps=total_steps))


def read_status(files: RunFiles) -> Status | None:
    """The status that the run recorded; None if it is missing or malformed."""
    found = read_mapping(files.status)
    known: dict[str, Any] = {name: found.get(name) for name in _STATUS_TYPES}
    is_well_formed = all(isinstance(value, _STATUS_TYPES[name]) for name, value in known.items())
    return Status(**known) if is_well_formed else None


def state_of(files: RunFiles, status: Status | None) -> State:
    """The state of the run now. "crashed": its process died without a report; "unknown": cannot be determined."""
    if status is None:
        return "unknown"
    if status.state != "running":
        return status.state if status.state in ("finished", "stopped", "failed") else "unknown"  # type: ignore[return-value]
    if status.host == socket.gethostname():
        return "live" if process_started(status.pid) == status.process_started else "crashed"
    return "live" if time() - last_sign(files) < SILENT_S else "unknown"


def last_sign(files: RunFiles) -> float:
    """When the run last wrote its metrics or status, as Unix time; 0 if never."""
    return max((path.stat().st_mtime for path in (files.metrics, files.status) if _is_file(path)), default=0.0)


def _is_file(path: Path) -> bool:
    """False, not an error, in a folder that may not be read."""
    with suppress(OSError):
        return path.is_file()
    return False


def read_json(path: Path) -> Any:
    """The content of a file; None if it is missing or is not JSON."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None  # reading a pipe would block
    except (OSError, ValueError, RecursionError):
        return None


def read_mapping(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def unchanged(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """What `read` found in this file, read again only if it has changed. Must not be changed."""
    try:
        found = path.stat()
    except OSError:
        return {}
    return _read_once(read, path, (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=512)
def _read_once(read: Callable[[Path], dict[str, Any]], path: Path, stamp: object) -> dict[str, Any]:  # noqa: ARG001
    """stamp: another one means another content."""
    return read(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, f"{to_json(value, indent=2)}\n".encode())


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a config.yaml by flat name, such as "trainer.readers"; empty if it cannot be read."""
    try:
        return parse_settings(path.read_bytes() if path.is_file() else b"")
    except OSError:
        return {}


def parse_settings(content: bytes) -> dict[str, Any]:
    """The settings in the text of a config.yaml, as scalars and lists of scalars; empty if it is not one."""
    import yaml  # type: ignore[import-untyped]

    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    if len(content) > MAX_CONFIG_BYTES:
        return {}
    try:
        for event in yaml.parse(content, loader):  # loading recurses: many brackets would exhaust the stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                return {}
        tree = yaml.load(content, loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {key: _plain(value) for key, value in flat_settings(tree).items()} if isinstance(tree, dict) else {}


def flat_settings(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested settings by dotted key."""
    return dict(islice(_flat(settings, "", 0), MAX_SETTINGS))


def _flat(settings: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:  # an alias may refer to what contains it
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """A value of YAML as JSON has it; nested lists as text, if they are short."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list) and all(each is None or isinstance(each, str | int | float) for each in value):
        return value[:MAX_SETTINGS]
    if not isinstance(value, list | dict | set | tuple | bytes):
        return value
    is_short = len(value) < 100 and not any(isinstance(each, list | dict | set | tuple) for each in value)
    return repr(value) if is_short else "..."


def _write_status(files: RunFiles, status: Status) -> None:
    with attempt(files.status):
        write_json(files.status, asdict(status))


def _end_of(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "finished", None
        if error.code == os.EX_TEMPFAIL:
            return "stopped", "asked to stop"
        number = error.code - 128 if isinstance(error.code, int) else 0
        is_signal = number in (signal.SIGTERM, signal.SIGHUP)
        return ("stopped", signal.Signals(number).name) if is_signal else ("failed", f"exit code {error.code}")
    return "failed", describe(error).split("\n", 1)[0]


def process_started(pid: int) -> int:
    """The start time of a process, in the kernel's ticks since boot; -1 for a dead process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return -1
    state, *fields = text.rpartition(")")[2].split()
    return -1 if state in ("Z", "X") else int(fields[18])
