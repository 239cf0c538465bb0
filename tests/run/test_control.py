"""The socket by which a run is asked: its owner gets an answer, others do not get in, and nothing disturbs the run."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import MisuseError
from paceline.run import control
from paceline.run.control import ControlError, ControlServer, NoAnswer, NotListening, ask, socket_path

NOBODY = 65534


class Run:
    """What a run does when it is asked, written down."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_aborted = threading.Event()

    def status(self) -> dict[str, Any]:
        return {"step": 12, "loss": math.nan}

    def save(self) -> dict[str, Any]:
        self.asked.append("save")
        return {"step": 12}

    def stop(self) -> None:
        self.asked.append("stop")

    def serve(self, folder: Path) -> ControlServer:
        return ControlServer(socket_path(folder), self.status, self.save, self.stop, self.is_aborted.set)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run()
    with run.serve(tmp_path):
        yield run


def connect(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(socket_path(folder)))
    return connection


def receive_all(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(1 << 16):
        received += more
    return received


def as_user(user: int, call: Callable[[], object]) -> type[Exception] | None:
    """Call it in a child process of that user; the kind of exception it raised."""
    kinds = [ControlError, NotListening, PermissionError, Exception]
    child = os.fork()
    if child == 0:
        os.setgid(user)
        os.setuid(user)
        code = 0
        try:
            call()
        except Exception as error:
            code = 1 + next(i for i, kind in enumerate(kinds) if type(error) is kind or kind is Exception)
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if code == 0 else kinds[code - 1]


@pytest.mark.usefixtures("run")
def test_a_run_says_how_it_stands(tmp_path: Path) -> None:
    assert ask(socket_path(tmp_path), {"command": "status"}) == {"step": 12, "loss": "NaN"}


def test_a_run_is_asked_to_save_and_to_stop(run: Run, tmp_path: Path) -> None:
    assert ask(socket_path(tmp_path), {"command": "save"}) == {"step": 12}
    assert ask(socket_path(tmp_path), {"command": "stop"}) == {}
    assert run.asked == ["save", "stop"]


def test_an_abort_comes_after_its_answer(run: Run, tmp_path: Path) -> None:
    assert ask(socket_path(tmp_path), {"command": "abort"}) == {}
    assert run.is_aborted.wait(10)


def test_a_server_that_was_replaced_leaves_the_socket_to_the_next_one(tmp_path: Path) -> None:
    """As a rank 0 that leaves the run, and closes its outputs after another worker has become rank 0."""
    with Run().serve(tmp_path) as before, Run().serve(tmp_path):
        before.close()
        assert ask(socket_path(tmp_path), {"command": "status"})["step"] == 12


def test_what_a_run_cannot_do_is_said_in_its_words(tmp_path: Path) -> None:
    def save() -> None:
        raise MisuseError("there is nowhere to save to")

    with ControlServer(socket_path(tmp_path), dict, save, dict, dict):
        with pytest.raises(ControlError, match="there is nowhere to save to"):
            ask(socket_path(tmp_path), {"command": "save"})
        assert ask(socket_path(tmp_path), {"command": "status"}) == {}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\n",
        b"status\n",
        b'"status"\n',
        b"[]\n",
        b"{}\n",
        b'{"command": ["status"]}\n',
        b'{"command": "reboot"}\n',
        b'{"command": "stop", "at": 3}\n',
        b'{"command": "stop"',
        b"\xff\x00\n",
        b"[" * 4000 + b"\n",
        b'{"command": "stop", "x": "' + b"x" * 1_000_000 + b'"}\n',
    ],
    ids=lambda request_bytes: str(request_bytes[:20]),
)
def test_what_is_no_request_changes_nothing(run: Run, tmp_path: Path, request_bytes: bytes) -> None:
    with connect(tmp_path) as connection:
        try:
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
            answer = json.loads(receive_all(connection))
        except (BrokenPipeError, ConnectionResetError):  # cut off while it was sending too much
            assert len(request_bytes) > control.MAX_REQUEST_BYTES
        else:
            assert not answer["ok"]
            assert answer["error"].startswith("invalid request: ")
    assert run.asked == []
    assert ask(socket_path(tmp_path), {"command": "status"})["step"] == 12


@pytest.mark.usefixtures("run")
def test_who_asks_nothing_is_cut_off_and_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.3)
    with connect(tmp_path) as silent, connect(tmp_path) as slow:
        slow.sendall(b'{"command": ')
        assert ask(socket_path(tmp_path), {"command": "status"}, timeout_s=10)["step"] == 12
        assert (receive_all(silent), receive_all(slow)) == (b"", b"")


