"""Asking a run how it stands, and to save, stop or end, from another process of the same user on the same host.

The run listens on a Unix socket, `control/socket` in its folder. A connection is one question and one answer, a line
of JSON each:

    {"command": "save"}
    {"ok": true, "step": 120}                    or {"ok": false, "error": "there is nowhere to save to: ..."}

Nobody else gets in: the socket is its owner's (0600) in a folder that is its owner's (0700), and the kernel says who
asks. Where the file system knows no sockets it lies in a folder of its own among the temporary ones, and a link leads
there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from weakref import WeakSet

from paceline.core.errors import PacelineError
from paceline.core.private_folder import new_private_folder, private_folder, why_not_private
from paceline.observe.json_lines import to_json
from paceline.run.launching.worker import HEARD_VARIABLE
from paceline.run.launching.worker_exit import ExitKind, WorkerExit

SOCKET_NAME = "socket"
COMMANDS = ("status", "save", "stop", "abort")
# As after SIGKILL, which an abort comes close to.
ABORTED_EXIT_CODE = 137

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 20
# Who has not asked by then, or does not take the answer, is cut off.
REQUEST_TIMEOUT_S = 2.0
# Connections that have not asked yet; each holds a descriptor, which the run may need. One more cuts off the oldest.
MAX_CLIENTS = 64
# Accepted at a time, before any of them is read: fewer, so that whoever asks at once is heard.
_ACCEPTED_AT_ONCE = 16
_MAX_PENDING = 1024
_RETRY_S = 0.01
# What fits into a socket's address, a closing zero byte included.
_MAX_ADDRESS_BYTES = 108
_FOLDER_PREFIX = "paceline-control-"
_PEER = struct.Struct("3i")  # process, user, group


class ControlError(PacelineError):
    """A run could not be asked, or did not do what it was asked for."""


class NobodyListens(ControlError):
    """There is no socket, or nobody behind it: the run has ended, has not begun, or is on another host."""


class NoAnswer(ControlError):
    """The run is there and says nothing: it is busy, or stopped."""


def socket_path(run_folder: Path) -> Path:
    """Where the run with this folder listens."""
    return run_folder / "control" / SOCKET_NAME


class ControlServer:
    """Listens at `path` from construction to the end of the `with` block, in a daemon thread of its own.

    The functions are called in that thread. `status`: how the run stands, in what JSON can hold. `save` and `stop` ask
    for it and return at once; what they return, if anything, is part of the answer. An exception of theirs is the
    answer too. `abort` is called once its answer is on the way, and need not return. `OSError` if nobody can listen
    there. The folder of `path` is the server's own; what another server left in it is replaced.
    """

    def __init__(
        self,
        path: Path,
        status: Callable[[], Mapping[str, Any]],
        save: Callable[[], Mapping[str, Any] | None],
        stop: Callable[[], Mapping[str, Any] | None],
        abort: Callable[[], object],
    ) -> None:
        self._path = path = path.absolute()  # the user's code may change the current folder
        self._functions: dict[str, Callable[[], Mapping[str, Any] | None]]
        self._functions = {"status": status, "save": save, "stop": stop, "abort": lambda: None}
        self._abort = abort
        self._silent: dict[asyncio.Task[Any], None] = {}  # those who have not asked yet, the oldest first
        _make_private(path.parent)
        _remove(path)
        self._listener = _listen(path)
        _listening.add(self._listener)
        self._closing = asyncio.Event()
        # Not the thread's default loop: that belongs to the user's code.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Whoever is being answered is cut off. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(REQUEST_TIMEOUT_S)  # which may stand in a function that does not return
        _remove(self._path)
        with suppress(OSError):  # somebody put something there
            self._path.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with self._runner:  # which cancels whatever is left
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(
            self._meet, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=_ACCEPTED_AT_ONCE
        )
        self._listener.listen(_MAX_PENDING)  # asyncio has set what it accepts at once
        await self._closing.wait()
        server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = None
        if len(self._silent) > MAX_CLIENTS:
            next(iter(self._silent)).cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await _read_line(reader)
                self._silent.pop(task, None)
                command, answer = self._answer(_peer_user(writer), line)
                writer.write(f"{to_json(answer)}\n".encode())
                await writer.drain()
            if command == "abort":
                self._abort()
        except (OSError, TimeoutError):
            return  # it is gone, or too slow
        finally:
            self._silent.pop(task, None)
            writer.close()

    def _answer(self, user: int, line: bytes) -> tuple[str | None, dict[str, Any]]:
        """The command, if it is one and may be given, and what to say."""
        if user not in (os.geteuid(), 0):
            return None, _refusal(f"the run belongs to user {os.geteuid()}, and user {user} asks")
        try:
            command = _command(line)
        except ValueError as error:
            return None, _refusal(f"not understood: {error}")
        try:
            return command, {"ok": True, **(self._functions[command]() or {})}
        except Exception as error:
            return None, _refusal(str(error) or type(error).__name__)


def ask(path: Path, request: Mapping[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """What the run that listens at `path` answers. `ControlError` with its own words if it refuses.

    Numbers that are not finite arrive as text: "NaN", "Infinity".
    """
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, path, deadline_s)
            _check_owner(connection, path)
            connection.sendall(f"{json.dumps(request)}\n".encode())
            line = _receive_line(connection, deadline_s)
        except TimeoutError:
            raise NoAnswer(f"no answer from {path} within {timeout_s:g} s: the run is busy, or stopped") from None
        except PermissionError as error:
            raise ControlError(f"{path} is another user's: only who started a run can ask it") from error
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except OSError as error:
            raise NobodyListens(f"nobody listens at {path}: {error.strerror}") from error
    try:
        answer = json.loads(line)
    except ValueError:
        raise NobodyListens(f"no answer from {path}: the run has ended, or too many ask it") from None
    if not answer.get("ok"):
        raise ControlError(str(answer.get("error")))
    return {name: value for name, value in answer.items() if name != "ok"}


def end_at_once(rank: int) -> NoReturn:
    """End this process here and now. Its launcher, if it has one, ends the other workers and starts none again."""
    if heard := os.environ.get(HEARD_VARIABLE):
        with suppress(OSError):
            WorkerExit(ExitKind.ABORTED, rank, f"rank {rank}: the run was aborted on request").write(Path(heard).parent)
    os._exit(ABORTED_EXIT_CODE)


def _make_private(folder: Path) -> None:
    """Make the server's folder. One that a run left is used again; if others can enter it, only once it is empty."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
        _remove(folder / SOCKET_NAME)
        with suppress(OSError):  # somebody put something there
            folder.rmdir()
    private_folder(folder)


