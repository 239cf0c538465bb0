"""Who is refused, and what a hostile folder or client cannot do."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import IncompleteRead
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote

import pytest
from made_runs import make_run, row
from served import Client, Reply, served
from waiting import wait_until

from paceline.cli.watch import server as server_module
from paceline.cli.watch.access import MAX_BODY_BYTES
from paceline.cli.watch.app import COMMANDS
from paceline.observe.run_files import RunFiles, process_started
from paceline.run.control import ControlServer, socket_path

HTML_NAME = "<img src=x onerror=alert(1)>&\"'"
SECRET = "the content of another file"


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "runs").mkdir()
    live = {"state": "running", "pid": os.getpid(), "process_started": process_started(os.getpid())}
    return make_run(tmp_path / "runs", status={**live, "host": socket.gethostname()})


@pytest.fixture
def client(files: RunFiles) -> Iterator[Client]:
    with served(files.root.parent) as client:
        yield client


@pytest.fixture
def asked(files: RunFiles) -> Iterator[list[str]]:
    """What reaches the run's control socket."""
    heard: list[str] = []
    note = {name: (lambda name=name: heard.append(name)) for name in ("status", *COMMANDS)}
    with ControlServer(socket_path(files.root), lambda: {}, note["save"], note["stop"], note["abort"]):  # type: ignore[arg-type]
        yield heard


PATHS = ("/", "/page/main.js", "/api/runs", "/metrics", "/api/stream", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_served_without_the_token(client: Client, path: str) -> None:
    for header in (None, "Bearer wrong", "Bearer", f"Basic {client.server.token}", f"Bearer {client.server.token}x"):
        reply = client.request(path, Authorization=header)
        assert reply.status == 401
        assert "token is missing or wrong" in reply.json["error"]
        assert "set-cookie" not in reply.headers
    assert client.request(f"{path}?token=wrong", Authorization=None).status == 401
    assert client.request(path, Authorization=None, Cookie="paceline_watch_1=x").status == 401


def test_the_address_sets_a_cookie_that_scripts_and_other_sites_cannot_use(client: Client) -> None:
    reply = client.request(f"/?token={client.server.token}", Authorization=None)
    assert reply.status == 200
    cookie, _, attributes = reply.headers["set-cookie"].partition("; ")
    assert set(attributes.split("; ")) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert client.request("/api/runs", Authorization=None, Cookie=f"other=1; {cookie}").status == 200
    for header in ("content-security-policy", "x-content-type-options", "referrer-policy"):
        assert header in reply.headers
    assert "unsafe" not in reply.headers["content-security-policy"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:PORT", "127.0.0.1.evil.example:PORT", "localhost@evil.example", "10.0.0.1:PORT", "",
     "127.0.0.1:PORT/", "[::1", "localhost:PORT:1", "0.0.0.0:PORT"],
)  # fmt: skip
def test_another_host_is_refused(client: Client, host: str) -> None:
    for path in PATHS:
        reply = client.request(path, Host=host.replace("PORT", str(client.server.port)))
        assert reply.status in (400, 403)
        assert SECRET.encode() not in reply.body


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:9999", "[::1]:PORT", "127.0.0.1"])
def test_this_host_has_several_names(client: Client, host: str) -> None:
    assert client.request("/api/runs", Host=host.replace("PORT", str(client.server.port))).status == 200


def test_another_origin_is_refused_and_reaches_no_run(client: Client, files: RunFiles, asked: list[str]) -> None:
    for origin in (
        "http://evil.example",
        "null",
        f"https://{client.host}",
        "http://127.0.0.1:1",
        f"http://{client.host}.",
    ):
        for command in COMMANDS:
            assert client.post(f"/api/runs/{files.root.name}/{command}", Origin=origin).status == 403
        reply = client.request("/api/runs", Origin=origin)
        assert reply.status == 403
        assert "access-control-allow-origin" not in reply.headers
    assert asked == []
    assert client.post(f"/api/runs/{files.root.name}/save", Origin=f"http://{client.host}").json == {"ok": True}
    assert asked == ["save"]


