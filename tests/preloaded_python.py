"""Python processes that find torch imported: importing it takes seconds, forking a process that has done so does not.

`PreloadedPython([sys.executable, ...])` is a `subprocess.Popen` for a script, `-m module`, `-c program` or `-`, also
behind `nsenter --net=...`, and `run` is `subprocess.run`. The process is forked from a seed, a child of this process
that has imported what Paceline's workers import and has done nothing else. It becomes a child of this process, with the
pipes, process group and environment that were asked for, and ends as any Python process does. `use` lets launches and
multiprocessing's spawn start their processes in this way, and processes started here, torchrun among them, do so too.

Where the environment changes how Python or torch start (the number of threads, for example), an ordinary process is
started instead. Use an ordinary process where its start is what is tested.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from paceline.run.launching import fork_server
from paceline.run.launching.allocator import allocator_environment

READ_AT_START = ("ATEN_", "CUDA_", "GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TORCH_")
PATH, UNBUFFERED = "PYTHONPATH", "PYTHONUNBUFFERED"  # they are read again
READ_LATER = "TORCH_NCCL_"  # which torchrun sets
FLAGS = ("-B", "-P", "-u")
NETWORK = "--net="
SPAWNED = "--multiprocessing-fork"
TORCHRUN = "torch.distributed.run"
TORCHRUNS_PROCESSES = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
MAX_REQUEST_BYTES = 1 << 17
MAX_FDS = 16
READY = b"ready"

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Request(NamedTuple):
    network: str | None
    words: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]  # the numbers that the fds sent along have in the new process
    has_new_session: bool
    group: int
    parent: int


class Seed:
    """The process that others are forked from, started when it is needed."""

    def __init__(self) -> None:
        self.pid = 0
        self._environment: dict[str, str] = {}
        self._lock = threading.Lock()

    def serves(self, words: Sequence[Any], environment: Mapping[str, str]) -> bool:
        with self._lock:
            if not self.pid and _is_served(words):
                self._environment = _read_at_start(environment)
                self._start(environment)
        return _is_served(words) and _read_at_start(environment) == self._environment

    def fork(self, request: _Request, fds: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        # The seed forks twice, and the orphan becomes a child of its nearest ancestor that takes orphans.
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [json.dumps(request._asdict()).encode()], fds)
                return int(self._channel.recv(64))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _start(self, environment: Mapping[str, str]) -> None:
        self._channel, its_end = _channel()
        with its_end:
            words = [sys.executable, "-P", __file__, str(its_end.fileno())]
            process = subprocess.Popen(words, env=environment, pass_fds=[its_end.fileno()], stdin=subprocess.DEVNULL)
        self.pid = process.pid
        process.returncode = 0  # waited for in `close`
        assert self._channel.recv(64) == READY, "the process to fork others from has not started"

    def close(self) -> None:
        if self.pid:
            self._channel.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _is_served(words: Sequence[Any]) -> bool:
    _network, (executable, *rest) = _split(words)
    first = next((word for word in rest if word not in FLAGS), "-i")
    return executable == sys.executable and (first in ("-m", "-c", "-") or not first.startswith("-"))


def _split(words: Sequence[Any]) -> tuple[str | None, list[str]]:
    """The network namespace of `nsenter --net=...`, and the command."""
    match [os.fsdecode(word) for word in words]:
        case ["nsenter", network, *command] if network.startswith(NETWORK):
            return network.removeprefix(NETWORK), command
        case command:
            return None, command


def _channel() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_REQUEST_BYTES)
    return ends


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: each
        for name, each in environment.items()
        if name.startswith(READ_AT_START) and name not in (PATH, UNBUFFERED) and not name.startswith(READ_LATER)
    }


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


SEED = Seed()


class PreloadedPython(subprocess.Popen):  # type: ignore[type-arg]
    def _execute_child(self, args: Any, *rest: Any) -> None:
        executable, preexec, _close_fds, pass_fds, folder, environment, _info, _flags, shell, *more = rest
        pipes, (_restore_signals, *user, has_new_session, group) = more[:6], more[6:]
        environment = dict(os.environ if environment is None else environment)
        environment |= allocator_environment(environment)
        is_plain = not (executable or preexec or shell) and all(each in (None, -1) for each in user)
        if not is_plain or isinstance(args, str | bytes) or not SEED.serves(args, environment):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        network, words = _split(args)
        request = _Request(
            network=network,
            words=words,
            environment=environment,
            folder=os.fspath(Path(folder or ".").absolute()),
            fds=[0, 1, 2, *pass_fds],
            has_new_session=has_new_session,
            group=group,
            parent=os.getpid(),
        )
        streams = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = SEED.fork(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(words: Sequence[Any], *, input: Any = None, timeout: float | None = None, **options: Any) -> Any:
    """As `subprocess.run`."""
    check = options.pop("check", False)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with PreloadedPython(words, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        ended.check_returncode()
    return ended


@contextmanager
def use() -> Iterator[None]:
    """In this block launches and multiprocessing's spawn fork their processes from the seed."""
    spawn = multiprocessing.util.spawnv_passfds
    _install()
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds, fork_server.subprocess = spawn, subprocess
        SEED.close()


