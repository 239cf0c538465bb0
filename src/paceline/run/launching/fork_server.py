"""The process that a node's workers are forked from: `python fork_server.py START CHANNEL MODULE...`.

It imports the modules, once for all workers and while the launcher gets ready: torch alone takes longer than everything
else in a launch, and workers that are started again find it there. Forking it is safe because it only imports: it has
no thread of its own, touches no accelerator and runs nothing of the user's.

START is the launcher's file, see `worker.py`. On the socket CHANNEL come and go lines of JSON:

    {"environments": [{"RANK": "0", ...}, ...]}       from the launcher: start a worker for each
    {"started": [PID, ...]}
    {"ended": PID, "exit_code": CODE}                 negative for a signal

Workers whose environment names no MASTER_ADDR get a port that is free, for process groups of the user's own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_LOOPBACK = "127.0.0.1"


def main(start_file: Path, channel: int, modules: Sequence[str]) -> NoReturn:
    start = json.loads(start_file.read_text())
    die_with(start["launcher_pid"])
    os.environ.update(start["environment"])  # OpenMP reads its part of it once, when torch is imported
    sys.path[:] = start["path"]
    _import(modules)
    _serve(start_file.parent, start, channel)
    os._exit(0)


def die_with(parent_pid: int) -> None:
    """Have this process killed by the kernel when its parent is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # one collection at the end instead of hundreds on the way, which take a sixth of the time
    try:
        for name in modules:
            import_module(name)
    except Exception:
        # The user's code is to meet the error, in a process that has not half imported torch: this one, begun anew.
        os.execv(sys.executable, sys.orig_argv[: -len(modules)])
    gc.collect()
    gc.enable()


def _serve(shared: Path, start: dict[str, Any], channel: int) -> None:
    """Start workers whenever the launcher asks for them, until it closes the channel."""

    def be_worker(environment: dict[str, str]) -> None:
        from paceline.run.launching import worker

        os.close(channel)
        os.setsid()  # so that all it starts can be ended with it, and the terminal's Ctrl-C is the launcher's alone
        os.environ.update(environment)
        _draw_own_numbers()
        worker.main(shared, start)

    def say(**news: Any) -> None:
        os.write(channel, json.dumps(news).encode() + b"\n")

    with open(channel, "rb", closefd=False) as requests:
        for request in requests:
            with _with_port(json.loads(request)["environments"]) as environments:
                running = [_fork(partial(be_worker, own)) for own in environments]
                say(started=running)
                while running:
                    pid, status = os.wait()
                    running.remove(pid)
                    say(ended=pid, exit_code=os.waitstatus_to_exitcode(status))


@contextmanager
def _with_port(environments: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """The environments with a port for process groups of the user's own, where several nodes have none in common.

    It is only reserved: if the user calls init_process_group(), torch opens it on rank 0. Paceline itself does not.
    """
    if "MASTER_ADDR" in environments[0]:
        yield environments
        return
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch sets it too: then both may bind it
        reserved.bind((_LOOPBACK, 0))
        port = str(reserved.getsockname()[1])
        yield [own | {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port} for own in environments]


def _fork(role: Callable[[], object]) -> int:
    """The process id of a child that has this role, and ends with it or with this process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    own_pid = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. Those here are of numpy's BLAS, which ends them before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            die_with(own_pid)
            role()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _draw_own_numbers() -> None:
    """Let unseeded random numbers differ between workers, as in processes that have nothing in common.

    Python's generator sees to that itself, and torch's begins with the same seed in every process.
    """
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
