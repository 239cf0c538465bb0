"""Runs a function or a script on N workers: in this process, on workers started for it, or in an existing world."""

from __future__ import annotations

import fcntl
import json
import linecache
import os
import runpy
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.core.errors import WorkerError
from paceline.core.notice import notice
from paceline.core.processes import LAUNCHED_VARIABLE, MEMBERSHIP_VARIABLE, is_worker
from paceline.core.secret import FILE_VARIABLE
from paceline.core.usable_devices import LEFT_OUT_VARIABLE, try_gpus
from paceline.run.launching import worker
from paceline.run.launching.agent import Agent
from paceline.run.launching.allocator import allocator_environment
from paceline.run.launching.elastic_nodes import ElasticNodes
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.nodes import SINGLE_NODE, NodeRendezvous, Nodes
from paceline.run.launching.output import follow_output
from paceline.run.launching.supervisor import Elastic
from paceline.run.saving.stopping import Stopped

PAIR_S = 1.0  # between SIGTERM and SIGHUP of the same sender


def launch(
    fn: Callable[..., Any],
    num_workers: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    min_workers: int | None = None,
    stall_s: float | None = None,
    logs: str | os.PathLike[str] | None = None,
) -> Any:
    """Call `fn(*args, **kwargs)` on `num_workers` workers of this machine and return rank 0's result.

    `num_workers` defaults to the number of accelerators, and to 1 on a CPU. With one worker, and in a process that
    already is a worker (of torchrun, `paceline run` or `launch`), `fn` is called in this process. Otherwise `fn`, its
    arguments and the result are sent by value: lambdas, closures and notebook functions work, and scripts need no
    `if __name__ == "__main__"`.

    If a worker fails, the others are ended and the failure is raised here as `WorkerError`, with rank and traceback.
    When `launch` returns or raises, its workers and their process groups are gone.

    With `max_restarts` the workers, even a single one, are restarted when one fails, at most this many times: `fn` is
    called again, and a trainer in it continues from its newest checkpoint. Under torchrun its own --max-restarts
    applies.

    With `min_workers` a worker that dies (killed, crashed, a failed device) leaves the run, and the others continue
    without a restart, as long as this many are left: they repeat the step, with all its samples, and in exact mode the
    weights are the same as without the loss. Up to `max_restarts` replacements join the running run. A worker that
    computes nothing for `stall_s` counts as dead; the default follows the measured times. An exception in `fn` still
    ends the run. See docs/elastic.md.

    With `logs` the standard output and error of rank R, even of a single worker, are appended to `rank-R.out` and
    `rank-R.err` in that folder, and rank 0's are also shown here.
    """
    options = Launch(workers_to_start(num_workers), max_restarts, logs, min_workers=min_workers, stall_s=stall_s)
    if options.runs_here:
        options.warn_if_fixed()
        return fn(*args, **(kwargs or {}))
    return launch_workers(fn, args, kwargs or {}, options)