def test_only_the_buttons_write(client: Client, files: RunFiles, asked: list[str]) -> None:
    before = snapshot(files.root.parent)
    for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        for path in (*PATHS, f"/api/runs/{files.root.name}", f"/api/runs/{files.root.name}/metrics"):
            assert client.request(path, method).status in (404, 405, 200 if method == "HEAD" else 405), (method, path)
    path = f"/api/runs/{files.root.name}/stop"
    for reply in (
        client.request(path),
        client.post(path, **{"Content-Type": "text/plain"}),
        client.post(path, **{"Content-Type": "application/x-www-form-urlencoded"}),
        client.post(path, b"[]"),
        client.post(path, b'{"command": "abort"}'),
        client.post(path, b"[" * 4000),
        client.post("/api/runs/nothing/stop"),
        client.post(f"/api/runs/{files.root.name}/status"),
    ):
        assert reply.status in (400, 404, 405, 415)
    assert asked == []
    assert snapshot(files.root.parent) == before


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*") if p.name != "socket"}


@pytest.mark.parametrize(
    "up", ["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%5c", "%252e%252e%252f", "....//", "%c0%ae%c0%ae/"]
)
def test_paths_lead_nowhere_else(client: Client, files: RunFiles, up: str) -> None:
    name = files.root.name
    for path in (
        f"/{up}{up}secret",
        f"/page/{up}__init__.py",
        f"/page/{up}command.py",
        f"/api/runs/{up}secret",
        f"/api/runs/{name}/{up}{up}{up}secret",
        f"/api/runs/{up}runs/{name}",
        f"/api/stream?run={up}secret",
        f"/api/compare?run={up}secret",
    ):
        reply = client.request(path)
        assert reply.status in (400, 404), path
        assert_not_leaked(reply)
    (log,) = [client.request(f"/api/runs/{name}/log?rank=0&stream={up}secret")]
    assert log.json == {"files": []}


def assert_not_leaked(reply: Reply) -> None:
    assert SECRET.encode() not in reply.body
    assert b"argparse" not in reply.body


def test_links_out_of_the_folder_are_not_followed(client: Client, files: RunFiles, tmp_path: Path) -> None:
    folder, outside = files.root.parent, make_run(tmp_path / "outside", "outside", [row(7, loss=SECRET)])
    (folder / "linked").symlink_to(outside.root)
    for path in (files.metrics, files.events, files.config, files.environment):
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "secret")
    (files.ranks / "rank-0.err").symlink_to(tmp_path / "secret")
    (files.ranks / "rank-1.json").symlink_to(outside.status)
    (outside.checkpoints / "step-00000001").mkdir()
    (outside.checkpoints / "step-00000001" / "manifest.json").write_text("{}")
    files.checkpoints.rmdir()
    files.checkpoints.symlink_to(outside.checkpoints)
    os.mkfifo(files.ranks / "rank-2.err")
    assert [run["id"] for run in client.get("/api/runs")["runs"]] == [files.root.name]
    assert client.get("/api/runs?search=another+file")["runs"] == []
    one = f"/api/runs/{files.root.name}"
    for path in ("", "/metrics", "/events", "/log", "/checkpoints", "/config"):
        reply = client.request(f"{one}{path}")
        assert reply.status == 200
        assert_not_leaked(reply)
    assert client.get(f"{one}/checkpoints") == {"checkpoints": []}
    assert client.get(f"{one}/log") == {"files": []}
    assert client.get(f"{one}/config")["text"] is None
    files.ranks.rename(folder / "ranks-before")
    files.ranks.symlink_to(outside.ranks)
    (outside.ranks / "rank-0.err").write_text(SECRET)
    assert client.get(f"{one}/log") == {"files": []}


def is_refused(request: Callable[[], Reply]) -> bool:
    """By an answer, or a connection that is closed while the client still sends, which may lose the answer."""
    try:
        return request().status == 413
    except (ConnectionError, IncompleteRead):
        return True


def test_a_long_request_is_refused_before_it_is_read(client: Client, files: RunFiles, asked: list[str]) -> None:
    path = f"/api/runs/{files.root.name}/stop"
    body = b"{" + b" " * 10_000_000 + b"}"
    assert is_refused(lambda: client.post(path, body))
    assert is_refused(lambda: client.request("/api/runs", "GET", body))
    assert client.post(path, b"{}", **{"Content-Length": "-1"}).status == 400
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    assert is_refused(lambda: client.post(path, chunked, **headers))
    assert client.post(path, b"{" + b" " * MAX_BODY_BYTES + b"}").status == 413
    with pytest.raises((ConnectionError, AssertionError)):
        client.get("/api/runs?x=" + "a" * 10_000_000)
    assert asked == []
    assert client.get("/api/runs")["runs"]


