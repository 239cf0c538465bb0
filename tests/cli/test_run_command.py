"""`paceline run`: scripts run as with python, output goes to one file per rank, errors are reported once."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import wait_until

import paceline as pl
from paceline import __version__
from paceline.cli.main import main
from paceline.run.launching.output import Follower

SCRIPT = """
    import os
    import pathlib
    import signal
    import sys
    import time

    import beside  # found because python puts the script's folder on the path

    rank, start = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    print(__name__, rank, start, sys.argv[1:], os.path.dirname(__file__) == sys.path[0], "\\u00fc")
    print("err of", rank, start, file=sys.stderr)
    sys.stdout.flush()
    os.system(f"echo a child of rank {rank}")
    pathlib.Path(__file__).with_name(f"up-{rank}-{start}").touch()
    if "exit" in sys.argv:
        sys.exit(3)
    while rank == "1" and not pathlib.Path(__file__).with_name(f"up-0-{start}").exists():
        time.sleep(0.01)  # a failure of rank 1 ends rank 0, which may not have printed everything
    if "fail" in sys.argv and rank in (None, "1") and start != "0":
        raise ValueError("bad sample 7")  # the user's line
    if "fail" in sys.argv and rank == "1":
        os.write(2, b"last words\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if "fail" in sys.argv and start == "0":
        signal.pause()
    if "wait" in sys.argv:
        time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").touch()
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Unbuffered workers would write the parts of their lines one by one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=100, check=False
    )


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        outputs.append(capsys.readouterr().out)
    assert "run a script on all devices" in outputs[0]
    assert "paceline run --workers 2 --logs logs train.py" in outputs[1]
    assert outputs[2] == f"paceline {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.py"], "paceline run: no such file: nowhere.py"),
        (["run", "--workers", "0", "x.py"], "paceline run: argument --workers: '0': choose an integer >= 1"),
        (["run", "--workers", "two", "x.py"], "paceline run: argument --workers: 'two': choose an integer >= 1"),
        (["run"], "paceline run: the following arguments are required: SCRIPT\n"),
        (["walk"], "paceline: argument COMMAND: invalid choice: 'walk'"),
        (["runs", "--live"], "paceline runs: unrecognized arguments: --live"),
        (["train", "c.yaml", "--lr", "1"], "paceline train: unrecognized arguments: --lr"),
        (["train", "c.yaml", "--workers", "0"], "paceline train: argument --workers: '0': choose an integer >= 1"),
    ],
)
def test_invalid_command_line_prints_one_line_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.index("\n") == len(err) - 1


@pytest.mark.parametrize(("arguments", "command"), [([], "train"), (["runs"], "status")])
def test_without_a_command_prints_the_commands_and_returns_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], command: str
) -> None:
    assert main(arguments) == 2
    assert f"\n    {command}  " in capsys.readouterr().err


def test_wrong_number_of_workers_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--workers", "3", str(script)])
    assert ended.value.code == 2
    assert "num_workers=3" in capsys.readouterr().err


def test_one_worker_behaves_like_python(script: Path) -> None:
    ended = run("run", "--workers", 1, script, "--workers", 9, "exit")
    assert (ended.returncode, ended.stderr) == (3, "err of None None\n")
    assert ended.stdout == "__main__ None None ['--workers', '9', 'exit'] True ü\na child of rank None\n"
    ours = run("run", "--workers", 1, script, "fail")
    pythons = subprocess.run([sys.executable, str(script), "fail"], capture_output=True, text=True, check=False)
    assert ours.returncode == pythons.returncode == 1
    assert ours.stderr == pythons.stderr


def test_output_files_per_rank_across_a_restart_and_one_error_message(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    ended = run("run", "--workers", 2, "--logs", logs, "--max-restarts", 1, script, "fail")
    assert ended.returncode == 1
    for rank in (0, 1):
        assert (logs / f"rank-{rank}.out").read_text().splitlines() == [
            f"__main__ {rank} 0 ['fail'] True ü",
            f"a child of rank {rank}",
            f"__main__ {rank} 1 ['fail'] True ü",
            f"a child of rank {rank}",
        ]
    assert ended.stdout == (logs / "rank-0.out").read_text()  # rank 0's output is shown too
    first, second = (logs / "rank-1.err").read_text().split("\n---")
    assert first == "err of 1 0\nlast words\n"  # every line of a killed rank
    assert second.endswith(": start 2\nerr of 1 1\n")
    assert "paceline: restart 1: rank 1 was killed by SIGKILL" in ended.stderr
    shown, _, failure = ended.stderr.partition("paceline run: ")
    assert shown.count("err of 0") == 2
    assert [line for line in failure.splitlines() if line.strip(" ^")] == [
        "rank 1 failed: ValueError: bad sample 7",
        "Traceback (most recent call last):",
        f'  File "{script}", line 21, in <module>',
        '    raise ValueError("bad sample 7")  # the user\'s line',
        "ValueError: bad sample 7",
        f"the output of rank 1 is in {logs}/rank-1.err",
    ]


def test_ctrl_c_exits_with_130_without_a_message(script: Path) -> None:
    launcher = subprocess.Popen(
        command("run", "--workers", 2, script, "wait"),
        cwd=script.parent,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: all((script.parent / f"up-{rank}-0").exists() for rank in (0, 1)))
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 130
    assert sorted(err.splitlines()) == ["err of 0 0", "err of 1 0"]  # the workers' own lines, nothing else


def test_launch_writes_the_output_of_a_single_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        print("from the worker")
        return os.getpid()

    (tmp_path / "rank-0.out").write_text("of an earlier run\n")
    assert pl.launch(work, 1, logs=tmp_path) != os.getpid()
    assert (tmp_path / "rank-0.out").read_text() == "of an earlier run\nfrom the worker\n"
    assert capsys.readouterr() == ("from the worker\n", "")


def test_split_utf8_sequences_are_joined(tmp_path: Path) -> None:
    stream = io.StringIO()
    with (tmp_path / "file").open("wb", buffering=0) as writer, (tmp_path / "file").open("rb") as reader:
        followed = Follower(reader, stream)
        for piece in (b"\xc3", b"\xbc\xff half a line"):
            writer.write(piece)
            followed.copy()
    assert stream.getvalue() == "ü\ufffd half a line"


def test_logs_folder_that_is_a_file_exits_with_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--logs", str(script), str(script)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f": logs='{script}' is not a folder: choose a folder, or a new name\n")


def test_logs_folder_that_cannot_be_created_exits_with_2(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--logs", "/proc/x/logs", str(script)])
    assert ended.value.code == 2
    expected = "paceline run: --logs /proc/x/logs cannot be created: No such file or directory\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("options", [["--logs", "logs"], ["--nodes", "2", "--address", "a:1"]])
def test_worker_cannot_launch_workers(
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
def test_invalid_node_options_exit_with_2(
    options: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options, str(script)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_node_prints_one_message_and_exits_with_1(
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
    assert warning.startswith(f"paceline: this run has no secret: any process that can reach {address} can join")
    assert message.startswith(f"paceline run: 1 of 2 nodes joined at {address} within join_timeout=1 s: ")
    assert "(127.0.0.1). Start the same command on the others, with the same" in message