def _install() -> None:
    multiprocessing.util.spawnv_passfds = _spawn
    fork_server.subprocess = SimpleNamespace(Popen=PreloadedPython)  # type: ignore[assignment]


def _spawn(_path: Any, words: Sequence[Any], fds: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, also used for the resource tracker, which needs no torch."""
    start = PreloadedPython if SPAWNED in words else subprocess.Popen
    process = start([os.fsdecode(word) for word in words], pass_fds=fds)
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


# In the seed


def serve(channel: socket.socket) -> list[str]:
    """Fork processes until the channel is closed. Returns in each of them, with its words."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a process group, they are not meant for the seed
        signal.signal(number, signal.SIG_IGN)
    while True:
        payload, fds, _flags, _address = socket.recv_fds(channel, MAX_REQUEST_BYTES, MAX_FDS)
        if not payload:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
        elif os.fork():
            os._exit(0)
        else:
            return _become(_Request(**json.loads(payload)), fds, channel)


def _become(request: _Request, fds: list[int], channel: socket.socket) -> list[str]:
    """Let this process be as Python starts it."""
    while os.getppid() != request.parent:
        time.sleep(0.0005)
    if request.has_new_session:
        os.setsid()
    elif request.group != -1:
        os.setpgid(0, request.group)
    if request.network is not None:
        with Path(request.network).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0, request.network
    os.chdir(request.folder)
    before = os.environ.get(PATH, "")
    os.environ.clear()
    os.environ.update(request.environment)
    _set_path(before, os.environ.get(PATH, ""))
    tempfile.tempdir = None  # found when something was imported
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel.send(str(os.getpid()).encode())
    channel.detach()
    _set_fds(dict(zip(request.fds, fds, strict=True)))
    is_unbuffered = bool(os.environ.get(UNBUFFERED))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)  # type: ignore[union-attr]
    sys.stderr.reconfigure(write_through=is_unbuffered)  # type: ignore[union-attr]
    sys.orig_argv[:] = request.words
    return request.words[1:]


def _set_path(before: str, now: str) -> None:
    own = [entry for entry in sys.path if entry not in before.split(os.pathsep)]
    sys.path[:] = [*filter(None, now.split(os.pathsep)), *own]


def _set_fds(fds: Mapping[int, int]) -> None:
    """The open fds: those of `fds`, from the number that one gets to the number that it has."""
    highest = max(*fds.keys(), *fds.values(), 63)
    moved = {number: os.dup2(fd, highest + 1 + i) for i, (number, fd) in enumerate(fds.items())}
    os.closerange(3, highest + 1)
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def start(words: list[str]) -> None:
    """What Python does with its command line."""
    count = next(i for i, word in enumerate(words) if word not in FLAGS)
    flags, (first, *arguments) = words[:count], words[count:]
    if SPAWNED not in words and first != fork_server.__file__:
        _have_a_seed()
    if "-P" not in flags:
        sys.path.insert(0, {"-m": str(Path.cwd()), "-c": "", "-": ""}.get(first, str(Path(first).resolve().parent)))
    sys.argv[:] = arguments if first == "-m" else [first, *arguments]
    match first:
        case "-m":
            if arguments[0] == TORCHRUN:
                import_module(TORCHRUNS_PROCESSES).Popen = PreloadedPython  # type: ignore[attr-defined]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        case "-c":
            sys.argv.pop(1)
            exec(compile(arguments[0], "<string>", "exec"), _main_module())
        case "-":
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), _main_module())
        case script:
            runpy.run_path(script, run_name="__main__")


def _main_module() -> dict[str, Any]:
    sys.modules["__main__"] = module = ModuleType("__main__")
    return vars(module)


def _have_a_seed() -> None:
    """This process, which has not run anything yet, starts others from a copy of itself."""
    SEED._environment = _read_at_start(os.environ)
    SEED._channel, its_end = _channel()
    SEED.pid = os.fork()
    if not SEED.pid:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        SEED._channel.close()
        start(serve(its_end))
        sys.exit()
    its_end.close()
    _install()


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in (*fork_server.PRELOADED_MODULES, "paceline.cli.main"):
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.enable()
    channel.send(READY)
    start(serve(channel))