def _listen(path: Path) -> socket.socket:
    """A listener at `path`, or where the file system knows no sockets at the end of a link."""
    with suppress(OSError):
        return _bind(path)
    folder = new_private_folder(_FOLDER_PREFIX)
    try:
        listener = _bind(folder / path.name)
        path.symlink_to(folder / path.name)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return listener


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(_MAX_PENDING)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove(path: Path) -> None:
    """The socket, and where it is a link what `_listen` made at its end."""
    with suppress(OSError):
        folder = path.readlink().parent if path.is_symlink() else None
        if folder is not None and folder.name.startswith(_FOLDER_PREFIX) and why_not_private(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        path.unlink()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path, or for one that is too long another that leads there."""
    if len(os.fsencode(path)) < _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _check_owner(connection: socket.socket, path: Path) -> None:
    """Root may ask anybody's run; others only their own, since another user may have planted the socket."""
    user = _user_of(connection)
    if os.geteuid() not in (user, 0):
        raise ControlError(f"{path} is another user's ({user}): only who started a run can ask it")


def _peer_user(writer: asyncio.StreamWriter) -> int:
    return _user_of(writer.get_extra_info("socket"))


def _user_of(connection: socket.socket) -> int:
    """Whose process is at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[1])


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Empty if it is too long."""
    try:
        return await reader.readline()
    except ValueError:
        return b""


def _command(line: bytes) -> str:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    command = request.get("command") if isinstance(request, dict) else None
    if command not in COMMANDS or len(request) != 1:
        raise ValueError(f'send {{"command": ...}} with one of {", ".join(COMMANDS)}, in one line')
    return str(command)


def _refusal(error: str) -> dict[str, Any]:
    return {"ok": False, "error": error}


def _connect(connection: socket.socket, path: Path, deadline_s: float) -> None:
    """Also to a run that is asked by so many at this moment that the kernel lets nobody wait in line."""
    while True:
        try:
            with _address(path) as address:
                return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError from None
            time.sleep(_RETRY_S)


def _receive_line(connection: socket.socket, deadline_s: float) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < MAX_ANSWER_BYTES:
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        if not (more := connection.recv(1 << 16)):
            break
        received += more
    return received


_listening: WeakSet[socket.socket] = WeakSet()


def _let_go_in_child() -> None:
    """A forked data-loading process must not seem to listen when the worker that forked it is gone."""
    for listener in list(_listening):
        listener.close()


os.register_at_fork(after_in_child=_let_go_in_child)
