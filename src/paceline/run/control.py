"""The control socket of a run: status, save, stop, leave and abort from another process of its user on the same host.

The run listens on a Unix socket, `control/socket` in its folder. A connection carries one request and one reply, each a
line of JSON:

    {"command": "save"}
    {"command": "leave", "rank": 2}
    {"ok": true, "step": 120}                    or {"ok": false, "error": "this run has no checkpoints: ..."}

Only the owner and root are served: the socket has mode 0600, its folder 0700, and the kernel reports the user of each
connection. If the file system does not support sockets, the socket is in a private temporary folder, and
`control/socket` is a link to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self
from weakref import WeakSet

from paceline.core.errors import PacelineError
from paceline.core.private_folder import private_folder, why_not_private
from paceline.observe.json_lines import to_json
from paceline.run.launching.worker import HEARD_VARIABLE
from paceline.run.launching.worker_exit import ExitKind, WorkerExit

SOCKET_NAME = "socket"
COMMANDS = ("status", "save", "stop", "leave", "abort")
ABORTED_EXIT_CODE = 137  # as after SIGKILL

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 20
REQUEST_TIMEOUT_S = 2.0  # to send a request and to receive the reply
_MAX_ADDRESS_BYTES = 108  # of a Unix socket, including a final zero byte
_FOLDER_PREFIX = "paceline-control-"


class ControlError(PacelineError):
    """A run could not be reached, or refused a request."""


class NotListening(ControlError):
    """There is no socket, or no process behind it: the run has ended, has not started, or is on another host."""


class NoAnswer(ControlError):
    """The run exists and does not reply: it is busy, or suspended."""


def socket_path(run_folder: Path) -> Path:
    """The control socket of the run with this folder."""
    return run_folder / "control" / SOCKET_NAME


class ControlServer:
    """Listens at `path` from construction to the end of the `with` block, in a daemon thread.

    The functions are called in that thread. `status` returns the run's status as JSON values. `save`, `stop`, and
    `leave` with a rank, make a request and return immediately. Their results and the text of an exception are part of
    the reply. `abort` is called after the reply was sent, and need not return. `OSError` if the socket cannot be
    created. The folder of `path` belongs to the server, which replaces the socket of an earlier server in it.
    """

    def __init__(
        self,
        path: Path,
        status: Callable[[], Mapping[str, Any]],
        save: Callable[[], Mapping[str, Any] | None],
        stop: Callable[[], Mapping[str, Any] | None],
        abort: Callable[[], object],
        leave: Callable[[int], Mapping[str, Any] | None] | None = None,
    ) -> None:
        self._path = path = path.absolute()  # the user's code may change the current folder
        self._functions: dict[str, Callable[[], Mapping[str, Any] | None]]
        self._functions = {"status": status, "save": save, "stop": stop, "abort": lambda: None}
        self._abort = abort
        self._leave = leave
        self._listener = _open_socket(path)
        self._socket_id = _identity(path)
        _listeners.add(self._listener)
        self._closing = asyncio.Event()
        # Not the thread's default loop, which belongs to the user's code.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and remove the socket, unless another server has replaced it. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(REQUEST_TIMEOUT_S)  # one of the functions may not return
        if _identity(self._path) == self._socket_id:
            _remove(self._path)
            with suppress(OSError):  # not empty
                self._path.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with self._runner:  # cancels the tasks that are left
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._serve_client, sock=self._listener, limit=MAX_REQUEST_BYTES)
        await self._closing.wait()
        server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                try:
                    line = await reader.readline()
                except ValueError:  # longer than MAX_REQUEST_BYTES
                    line = b""
                command, reply = self._reply(_user_of(writer.get_extra_info("socket")), line)
                writer.write(f"{to_json(reply)}\n".encode())
                await writer.drain()
            if command == "abort":
                self._abort()
        except (OSError, TimeoutError):
            return  # disconnected, or too slow
        finally:
            writer.close()

    def _reply(self, user: int, line: bytes) -> tuple[str | None, dict[str, Any]]:
        """The command, if it is valid and permitted, and the reply."""
        try:
            if user not in (os.geteuid(), 0):
                raise PermissionError(f"the run belongs to user {os.geteuid()}, and the request is from user {user}")
            match _parse(line):
                case {"command": "leave", "rank": int(rank), **others} if not others and self._leave is not None:
                    return "leave", {"ok": True, **(self._leave(rank) or {})}
                case {"command": str(command), **others} if command in self._functions and not others:
                    return command, {"ok": True, **(self._functions[command]() or {})}
            raise ValueError(f'invalid request: send {{"command": ...}} with one of {", ".join(COMMANDS)}, in one line')
        except Exception as error:
            return None, {"ok": False, "error": str(error) or type(error).__name__}


def _parse(line: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(line)


def ask(path: Path, request: Mapping[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """The reply of the run that listens at `path`. `ControlError` with the run's message if it refuses.

    Numbers that are not finite arrive as text: "NaN", "Infinity".
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # The kernel's timeout: with Python's, connect() fails immediately if the queue of the server is full.
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            with _address(path) as address:
                connection.connect(address)
            connection.settimeout(timeout_s)
            user = _user_of(connection)
            if os.geteuid() not in (user, 0):  # another user may have put the socket there
                raise ControlError(f"{path} belongs to user {user}: only the owner of a run and root can control it")
            connection.sendall(f"{json.dumps(request)}\n".encode())
            with connection.makefile("rb") as replies:
                line = replies.readline(MAX_ANSWER_BYTES)
        except (BlockingIOError, TimeoutError):
            raise NoAnswer(f"no answer from {path} within {timeout_s:g} s: the run is busy, or suspended") from None
        except PermissionError as error:
            raise ControlError(f"{path} belongs to another user: only the owner of a run can control it") from error
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except OSError as error:
            raise NotListening(f"no process listens at {path}: {error.strerror}") from error
    try:
        reply = json.loads(line)
    except ValueError:
        raise NotListening(f"no answer from {path}: the run has ended, or has too many clients") from None
    if not reply.pop("ok", False):
        raise ControlError(str(reply.get("error")))
    return dict(reply)


