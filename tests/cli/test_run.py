from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline import __version__
from paceline.cli.main import main

SCRIPT = """
    import os
    import sys

    import beside  # found because python puts the script's folder on the path

    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        print(__name__, rank, sys.argv[1:], os.path.dirname(__file__) == sys.path[0], flush=True)
    if "fail" in sys.argv and rank in (None, "1"):
        raise ValueError("bad sample 7")  # the user's line
    if "exit" in sys.argv:
        sys.exit(3)
    if "wait" in sys.argv:
        import pathlib, time
        pathlib.Path(f"up-{rank}").touch()
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


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)


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
        ([], "paceline: the following arguments are required: COMMAND"),
    ],
)
def test_a_bad_command_line_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.index("\n") == len(err) - 1


def test_a_number_that_is_not_the_worlds_is_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--workers", "3", str(script)])
    assert ended.value.code == 2
    assert "num_workers=3" in capsys.readouterr().err


def test_one_worker_is_like_python(script: Path) -> None:
    ended = run("run", "--workers", 1, script, "--workers", 9, "exit")
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "__main__ None ['--workers', '9', 'exit'] True\n"

    ours, pythons = (
        run("run", "--workers", 1, script, "fail"),
        subprocess.run([sys.executable, str(script), "fail"], capture_output=True, text=True),
    )
    assert ours.returncode == pythons.returncode == 1
    assert ours.stderr == pythons.stderr


def test_two_workers_run_the_script_and_its_error_is_printed_once(script: Path) -> None:
    ended = run("run", "--workers", 2, script, "--lr", 3, "fail")
    assert ended.returncode == 1
    assert ended.stdout == "__main__ 0 ['--lr', '3', 'fail'] True\n"
    assert [line for line in ended.stderr.splitlines() if line.strip(" ^")] == [
        "paceline run: rank 1 failed: ValueError: bad sample 7",
        "Traceback (most recent call last):",
        f'  File "{script}", line 11, in <module>',
        '    raise ValueError("bad sample 7")  # the user\'s line',
        "ValueError: bad sample 7",
    ]


def test_ctrl_c_is_code_130_and_silent(script: Path) -> None:
    launcher = subprocess.Popen(
        command("run", "--workers", 2, script, "wait"),
        cwd=script.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not all((script.parent / f"up-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=10)
    finally:
        launcher.kill()
    assert (launcher.returncode, err) == (130, "")
