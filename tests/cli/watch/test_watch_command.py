"""`paceline watch` from the command line: what it serves, prints and writes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from in_process import invoke
from made_runs import make_run, row

from paceline.cli.watch.command import NICENESS, tunnel_line
from paceline.cli.watch.export import PAGE, inline_page

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{32})")


@contextmanager
def watching(*arguments: object, **variables: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """The address, the token, and the process, which must end without a word to stderr."""
    command = [sys.executable, "-m", "paceline", "watch", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"} | variables
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        match = ADDRESS.fullmatch(process.stdout.readline().strip())
        assert match is not None
        yield match[1], match[2], process
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


def test_the_command_serves_a_folder_in_little_memory(runs: Path) -> None:
    make_run(runs)
    with watching("--port", 0, SSH_CONNECTION="10.0.0.1 5000 10.0.0.2 2222") as (address, token, process):
        with urlopen(f"{address}/api/runs?token={token}") as reply:
            assert len(json.load(reply)["runs"]) == 1
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= NICENESS, "runs go first"
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
        assert process.stdout is not None
        process.stdout.readline()
        port = address.rpartition(":")[2]
        assert f"ssh -N -L {port}:127.0.0.1:{port} -p 2222" in process.stdout.readline()
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in modules, "it takes more memory than all else"


def test_the_server_ends_while_a_page_follows_a_run(runs: Path) -> None:
    name = make_run(runs).root.name
    with ExitStack() as page, watching("--port", 0) as (address, token, _):
        stream = page.enter_context(urlopen(f"{address}/api/stream?run={name}&token={token}"))
        assert stream.readline() == b"retry: 1000\n"


def test_chosen_runs_only(runs: Path, tmp_path: Path) -> None:
    make_run(runs, "a")
    second, third = make_run(runs, "b", minutes=1), make_run(tmp_path / "elsewhere", "c", minutes=2)
    with watching("b", third.root, "--port", 0) as (address, token, _):
        reply = urlopen(f"{address}/api/runs?token={token}")
        with closing(reply):
            assert [run["name"] for run in json.load(reply)["runs"]] == [third.root.name, second.root.name]


def test_the_line_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    assert tunnel_line("10.0.0.1 5000 10.0.0.2 22", 8642) == "ssh -N -L 8642:127.0.0.1:8642 me@10.0.0.2"
    assert tunnel_line("", 8642) is None


def test_wrong_arguments(runs: Path, tmp_path: Path) -> None:
    make_run(runs)
    same = make_run(tmp_path / "elsewhere")
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in {
            ("--port", "99999"): "'99999': choose a port from 0 to 65535",
            ("--port", port): f"cannot listen on 127.0.0.1, port {port}: Address already in use: choose another --port",
            ("nothing",): "there is no run 'nothing' in runs",
            ("--runs", "missing"): "missing does not exist: choose the folder that holds your runs",
            (runs / same.root.name, same.root): f"two of the runs are named {same.root.name}",
            ("--host", "no.such.host.invalid"): "choose one of this machine",
            ("--host", "a..b"): "choose one of this machine",
            (
                "--host",
                "192.0.2.1",
            ): "cannot listen on 192.0.2.1: Cannot assign requested address: choose another --host",
            ("--export", "x.html", "--runs", "missing"): "missing does not exist",
            (tmp_path, "--export", "x.html"): f"there is no run in {tmp_path}",
            ("--export", "x.html", "--open"): "--open would be ignored with --export: leave it out",
        }.items():
            ended = invoke("watch", *arguments)
            assert ended.code in (1, 2)
            assert message in ended.err, ended.err


def test_missing_packages_are_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "paceline.cli.watch.server", raising=False)
    ended = invoke("watch", "--runs", runs)
    assert (ended.code, ended.err) == (1, "paceline watch: uvicorn is not installed: pip install 'paceline[watch]'\n")


def exported(path: Path) -> tuple[str, dict[str, object]]:
    """The page, and the answers in it by path."""
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="paceline-data">(.*?)</script>', text, re.DOTALL)
    found = json.loads(data)
    assert found["version"] == 1
    return text, dict(found["responses"])


def test_export_has_everything_in_one_file(runs: Path) -> None:
    make_run(runs, "a")
    rows = [row(step, **{"</script><b>": 1.0, "__proto__": 2.0}) for step in range(1, 9)]
    files = make_run(runs, "b", rows, minutes=1)
    (files.ranks / "rank-0.err").write_text("</script><script>alert(1)</script>\n")
    ended = invoke("watch", "--export", "run.html")
    assert (ended.code, ended.out) == (0, "run.html\n")
    text, answers = exported(Path("run.html"))
    one = f"/api/runs/{files.root.name}"
    kinds = ("metrics", "events", "log", "checkpoints", "config")
    assert set(answers) == {"/api/runs", one, *(f"{one}/{kind}" for kind in kinds)}
    assert answers["/api/runs"]["can_control"] is False  # type: ignore[index]
    assert {"</script><b>", "__proto__", "loss"} <= {each["name"] for each in answers[f"{one}/metrics"]["series"]}  # type: ignore[index]
    assert "<script>alert" not in text
    assert 'src="' not in re.sub(r'"data:[^"]*"', "", text)
    assert "default-src 'none'" in text
    invoke("watch", "a", "b", "--export", "both.html")
    assert "/api/compare" in exported(Path("both.html"))[1]


def test_the_page_of_an_export_is_small_and_complete() -> None:
    page = inline_page("{}")
    assert len(page.encode()) <= 300_000
    (imports,) = re.findall(r'<script type="importmap">(.*?)</script>', page)
    names = {name.removeprefix("page/") for name in json.loads(imports)["imports"]}
    assert names == {path.name for path in PAGE.iterdir() if path.name.endswith(".js")}, "every module is reached"
    assert page.count("<style>") == sum(path.name.endswith(".css") for path in PAGE.iterdir())
