"""The launcher's end of the process that workers are forked from."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from paceline.run.launching import fork_server

# What workers import before their first step, for all of them to share. Every optimizer of torch imports torch._dynamo,
# which takes as long as torch itself.
IMPORTED_AHEAD = ("torch", "torch._dynamo", "paceline.api.trainer", "paceline.comm.shared_memory.communicator")
KILL_WAIT_S = 5.0  # for the kernel to end what was killed
# A process to fork from that stands stopped (SIGSTOP) for so long is given up: it would never report an end. Counted
# while the launcher itself runs, so that suspending all of a job and resuming it is no failure.
STOPPED_S = 5.0
STOPPED_LOOK_S = 0.5


class Processes:
    """The worker processes of one launch on this node: gone after the `with` block, and what they left running too.

    They are forked from a process that the constructor starts, and that gets ready while the caller does other things.
    Of the current start, by rank: `pids`, empty until they run; and `exit_codes` of those that have ended, in that
    order, negative for a signal.
    """

    def __init__(self, start_file: Path) -> None:
        self._start_file = start_file
        self._start_server()
        self._ranks: list[int] = []
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}

    def _start_server(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._unread = b""
        self._next_look_s, self._num_stopped = 0.0, 0
        with theirs:
            arguments = [str(self._start_file), str(theirs.fileno()), *IMPORTED_AHEAD]
            self._server = subprocess.Popen(
                [sys.executable, "-P", fork_server.__file__, *arguments],
                pass_fds=[theirs.fileno()],
                process_group=0,  # the terminal's Ctrl-C is the launcher's alone
            )

    def start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """Start one worker per rank, with what its environment has beyond this process's. None may be running."""
        self._ranks, self.pids, self.exit_codes = list(environments), {}, {}
        if self._server.poll() is not None:  # killed, and its workers with it
            self._channel.close()
            self._start_server()
        request = json.dumps({"environments": list(environments.values())})
        with suppress(OSError):  # it has just been killed: `listen` finds out
            self._channel.sendall(request.encode() + b"\n")

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended, also those that have not begun."""
        return [rank for rank in self._ranks if rank not in self.exit_codes]

    def listen(self, timeout_s: float) -> None:
        """Learn what has happened; wait for something to happen, at most so long."""
        self._look_after_server()
        self._channel.settimeout(max(timeout_s, 0.001))
        try:
            received = self._channel.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:  # it was killed before it read what it was told
            received = b""
        if not received:
            self._lose_server()
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            news = json.loads(line)
            if "started" in news:
                self.pids = dict(zip(self._ranks, news["started"], strict=True))
            else:
                (rank,) = (rank for rank, pid in self.pids.items() if pid == news["ended"])
                self.exit_codes[rank] = news["exit_code"]

    def terminate(self) -> None:
        """Ask the running workers to end; not their children, which they may still need."""
        for rank in self.running:
            if rank in self.pids:
                _signal(self.pids[rank], signal.SIGTERM, os.kill)

    def kill(self) -> None:
        """End all workers, and what they started in their process groups, also where they have ended themselves."""
        for pid in self.pids.values():
            _signal(pid, signal.SIGKILL, os.killpg)

    def _look_after_server(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + STOPPED_LOOK_S
        self._num_stopped = self._num_stopped + 1 if _is_stopped(self._server.pid) else 0
        if self._num_stopped * STOPPED_LOOK_S > STOPPED_S:
            self._num_stopped = 0
            print(
                f"paceline: the process that workers are forked from (pid {self._server.pid}) was stopped and is ended,"
                " with its workers",
                file=sys.stderr,
            )
            self._server.kill()

    def _lose_server(self) -> None:
        """It is gone, and the kernel has killed its workers."""
        self.kill()
        exit_code = self._server.wait()
        self.exit_codes |= dict.fromkeys(self.running, exit_code)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.pids:
                self._end()
        finally:
            self._server.kill()  # and with it what it may just be forking
            self._server.wait()
            self._channel.close()

    def _end(self) -> None:
        deadline_s = time.monotonic() + KILL_WAIT_S
        self.kill()
        while self.running and time.monotonic() < deadline_s:
            self.listen(deadline_s - time.monotonic())
        with suppress(OSError, subprocess.TimeoutExpired):
            self._channel.shutdown(socket.SHUT_WR)
            self._server.wait(max(0.0, deadline_s - time.monotonic()))


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False  # it is gone, or this is not Linux
    return state == b"T"


def _signal(pid: int, number: signal.Signals, send: Callable[[int, int], None]) -> None:
    with suppress(OSError):  # gone, and its group with it
        send(pid, number)