@pytest.mark.usefixtures("run")
def test_whoever_asks_is_answered_during_many_slow_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that say nothing, or half a request, or do not read their answer; they come again when cut off."""
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 60.0)  # not what saves the others
    is_over = threading.Event()
    openings = [b"", b'{"comm', b'{"command": "status"}\n', b"x" * 3000]

    def be_slow(number: int) -> None:
        while not is_over.is_set():
            with suppress(OSError), connect(tmp_path) as connection:
                connection.sendall(openings[number % len(openings)])
                connection.settimeout(0.05)
                while not is_over.is_set():
                    try:
                        if number % len(openings) == 2 or not connection.recv(1):
                            is_over.wait(0.2)
                            break
                    except TimeoutError:
                        pass

    threads = [threading.Thread(target=be_slow, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert ask(socket_path(tmp_path), {"command": "status"}, timeout_s=30)["step"] == 12
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert ask(socket_path(tmp_path), {"command": "status"}, timeout_s=30)["step"] == 12


def test_only_the_owner_has_rights_and_nothing_stays(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    path.parent.mkdir(mode=0o777)
    with Run().serve(tmp_path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.close()
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-control"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_reach_a_run() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # which everybody may enter, unlike pytest's
    try:
        folder.chmod(0o755)
        (folder / "metrics.jsonl").write_text("for all to read")
        run = Run()
        with run.serve(folder):
            assert as_user(NOBODY, (folder / "metrics.jsonl").read_text) is None
            assert as_user(NOBODY, lambda: ask(socket_path(folder), {"command": "stop"})) is ControlError
            assert as_user(NOBODY, lambda: connect(folder)) is PermissionError
            # Also where the folder's rights are lost: the kernel says who asks.
            socket_path(folder).parent.chmod(0o777)
            socket_path(folder).chmod(0o666)
            assert as_user(NOBODY, lambda: connect(folder)) is None
            assert as_user(NOBODY, lambda: ask(socket_path(folder), {"command": "stop"})) is ControlError
            assert run.asked == []
            assert as_user(0, lambda: ask(socket_path(folder), {"command": "stop"})) is None
            assert run.asked == ["stop"]
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    socket_path(tmp_path).parent.mkdir()
    os.chown(socket_path(tmp_path).parent, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"of this user: it belongs to user {NOBODY}; remove it"):
        Run().serve(tmp_path)


def test_a_folder_that_others_wrote_into_is_not_used(tmp_path: Path) -> None:
    socket_path(tmp_path).parent.mkdir()
    socket_path(tmp_path).parent.chmod(0o777)
    (socket_path(tmp_path).parent / "planted").touch()
    with pytest.raises(PermissionError, match="others have access to it, its mode is 0777; remove it"):
        Run().serve(tmp_path)


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    socket_path(tmp_path).parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="it is a symbolic link; remove it"):
        Run().serve(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_lies_at_the_end_of_a_link_is_removed_only_if_it_is_ours(
    tmp_path: Path, private_temporary_folder: Path
) -> None:
    others = private_temporary_folder / "paceline-control-others"
    others.mkdir(mode=0o700)
    os.chown(others, NOBODY, NOBODY)
    socket_path(tmp_path).parent.mkdir()
    socket_path(tmp_path).symlink_to(others / "socket")
    try:
        with Run().serve(tmp_path):
            assert others.exists()
    finally:
        others.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_socket_that_another_user_planted_is_not_asked() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))

    def ask_it() -> None:
        with pytest.raises(ControlError, match=r"belongs to user 0: only the owner of a run and root can control it"):
            ask(socket_path(folder), {"command": "status"})

    try:
        folder.chmod(0o777)
        with Run().serve(folder):
            socket_path(folder).parent.chmod(0o777)
            socket_path(folder).chmod(0o666)
            assert as_user(NOBODY, ask_it) is None
    finally:
        shutil.rmtree(folder)


def test_a_run_with_a_long_path_can_be_asked(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200) / ("y" * 200)
    with Run().serve(folder):
        assert ask(socket_path(folder), {"command": "status"})["step"] == 12
    assert list(folder.iterdir()) == []


def test_where_the_file_system_knows_no_sockets_a_link_leads_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_temporary_folder: Path
) -> None:
    bind = control._bind

    def refuse(path: Path) -> socket.socket:
        if path.is_relative_to(tmp_path):
            raise OSError("Operation not supported")
        return bind(path)

    monkeypatch.setattr(control, "_bind", refuse)
    for folder in (tmp_path, tmp_path / ("x" * 200)):
        with Run().serve(folder):
            target = socket_path(folder).readlink()
            assert target.is_relative_to(private_temporary_folder)
            assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
            assert ask(socket_path(folder), {"command": "status"})["step"] == 12
        assert not target.parent.exists()


def test_what_a_killed_run_left_at_the_end_of_its_link_is_removed(
    tmp_path: Path, private_temporary_folder: Path
) -> None:
    left = private_temporary_folder / "paceline-control-left"
    left.mkdir(mode=0o700)
    socket_path(tmp_path).parent.mkdir()
    socket_path(tmp_path).symlink_to(left / "socket")
    with Run().serve(tmp_path):
        assert not left.exists()
        assert ask(socket_path(tmp_path), {"command": "status"})["step"] == 12


def test_a_run_that_changes_its_folder_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Run().serve(Path("run")):
        monkeypatch.chdir("/")
    assert list((tmp_path / "run").iterdir()) == []


def test_the_socket_of_a_dead_run_is_recognised_and_replaced(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    with pytest.raises(NotListening, match=r"no process listens at .*: No such file"):
        ask(path, {"command": "status"})
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotListening, match=r"no process listens at .*: Connection refused"):
        ask(path, {"command": "status"})
    with Run().serve(tmp_path):
        assert ask(path, {"command": "status"})["step"] == 12


def test_a_run_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(path))
        hanging.listen()
        with pytest.raises(NoAnswer, match=r"within 0.2 s: the run is busy, or suspended"):
            ask(path, {"command": "status"}, timeout_s=0.2)


@pytest.mark.usefixtures("run")
def test_a_forked_process_does_not_listen(tmp_path: Path) -> None:
    (listener,) = (each for each in control._listeners if each.fileno() >= 0)
    child = os.fork()
    if child == 0:
        os._exit(0 if listener.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(socket_path(tmp_path), {"command": "status"})["step"] == 12
