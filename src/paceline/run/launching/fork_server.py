"""The process that a node's workers are forked from: `python fork_server.py START CHANNEL MODULE...`.

The server imports the modules once for all workers, while the launcher gets ready: importing torch takes longer than
the rest of a launch, and restarted workers find it imported. Forking is safe because the server only imports: it has no
threads, touches no accelerator and runs no user code.

START is the launcher's file, see `worker.py`. CHANNEL is a connection with these messages:

    {rank: environment, ...}    from the launcher: start these workers
    {rank: process id, ...}     from the server: they have been started
    (rank, exit code)           a worker has ended; the code is negative for a signal

`ForkServer` is the launcher's end. The lower half of the file runs in the server.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

# What workers import before their first step. Every optimizer of torch imports torch._dynamo, which takes as long as
# torch itself.
PRELOADED_MODULES = ("torch", "torch._dynamo", "paceline.api.trainer", "paceline.comm.shared_memory.communicator")
KILL_WAIT_S = 5.0  # for killed processes to disappear
# A stopped server (SIGSTOP) would never report an exit: kill it after this many consecutive polls in which it is
# stopped. Polls, not seconds: suspending and resuming launcher and server together must not count.
MAX_STOPPED_POLLS = 50
# `systemctl stop` and some batch systems send these to all processes of a job. Launcher and workers act on them.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ForkServer:
    """The worker processes of one launch on this node. After the `with` block they and their children are gone.

    The constructor starts the server with `environment`, and does not wait for it. For the current start: `pids` by
    rank, empty until the workers run, and `exit_codes` by rank, in the order of the exits, negative for a signal.
    """

    def __init__(self, start_file: Path, environment: Mapping[str, str]) -> None:
        self._start_file = start_file
        self._environment = environment
        self._ranks: list[int] = []
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self._start_server()

    def _start_server(self) -> None:
        self._channel, server_end = Pipe()
        self._num_stopped_polls = 0
        with server_end:
            self._server = subprocess.Popen(
                [sys.executable, "-P", __file__, self._start_file, str(server_end.fileno()), *PRELOADED_MODULES],
                env=self._environment,
                pass_fds=[server_end.fileno()],
                process_group=0,  # a Ctrl-C in the terminal goes to the launcher alone
            )

    def start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """Start one worker per rank, with these variables added to its environment. No worker may be running."""
        self._ranks, self.pids, self.exit_codes = list(environments), {}, {}
        if self._server.poll() is not None:  # killed, and its workers with it
            self._channel.close()
            self._start_server()
        with suppress(OSError):  # just killed: `poll` notices
            self._channel.send(environments)

    def replace(self, rank: int, environment: dict[str, str]) -> None:
        """Start a replacement of a worker that has ended, while others run."""
        del self.exit_codes[rank]
        self.pids.pop(rank, None)
        with suppress(OSError):  # just killed: `poll` notices
            self._channel.send({rank: environment})

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended, including those that have not started yet."""
        return [rank for rank in self._ranks if rank not in self.exit_codes]

    def poll(self, timeout_s: float) -> None:
        """Process what the server has reported; wait at most `timeout_s` for a report."""
        self._kill_stopped_server()
        try:
            match self._channel.recv() if self._channel.poll(timeout_s) else None:
                case dict(pids):
                    self.pids |= pids
                case rank, exit_code:
                    self.exit_codes[rank] = exit_code
        except (EOFError, OSError):  # the server is gone, and the kernel has killed its workers
            self.kill()
            self.exit_codes |= dict.fromkeys(self.running, self._server.wait())

    def terminate(self, exclude: Collection[int] = ()) -> None:
        """Send SIGTERM to the running workers, except `exclude`; not to their children, which they may still need."""
        for rank in set(self.running).difference(exclude):
            with suppress(OSError, KeyError):  # gone, or not started yet
                os.kill(self.pids[rank], signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process groups of all workers, including the children of workers that have ended."""
        for rank in [*self.pids]:
            self.kill_group(rank)

    def kill_group(self, rank: int) -> None:
        """Kill one worker and its children."""
        with suppress(OSError, KeyError):  # gone, or not started yet
            os.killpg(self.pids[rank], signal.SIGKILL)
        if rank in self.exit_codes:  # from now on its process id may be another program's
            self.pids.pop(rank, None)

    def _kill_stopped_server(self) -> None:
        with suppress(ChildProcessError):  # it has ended
            is_stopped = os.waitid(os.P_PID, self._server.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
            self._num_stopped_polls = self._num_stopped_polls + 1 if is_stopped else 0
        if self._num_stopped_polls > MAX_STOPPED_POLLS:
            from paceline.core.notice import notice

            notice(f"the fork server (pid {self._server.pid}) was stopped: killing it")
            self._server.kill()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        deadline_s = time.monotonic() + KILL_WAIT_S
        try:
            self.kill()
            while self.pids and self.running and time.monotonic() < deadline_s:
                self.poll(deadline_s - time.monotonic())
                self.kill()  # a replacement may have been started meanwhile
        finally:
            self._server.kill()  # also ends a worker that is being forked
            self._server.wait()
            self._channel.close()


# In the server


def main(start_file: Path, channel: Connection, modules: Sequence[str]) -> NoReturn:
    start = json.loads(start_file.read_text())
    sys.path[:] = start["path"]
    from paceline.core.processes import die_with_parent

    die_with_parent(start["launcher_pid"])
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    _import(modules)
    running: dict[int, int] = {}  # ranks, by process id
    wake_up = _wake_on_child_exit()
    with suppress(EOFError):  # the launcher has closed the channel
        while True:
            ready = wait([channel, wake_up])
            if wake_up in ready:
                os.read(wake_up, 4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                channel.send((running.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])))
            if channel in ready:
                _start_workers(channel.recv(), start_file.parent, start, channel, running)
    os._exit(0)


def _start_workers(
    environments: Mapping[int, dict[str, str]],
    folder: Path,
    start: dict[str, Any],
    channel: Connection,
    running: dict[int, int],
) -> None:
    started: dict[int, int] = {}
    failed: list[int] = []
    for rank, environment in environments.items():
        try:
            started[rank] = _fork_worker(environment, folder, start, channel)
        except OSError as error:
            failed.append(rank)
            _report_failed_start(rank, error, folder, environment)
    running |= {pid: rank for rank, pid in started.items()}
    channel.send(started)
    for rank in failed:
        channel.send((rank, 1))


def _report_failed_start(rank: int, error: OSError, folder: Path, environment: Mapping[str, str]) -> None:
    from paceline.run.launching.worker import start_folder
    from paceline.run.launching.worker_exit import ExitKind, WorkerExit

    reports = start_folder(folder, int(environment["TORCHELASTIC_RESTART_COUNT"]))
    with suppress(OSError):
        reports.mkdir(exist_ok=True)
        text = f"rank {rank} cannot be started: {error.strerror}; check the memory and `ulimit -u`"
        WorkerExit(ExitKind.DIED, rank, text).write(reports)


def _wake_on_child_exit() -> int:
    """The reading end of a pipe that becomes readable when a child process ends."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # one collection at the end instead of hundreds in between, which take a sixth of the time
    try:
        for name in modules:
            import_module(name)
    except Exception:
        # The error must come from the user's import. Start over without the modules, which may be partly imported.
        os.execv(sys.executable, sys.orig_argv[: -len(modules)])
    gc.collect()
    gc.enable()


def _fork_worker(environment: dict[str, str], folder: Path, start: dict[str, Any], channel: Connection) -> int:
    """The process id of a new worker, which ends with this process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent_pid = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns about threads. The only ones here belong to numpy's BLAS, which ends them before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        if pid := os.fork():
            return pid
    try:
        from paceline.core.processes import die_with_parent

        die_with_parent(parent_pid)
        channel.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        os.setsid()  # its own process group, so that its children can be killed with it
        os.environ.update(environment)
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # unseeded numbers differ between workers; Python and torch take care of theirs
        from paceline.run.launching import worker

        worker.main(folder, start)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])), sys.argv[3:])