def run_script(path: str, argv: Sequence[str], options: Launch) -> None:
    """Run `python path *argv` on the workers that `launch` would use; same rules, same errors.

    With several nodes each of them calls this. After a signal it raises `Stopped` if the workers have saved. It sets
    sys.argv and sys.path[0], which the workers take over.
    """
    sys.argv[:] = [path, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    if options.runs_here:
        options.warn_if_fixed()
        runpy.run_path(path, run_name="__main__")
        return
    with run_folder() as folder:
        _run_workers(folder, options, script=path)


@dataclass(frozen=True)
class Launch:
    """How many workers to start on this node, and how. `ValueError` if this process cannot do that."""

    num_workers: int
    max_restarts: int = 0
    logs: str | os.PathLike[str] | None = None
    nodes: Nodes = SINGLE_NODE
    is_command: bool = False  # the process does nothing else: after a signal, it raises what the workers report
    min_workers: int | None = None  # needed to continue when others die; None: all end when one dies
    stall_s: float | None = None  # how long a micro-batch may take; with min_workers only
    is_quiet: bool = False  # prints nothing after a signal

    def __post_init__(self) -> None:
        if self.min_workers is not None:
            if type(self.min_workers) is not int or self.min_workers < 1:
                raise ValueError(f"min_workers={self.min_workers!r}: choose an integer >= 1")
            if self.nodes.num > 1 and not self.nodes.max_num:
                raise ValueError(
                    f"min_workers requires nodes that may come and go: choose nodes 1:{self.nodes.num}, or omit it"
                )
            if not is_worker() and self.min_workers > self.num_workers:
                raise ValueError(
                    f"min_workers={self.min_workers} is more than num_workers={self.num_workers}: choose at most that"
                )
        if self.stall_s is not None and (self.min_workers is None or not self.stall_s > 0):
            raise ValueError(f"stall_s={self.stall_s!r}: choose seconds > 0, and set min_workers with it")
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r}: choose an integer >= 0")
        if self.logs is not None and Path(self.logs).exists() and not Path(self.logs).is_dir():
            raise ValueError(f"logs={os.fspath(self.logs)!r} is not a folder: choose a folder, or a new name")
        if is_worker() and (self.logs is not None or self.nodes.are_several):
            raise ValueError(
                "logs and nodes have no effect in a process that already is a worker: omit them; torchrun has "
                "--log-dir with --redirects, and --nnodes"
            )

    @property
    def runs_here(self) -> bool:
        """Whether this process does the work: it is a worker, or the only one and needs no supervision."""
        is_plain = (self.max_restarts, self.logs, self.elastic, self.nodes.num) == (0, None, None, 1)
        return self.num_workers == 1 and (is_worker() or is_plain)

    def warn_if_fixed(self) -> None:
        """In workers of another launcher, print on rank 0 that min_workers has no effect."""
        is_fixed = is_worker() and MEMBERSHIP_VARIABLE not in os.environ
        if self.min_workers is not None and is_fixed and os.environ["RANK"] == "0":
            notice(
                "min_workers has no effect in workers of torchrun or Slurm, whose number cannot change: they are "
                "restarted from the newest checkpoint; start them with `paceline run` instead"
            )

    @property
    def elastic(self) -> Elastic | None:
        """How the run continues when workers die; None if all are restarted."""
        if self.min_workers is None and not self.nodes.max_num:
            return None
        return Elastic(self.min_workers or 1, self.max_restarts, self.stall_s)


def workers_to_start(num_workers: int | None) -> int:
    """The number of workers a launch needs; with 1 it may run in this process."""
    if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
        raise ValueError(f"num_workers={num_workers!r}: choose an integer >= 1, or None for all devices")
    if num_workers is not None and not is_worker():
        return num_workers
    from paceline.core.world import World, device_count  # imports torch

    if not is_worker():
        return device_count()
    size = World.from_environment("cpu").size
    if num_workers not in (None, size):
        raise ValueError(
            f"num_workers={num_workers} in a process that already is a worker of a world of WORLD_SIZE={size}: "
            f"choose num_workers={size}, or omit it"
        )
    return 1


def launch_workers(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Launch,
    on_poll: Callable[[], bool] = lambda: False,
) -> Any:
    """As `launch`, always in processes started for it. `on_poll` is called as in `Agent`."""
    from paceline.run.launching.payload import save_call  # imports cloudpickle

    with run_folder() as folder:
        save_call(folder / worker.CALL_FILE, fn, tuple(args), kwargs)
        _run_workers(folder, options, on_poll=on_poll)
        if not (folder / worker.RESULT_FILE).exists():
            raise WorkerError("rank 0 died after the work was done, before it returned its result")
        return worker.load(folder / worker.RESULT_FILE)


