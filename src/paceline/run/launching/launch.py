"""Run a function or a script on N workers: here, on workers started for it, or in the world this process is in."""

from __future__ import annotations

import fcntl
import json
import linecache
import os
import runpy
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.core.private_folder import new_private_folder
from paceline.core.rank_variables import is_worker
from paceline.core.secret import FILE_VARIABLE
from paceline.run.launching import worker
from paceline.run.launching.agent import Workers
from paceline.run.launching.nodes import ALONE, Nodes
from paceline.run.launching.output import shown
from paceline.run.launching.processes import Processes
from paceline.run.launching.rendezvous import Meeting

FOLDER_PREFIX = "paceline-run-"
LOCK_FILE = "lock"


def launch(
    fn: Callable[..., Any],
    num_workers: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    logs: str | os.PathLike[str] | None = None,
) -> Any:
    """Call `fn(*args, **kwargs)` on `num_workers` workers of this machine and return rank 0's result.

    `num_workers` defaults to the number of accelerators, on a CPU to 1. With one worker, and in a process that
    already is a worker (of torchrun, `paceline run` or `launch`), `fn` is simply called here. Otherwise `fn`, its
    arguments and the result travel by value: lambdas, closures and notebook functions work, and scripts need no
    `if __name__ == "__main__"`.

    The first worker that fails ends all others and is raised here as `WorkerError`, with its rank and traceback.
    When `launch` returns or raises, its workers are gone, and with them what they left running in their process
    groups.

    With `max_restarts` the workers, also a single one, are started again when one fails, as often at most: `fn` begins
    anew, and a trainer in it goes on from its newest checkpoint. Under torchrun its own --max-restarts counts.

    With `logs` the standard output and error of the worker of rank R, also of a single one, are appended to
    `rank-R.out` and `rank-R.err` in that folder, and rank 0's are shown here as well.
    """
    count = workers_to_start(num_workers)
    if _is_done_here(count, max_restarts, logs):
        return fn(*args, **(kwargs or {}))
    from paceline.run.launching.payload import save_call  # cloudpickle: only those who start workers pay for it

    with _run_folder() as folder:
        save_call(folder / worker.CALL_FILE, fn, tuple(args), kwargs or {})
        _run_workers(folder, count, max_restarts, logs)
        return worker.load(folder / worker.RESULT_FILE)


def run_script(
    path: str,
    argv: Sequence[str] = (),
    num_workers: int | None = None,
    max_restarts: int = 0,
    logs: str | os.PathLike[str] | None = None,
    nodes: Nodes = ALONE,
) -> None:
    """Run `python path *argv` on the workers that `launch` would use; same rules, same errors.

    With several `nodes` each of them calls this, and `num_workers` counts its own workers.

    Asked to end, by a signal, it raises `Stopped` if the script's workers saved before they ended.

    This process becomes the script's, also where it only starts the workers: they take over its argv and path.
    """
    count = workers_to_start(num_workers)
    sys.argv[:] = [path, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    if _is_done_here(count, max_restarts, logs, nodes):
        runpy.run_path(path, run_name="__main__")
        return
    with _run_folder() as folder:
        _run_workers(folder, count, max_restarts, logs, nodes, script=path)


def workers_to_start(num_workers: int | None) -> int:
    """How many workers a launch starts; 1 means none: the work is done in this process."""
    if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
        raise ValueError(f"num_workers={num_workers!r}: choose an integer >= 1, or None for all devices")
    if num_workers is not None and not is_worker():
        return num_workers
    from paceline.core.world import World, device_count  # it imports torch, which those above need not wait for

    if not is_worker():
        return device_count()
    size = World.from_environment("cpu").size
    if num_workers not in (None, size):
        raise ValueError(
            f"num_workers={num_workers} in a process that already is a worker of a world of WORLD_SIZE={size}: "
            f"choose num_workers={size}, or leave it out"
        )
    return 1


def check_place(logs: str | os.PathLike[str] | None, nodes: Nodes = ALONE) -> None:
    """Raise `ValueError` if output cannot go to this folder, or workers cannot be started on these nodes from here."""
    if logs is not None and Path(logs).exists() and not Path(logs).is_dir():
        raise ValueError(f"logs={os.fspath(logs)!r} is no folder: choose a folder, or a name for a new one")
    if is_worker() and (logs is not None or nodes.num > 1):
        raise ValueError(
            "logs and nodes are for whoever starts the workers, and this process already is one: leave them out here; "
            "torchrun has --log-dir with --redirects, and --nnodes"
        )


def _is_done_here(count: int, max_restarts: int, logs: str | os.PathLike[str] | None, nodes: Nodes = ALONE) -> bool:
    """Whether this process does the work: it is a worker, or alone and need not outlive its own end."""
    if type(max_restarts) is not int or max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts!r}: choose how often workers are started again, 0 for never")
    check_place(logs, nodes)
    return count == 1 and (is_worker() or (max_restarts == 0 and logs is None and nodes.num == 1))


def _run_workers(
    folder: Path,
    count: int,
    max_restarts: int,
    logs: str | os.PathLike[str] | None,
    nodes: Nodes = ALONE,
    script: str | None = None,
) -> None:
    """Start the workers, wait for all, raise the first failure."""
    output = None if logs is None else Path(logs).absolute()
    terms = {"nodes": nodes.num, "max_restarts": max_restarts}
    environment = _threads(count) | (_own_secret(folder) if nodes.num == 1 else {})
    worker.write_atomically(folder / worker.START_FILE, json.dumps(_start(script, output, environment)))
    with (
        Processes(folder / worker.START_FILE) as processes,  # first: it gets ready while the rest does
        Meeting(nodes, count, folder.name, terms) as meeting,
        nullcontext() if output is None else shown(output, ranks=[0] if meeting.first_rank == 0 else []),
        Workers(folder, processes, meeting, max_restarts, output) as workers,
    ):
        try:
            failure = workers.wait()
        except (KeyboardInterrupt, SystemExit):
            failure = workers.stop()
            if script is None or failure is None:
                raise
    if failure is not None:
        raise failure


def _start(script: str | None, output: Path | None, environment: dict[str, str]) -> dict[str, Any]:
    """What the workers must know to begin."""
    return {
        "launcher_pid": os.getpid(),
        "script": script,
        "logs": None if output is None else str(output),
        "environment": environment,
        "path": [str(entry) for entry in sys.path],
        "argv": sys.argv,
        # Source lines that come from no file (notebook cells), so that tracebacks can show them.
        "sources": {
            name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None
        },
    }


def _own_secret(folder: Path) -> dict[str, str]:
    """The environment with a secret that is made for this run and ends with its folder."""
    path = folder / worker.SECRET_FILE
    with open(path, "x", opener=partial(os.open, mode=0o600)) as file:
        file.write(secrets.token_hex(32))
    return {FILE_VARIABLE: str(path)}


def _threads(count: int) -> dict[str, str]:
    """The environment in which `count` workers divide the cores, so that their threads do not fight."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count))}


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A private folder for one launch. It is gone at the end; after a SIGKILL of this process, at the next launch."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        _remove_if_abandoned(old)
    with _exit_on_termination():
        folder = new_private_folder(FOLDER_PREFIX)
        try:
            unfinished = folder / f"{LOCK_FILE}.new"
            with unfinished.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                unfinished.rename(folder / LOCK_FILE)  # only now may other launches look at it: it is held
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid():
            return
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or just being made or removed


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """SIGTERM and SIGHUP end a process at once; in this block they end it by SystemExit, after the clean-up.

    A handler that the user has set stays, and only the main thread can set any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    unhandled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
