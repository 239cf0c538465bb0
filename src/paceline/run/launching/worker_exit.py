"""How workers end, and which exit among several is the cause of the others."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.observe.json_lines import replace_file

_HINTS = {
    signal.SIGKILL: "out of memory? `dmesg` shows what the kernel killed",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code aborted; its message is on stderr",
    signal.SIGBUS: "out of shared memory? check `df /dev/shm`",
}
_RESERVED_FILE, _RESERVED_BYTES = "reserved", 256 << 10
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class ExitKind(StrEnum):
    """How a worker ended. In order of priority: the first kind among several exits is the cause of the others."""

    FAILED = "failed"
    DIED = "died"  # without a report: killed, crashed, or by os._exit
    ABORTED = "aborted"  # by `paceline runs abort`; not restarted
    NO_PROGRESS = "no progress"  # since the last restart; not restarted
    CANCELLED = "cancelled"  # its launcher received a signal
    COMMUNICATION = "communication"  # an exchange failed, usually because of another worker's exit
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"  # on request, after saving
    TERMINATED = "terminated"  # by a SIGTERM from elsewhere
    LEFT = "left"  # it died or left, and the others continue
    ENDED = "ended"  # by its agent, because of another worker's failure
    DONE = "done"


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended, or all workers of a node. Workers report it to their agent, and agents to other nodes."""

    kind: ExitKind
    rank: int
    message: str = ""
    traceback_text: str = ""
    step: int = 0  # the last step of a worker that was stopped
    time_s: float = field(default_factory=time.time)
    is_final: bool = False  # the workers cannot be restarted

    @property
    def is_failure(self) -> bool:
        return self.kind not in (ExitKind.LEFT, ExitKind.ENDED, ExitKind.DONE)

    def with_notes(self, *notes: str) -> WorkerExit:
        return replace(self, message="\n\n".join(filter(None, [self.message, *notes])))

    def write(self, folder: Path) -> None:
        write_in_start(worker_file(folder, "report", self.rank), json.dumps(asdict(self)).encode())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WorkerExit:
        return cls(**values | {"kind": ExitKind(values["kind"])})

    @classmethod
    def read(cls, folder: Path, rank: int, exit_code: int) -> WorkerExit:
        """From the worker's report, or from its exit code (negative for a signal) if it left none."""
        path = worker_file(folder, "report", rank)
        if path.exists():
            return cls.from_dict(json.loads(path.read_text()))
        if exit_code >= 0:
            return cls(ExitKind.DIED, rank, f"rank {rank} exited with code {exit_code} before its work was done")
        number = -exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = f" ({_HINTS[signal.Signals(number)]})" if number in _HINTS else ""
        stack = read_stack(folder, rank)
        kind = ExitKind.TERMINATED if number == signal.SIGTERM else ExitKind.DIED
        death = cls(kind, rank, f"rank {rank} was killed by {name}{hint}", stack)
        return death.with_notes(f"its last Python stack:\n{stack}") if stack else death


def first_failure(exits: Iterable[WorkerExit]) -> WorkerExit | None:
    """The cause among several exits; of several of a kind the earliest. None without a failure."""
    exits = list(exits)
    failures = [each for each in exits if each.is_failure]
    failure = min(failures, key=lambda each: (list(ExitKind).index(each.kind), each.time_s), default=None)
    if failure is None:
        return None
    if failure.kind == ExitKind.FAILED:
        return failure.with_notes(*(each.message for each in failures if each.kind == ExitKind.DIED))
    if failure.kind == ExitKind.COMMUNICATION:
        finished = sorted(each.rank for each in exits if each.kind == ExitKind.DONE and each.time_s < failure.time_s)
        early = "had ended before, without an error: no worker may return or call sys.exit(0) earlier than the others"
        return failure.with_notes(*(f"rank {rank} {early}" for rank in finished))
    return failure


# Files in the folder of a start


def worker_file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank}"


def reserve_space(folder: Path) -> None:
    """Called before the workers start, so that a disk that is full later does not hide how they ended.

    Called again after changes of the workers, in case that the space was used and the disk has recovered.
    """
    path = folder / _RESERVED_FILE
    if path.exists():
        return
    try:
        folder.mkdir(exist_ok=True)
        path.write_bytes(bytes(_RESERVED_BYTES))
    except OSError:
        path.unlink(missing_ok=True)


def write_in_start(path: Path, content: bytes) -> None:
    """Replace a file in the folder of a start, in the reserved space if the disk is full."""
    try:
        replace_file(path, content)
    except OSError:
        path.with_name(_RESERVED_FILE).unlink(missing_ok=True)
        replace_file(path, content)


def read_stack(folder: Path, rank: int) -> str:
    """The user's frames of the worker's last faulthandler dump, as in a traceback; empty if there is none."""
    path = worker_file(folder, "stack", rank)
    dump = path.read_text(errors="replace") if path.exists() else ""
    frames = _FRAME.findall(dump.rpartition("(most recent call first)")[2])
    return "".join(
        traceback.format_list([(file, int(line), name, None) for file, line, name in frames if not is_own(file)][::-1])
    ).rstrip()


def is_own(file: str) -> bool:
    """Whether a stack frame belongs to the code that starts workers, and not to the user."""
    return file == "<frozen runpy>" or Path(file).parent == Path(__file__).parent