def _run_workers(
    folder: Path, options: Launch, script: str | None = None, on_poll: Callable[[], bool] = lambda: False
) -> None:
    """Start the workers, wait for all of them, and raise the first failure."""
    nodes, count = options.nodes, options.num_workers
    logs = None if options.logs is None else Path(options.logs).absolute()
    start = {
        "launcher_pid": os.getpid(),
        "script": script,
        "logs": logs and str(logs),
        "path": [str(entry) for entry in sys.path],
        "argv": sys.argv,
        # Source lines without a file (notebook cells), for tracebacks.
        "sources": {name: each[2] for name, each in list(linecache.cache.items()) if len(each) == 4 and not each[1]},
    }
    (folder / worker.START_FILE).write_text(json.dumps(start))
    common = {"nodes": [nodes.num, nodes.max_num], "max_restarts": options.max_restarts}
    with (
        ForkServer(folder / worker.START_FILE, _environment(folder, count, nodes)) as server,  # first: it takes longest
        closing(_join(nodes, count, folder.name, common)) as rendezvous,
        follow_output(logs, shows_rank_0=rendezvous.first_rank == 0) as copy_output,
        Agent(
            folder,
            server,
            rendezvous,
            options.max_restarts,
            logs,
            lambda: copy_output() or on_poll(),
            options.elastic,
        ) as agent,
    ):
        try:
            failure = agent.run()
        except (KeyboardInterrupt, SystemExit) as error:
            is_terminated = isinstance(error, SystemExit)
            failure = agent.stop(None if options.is_quiet else _stop_message(error), is_shared=is_terminated)
            # A command ends with what its workers report. A program that calls `launch` gets its Ctrl-C back.
            is_command = options.is_command or script is not None
            is_stopped = isinstance(failure, Stopped) and is_terminated
            if failure is None or not (is_command or is_stopped):
                raise
    if failure is not None:
        raise failure


def _join(nodes: Nodes, count: int, run_id: str, common: Mapping[str, Any]) -> NodeRendezvous | ElasticNodes:
    if nodes.max_num:
        return ElasticNodes(nodes, count, common)
    return NodeRendezvous(nodes, count, run_id, common)


def _stop_message(error: KeyboardInterrupt | SystemExit) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C: stopping after this step; press it again to exit immediately"
    number = error.code - 128 if isinstance(error.code, int) else 0
    name = signal.Signals(number).name if number in set(signal.Signals) else "asked to exit"
    return f"{name}: stopping after this step; send it again to exit immediately"


def _environment(folder: Path, count: int, nodes: Nodes) -> dict[str, str]:
    """The environment of the workers, without their ranks."""
    environment = {
        **os.environ,
        **allocator_environment(),
        LAUNCHED_VARIABLE: str(time.time()),
        LEFT_OUT_VARIABLE: json.dumps(try_gpus()),
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))  # read when torch is imported
    if not nodes.are_several:  # a secret for this run, which ends with its folder
        path = folder / worker.SECRET_FILE
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        environment[FILE_VARIABLE] = str(path)
    return environment


@contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder for one launch, removed at the end; if this process is killed, by the next launch.

    It is locked, so that other launches keep it. systemd, too, keeps the files in locked folders; others in /tmp it
    removes after 10 days. The name contains the host: on a shared file system, a lock may exclude only its own host.
    """
    prefix = folder_prefix()
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_abandoned(old)
    with _exit_on_termination(), ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        try:
            with suppress(OSError):  # NFS cannot lock folders; then no launch removes one
                stack.enter_context(_locked(folder))
            folder = folder.rename(folder.with_name(folder.name[1:]))  # visible to other launches only now
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def folder_prefix() -> str:
    return f"paceline-launch-{socket.gethostname()}@"


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # in use, or being removed
        if folder.lstat().st_uid == os.getuid():
            with _locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise SystemExit, so that cleanup runs.

    If one follows the other immediately, as at the end of a login session, they count as one signal. Handlers that the
    user has set stay. Only the main thread can set handlers.
    """
    last, last_s = 0, 0.0

    def exit_with(number: int, _frame: FrameType | None) -> None:
        nonlocal last, last_s
        is_same = last not in (0, number) and time.monotonic() - last_s < PAIR_S
        last, last_s = number, time.monotonic()
        if not is_same:
            raise SystemExit(128 + number)

    with ExitStack() as restore:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
                restore.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, exit_with)
        yield
