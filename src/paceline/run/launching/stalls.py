"""Ends stalled workers, so that the others can continue without them."""

from __future__ import annotations

import os
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.run.launching import worker
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, read_stack
from paceline.run.membership.board import Activity, Board

# A micro-batch may take this many times the longest one so far, and never less than MIN_STALL_S: compiling takes long.
STALL_FACTOR = 20.0
MIN_STALL_S = 120.0
# A process that was stopped (SIGSTOP) does not compile.
STOPPED_S = 10.0
STACK_WAIT_S = 0.5


@dataclass
class _Watched:
    """The state of a worker at the last check."""

    num_ticks: int = 0
    was_computing: bool = False
    idle_s: float = 0.0  # since it last began something
    stopped_s: float = 0.0  # since its process was stopped
    ending_since_s: float | None = None  # it has stalled: its stack was requested


@dataclass
class StallDetector:
    """Checks the progress that this node's workers write to their board. stall_s: how long a micro-batch may take."""

    board: Board
    server: ForkServer
    folder: Path
    first_rank: int
    stall_s: float | None = None
    _longest_s: float = 0.0  # the longest that any worker has computed between two exchanges
    _watched: dict[int, _Watched] = field(default_factory=dict)  # by slot

    def forget(self, slot: int) -> None:
        """Before a replacement is started."""
        self._watched.pop(slot, None)

    def check(self, slot: int, elapsed_s: float) -> None:
        """Called for a running worker. elapsed_s: since the last check."""
        seen, pid = self._watched.setdefault(slot, _Watched()), self.server.pids[self.first_rank + slot]
        row = self.board.row(slot)
        activity, num_ticks = row.activity, row.num_ticks
        is_idle = num_ticks == seen.num_ticks
        if is_idle:
            seen.idle_s += elapsed_s
        else:
            if seen.was_computing:  # and has completed it
                self._longest_s = max(self._longest_s, seen.idle_s)
            seen.num_ticks, seen.idle_s = num_ticks, 0.0
        seen.was_computing = activity is Activity.COMPUTING
        # Asking the kernel takes longer than the rest, so only about idle workers.
        seen.stopped_s = seen.stopped_s + elapsed_s if is_idle and _is_stopped(pid) else 0.0
        limit_s = self.stall_s or max(STALL_FACTOR * self._longest_s, MIN_STALL_S)
        stopped_limit_s = min(self.stall_s or STOPPED_S, STOPPED_S)
        if not ((seen.was_computing and seen.idle_s > limit_s) or seen.stopped_s > stopped_limit_s):
            seen.ending_since_s = None  # it may have gone on after its stack was requested
        elif seen.ending_since_s is None:
            seen.ending_since_s = time.monotonic()
            with suppress(OSError):
                os.kill(pid, worker.STACK_SIGNAL)
        elif time.monotonic() - seen.ending_since_s >= STACK_WAIT_S:
            self._end(slot, seen)

    def _end(self, slot: int, seen: _Watched) -> None:
        rank = self.first_rank + slot
        stack = read_stack(self.folder, rank)
        if seen.stopped_s:
            what = f"rank {rank} was stopped for {seen.stopped_s:.1f} s (SIGSTOP)"
        else:
            line = user_line(stack)
            what = f"rank {rank} stalled for {seen.idle_s:.1f} s" + (f", at {line}" if line else "")
        WorkerExit(ExitKind.DIED, rank, f"{what}, and was ended", stack).write(self.folder)
        self.server.kill_group(rank)
        seen.ending_since_s = float("inf")


def user_line(stack: str) -> str:
    """The innermost line of a stack outside of installed libraries, else the innermost line."""
    lines = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    installed = tuple(f'File "{sysconfig.get_path(name)}' for name in ("stdlib", "purelib", "platlib"))
    own = [line for line in lines if not line.startswith(installed)]
    return (own or lines or [""])[-1]


def _is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
