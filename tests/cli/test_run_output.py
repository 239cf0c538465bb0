"""`paceline run --logs`: what each rank writes is in files of its own, whole also when the rank dies."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import paceline as pl
from paceline.cli.main import main
from paceline.run.launching.output import Follower

SCRIPT = """
    import os, signal, sys

    rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("out of", rank, "start", start, "\\u00fc")
    print("err of", rank, "start", start, file=sys.stderr)
    os.system("echo a child of rank " + rank)
    if rank == "1" and "die" in sys.argv and start == "0":
        os.write(2, b"last words\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "1" and "fail" in sys.argv:
        raise ValueError("bad sample 7")
    if "die" in sys.argv and start == "0":
        signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_each_rank_has_its_files_and_rank_0_is_shown_too(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    ended = run("--workers", 2, "--logs", logs, script, "fail")
    assert ended.returncode == 1
    assert ended.stdout == (logs / "rank-0.out").read_text() == "out of 0 start 0 ü\na child of rank 0\n"
    assert (logs / "rank-0.err").read_text() == "err of 0 start 0\n"
    assert (logs / "rank-1.out").read_text() == "out of 1 start 0 ü\na child of rank 1\n"
    assert (logs / "rank-1.err").read_text() == "err of 1 start 0\n"
    shown_first, _, failure = ended.stderr.partition("paceline run: ")
    assert shown_first == "err of 0 start 0\n"
    assert failure.startswith("rank 1 failed: ValueError: bad sample 7\n\nTraceback")
    assert failure.endswith(f"\n\nthe output of rank 1 is in {logs}/rank-1.err\n")


def test_a_restart_appends_and_a_killed_rank_leaves_every_line(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ended = run("--workers", 2, "--logs", logs, "--max-restarts", 1, script, "die")
    assert ended.returncode == 0, ended.stderr
    assert (logs / "rank-1.out").read_text().splitlines() == [
        "out of 1 start 0 ü", "a child of rank 1", "out of 1 start 1 ü", "a child of rank 1",
    ]  # fmt: skip
    first, second = (logs / "rank-1.err").read_text().split("\n---")
    assert first == "err of 1 start 0\nlast words\n"
    assert second.endswith(": start 2\nerr of 1 start 1\n")
    assert ended.stdout == (logs / "rank-0.out").read_text()
    assert "paceline: restart 1: rank 1 was killed by SIGKILL" in ended.stderr


def test_launch_writes_the_output_of_a_single_worker_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        print("from the worker")
        return os.getpid()

    (tmp_path / "rank-0.out").write_text("of an earlier run\n")
    assert pl.launch(work, 1, logs=tmp_path) != os.getpid()
    assert (tmp_path / "rank-0.out").read_text() == "of an earlier run\nfrom the worker\n"
    assert capsys.readouterr() == ("from the worker\n", "")


def test_characters_that_arrive_in_pieces_are_shown_whole(tmp_path: Path) -> None:
    stream = io.StringIO()
    with (tmp_path / "file").open("wb", buffering=0) as writer, (tmp_path / "file").open("rb") as reader:
        followed = Follower(reader, stream)
        for piece in (b"\xc3", b"\xbc\xff half a line"):
            writer.write(piece)
            followed.copy()
    assert stream.getvalue() == "ü\ufffd half a line"


def test_a_folder_that_is_a_file_is_code_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--logs", str(script), str(script)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f": logs='{script}' is not a folder: choose a folder, or a new name\n")


@pytest.mark.parametrize("options", [["--logs", "logs"], ["--nodes", "2", "--address", "a:1"]])
def test_a_worker_starts_no_others(
    options: list[str], script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, str(script)])
    assert ended.value.code == 2
    assert "already is a worker: omit them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2"], "nodes=2 requires an address"),
        (["--address", "a:1"], "address='a:1' requires several nodes"),
        (["--nodes", "0"], "argument --nodes: '0': choose an integer >= 1"),
        (["--nodes", "2", "--address", "a"], "address='a': choose HOST:PORT"),
    ],
)
def test_bad_options_for_nodes_are_code_2(
    options: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, str(script)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_node_is_one_message_and_code_1(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--workers", "1", "--nodes", "2", "--address", address, "--join-timeout", "1"]
    assert main(["run", *options, str(script)]) == 1
    error = capsys.readouterr().err
    warning, message = error.splitlines()
    assert warning.startswith(f"paceline: this run has no secret: anyone who can reach {address} can join")
    assert message.startswith(f"paceline run: 1 of 2 nodes joined at {address} within join_timeout=1 s: ")
    assert "(127.0.0.1). Start the same command on the others, with the same" in message