def exit_immediately(rank: int) -> NoReturn:
    """Exit this process immediately. Its agent, if it has one, ends the other workers and does not restart them."""
    if heard := os.environ.get(HEARD_VARIABLE):
        with suppress(OSError, ValueError):
            rank = int(Path(heard).name.rpartition("-")[2])  # its number for the agent, if ranks have changed
            WorkerExit(ExitKind.ABORTED, rank, f"rank {rank}: the run was aborted on request").write(Path(heard).parent)
    os._exit(ABORTED_EXIT_CODE)


def _open_socket(path: Path) -> socket.socket:
    """A listening socket at `path`, in a private folder. The socket of an earlier run is removed."""
    folder = path.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
        _remove(path)
        with suppress(OSError):  # not empty: used if it is private
            folder.rmdir()
    private_folder(folder)
    with suppress(OSError):
        return _bind(path)
    elsewhere = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    try:
        listener = _bind(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    except BaseException:
        shutil.rmtree(elsewhere)
        raise
    return listener


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _remove(path: Path) -> None:
    """Remove the socket, and if it is a link also the temporary folder that it leads to."""
    with suppress(OSError):
        folder = path.readlink().parent if path.is_symlink() else None
        if folder is not None and folder.name.startswith(_FOLDER_PREFIX) and why_not_private(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path, or a short equivalent of one that is too long for a socket address."""
    if len(os.fsencode(path)) < _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)


_listeners: WeakSet[socket.socket] = WeakSet()


def _close_in_child() -> None:
    """A forked process, such as a data reader, must not keep the socket open after the worker has ended."""
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)