def test_two_hundred_slow_clients(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 1.0)
    with served(files.root.parent) as client, ExitStack() as stack:
        request = f"GET /api/runs HTTP/1.1\r\nHost: {client.host}\r\nAuthorization: Bearer {client.server.token}\r\n"
        slow = []
        for i in range(200):
            connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", client.server.port))))
            connection.sendall(request.encode()[: 1 + i % len(request)])
            slow.append(connection)
        # Others are served meanwhile.
        assert client.get("/api/runs")["runs"]
        for connection in slow:
            connection.settimeout(60)
            assert connection.recv(1) == b"", "closed by the server"
        assert client.get("/api/runs")["runs"]


def test_clients_that_do_not_read_hold_up_nobody_and_are_disconnected(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "UNREAD_TIMEOUT_S", 0.5)
    with files.metrics.open("a") as file:
        file.writelines(f"{json.dumps(row(step))}\n" for step in range(21, 5000))
    with served(files.root.parent) as client, ExitStack() as stack:
        assert client.get("/api/runs")["runs"]
        before = num_open_files()
        for i in range(20):
            path = "stream?metrics=0&run=" if i % 2 else "runs/"
            query = f"GET /api/{path}{files.root.name}{'' if i % 2 else '/metrics?points=20000'} HTTP/1.1\r\n"
            request = f"{query}Host: {client.host}\r\nAuthorization: Bearer {client.server.token}\r\n\r\n".encode()
            connection = stack.enter_context(closing(socket.socket()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", client.server.port))
            connection.sendall(request)
        assert client.get("/api/runs")["runs"]
        wait_until(lambda: num_open_files() <= before + 20 + 2)  # the clients' own


def test_names_made_of_html_are_data(client: Client, files: RunFiles) -> None:
    hostile = {"__proto__": 1.0, "constructor": {"prototype": 2.0}, HTML_NAME: 3.0, "</script>": 4.0}
    odd = make_run(files.root.parent, "odd", [row(1, **hostile)], minutes=5)
    odd.root.rename(odd.root.parent / HTML_NAME)
    run = client.get("/api/runs")["runs"][0]
    assert run["name"] == HTML_NAME
    assert quote(run["id"], safe="~") == run["id"]
    reply = client.request(f"/api/runs/{run['id']}/metrics")
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    values = {each["name"]: each["values"] for each in reply.json["series"]}
    assert values["__proto__"] == [1.0]
    assert values["constructor/prototype"] == [2.0]
    assert values[HTML_NAME] == [3.0]
    missing = client.request(f"/api/runs/{quote(HTML_NAME)}")
    assert (missing.status, missing.headers["content-type"]) == (404, "application/json; charset=utf-8")
    lines = client.request("/metrics").body.decode().splitlines()
    escaped = HTML_NAME.replace('"', '\\"')
    assert f'paceline_step{{run="{escaped}"}} 1' in lines


def test_names_that_are_not_text(client: Client, files: RunFiles) -> None:
    odd = make_run(files.root.parent, "odd", minutes=5).root
    odd.rename(odd.with_name(os.fsdecode(b"\xff\xfe\n\x1b[2J")))
    run = client.get("/api/runs")["runs"][0]
    assert client.get(f"/api/runs/{run['id']}")["step"] == 20


def test_training_goes_on_undisturbed(client: Client, files: RunFiles, asked: list[str]) -> None:
    """A writer of metrics beside hostile requests of all kinds: every line arrives, and nobody asks it for anything."""
    done, written = Event(), []

    def write() -> None:
        with files.metrics.open("a", buffering=1) as file:
            for step in range(21, 2021):
                file.write(f"{json.dumps(row(step))}\n")
                written.append(step)
        done.set()

    thread = Thread(target=write)
    thread.start()
    attacks: list[dict[str, Any]] = [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Authorization": None},
    ]
    num_refused = 0
    while not done.is_set() or num_refused < 30:
        for attack in attacks:
            num_refused += client.request(f"/api/runs/{files.root.name}/metrics", **attack).status in (401, 403)
    thread.join()
    wait_until(lambda: client.get(f"/api/runs/{files.root.name}")["step"] == 2020)
    assert len(written) == 2000
    assert asked == []


def test_sockets_are_not_left_open(client: Client) -> None:
    client.get("/api/runs")  # the server is up
    before = num_open_files()
    for _ in range(20):
        with closing(socket.create_connection(("127.0.0.1", client.server.port))) as connection:
            # Closed with a reset in the middle of a request.
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: num_open_files() <= before + 2)


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
