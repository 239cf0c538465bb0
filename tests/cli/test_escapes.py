"""Control characters in files are printed as escapes, by every command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.observe.formats import one_line, printable

EVIL = "\x1b]0;owned\x07\x1b[31mred\r\x9b2J\u202e"
STATUS = {
    "state": "failed",
    "pid": 1,
    "process_started": None,
    "host": f"host{EVIL}",
    "started": 1.7e9,
    "num_starts": 1,
    "total_steps": 9,
    "ended": 1.7e9,
    "reason": f"ValueError: {EVIL}",
}


def make_run(runs: Path, name: str) -> Path:
    run = runs / name
    (run / "timeline").mkdir(parents=True)
    lines = [{"step": step, "loss": 1.0 / step, "eval": {f"acc{EVIL}": 0.5}, f"x{EVIL}": 1} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run / "status.json").write_text(json.dumps(STATUS))
    session = {"version": 1, "rank": 0, "size": 1, "host": EVIL, "device": EVIL, "pid": 1, "unix_time": 1.7e9}
    event = {"events": [["fault", 1, 5, {"error": EVIL, "text": EVIL}]], "steps": [[1, 0, 1, 1, 1, 1, 1]], "end": 9}
    (run / "timeline" / "rank-0.jsonl").write_text(f"{json.dumps({'session': session})}\n{json.dumps(event)}\n")
    return run


COMMANDS = [
    "logs list RUNS",
    "logs summary RUN",
    "logs summary RUN --format json",
    "logs summary RUN --format md",
    "logs summary RUN --format one-line",
    "logs plot RUN",
    "logs plot RUN --metrics eval",
    "logs plot RUN --metrics nosuch",
    "logs plot RUN --compare nosuch",
    "runs status RUN",
    "runs status RUN --json",
    "runs save RUN",
    "runs stop RUN",
    "runs abort RUN -y",
    "timeline RUN",
    "timeline RUN --format json",
    "timeline RUN --format csv",
    "checkpoints list RUN",
    "checkpoints verify RUN",
]


# Names of folders are untrusted text as well, and need not be UTF-8.
NAMES = {"controls": f"run{EVIL}".encode(), "not utf-8": b"run\xff\xfe", "a line": b"run\nstate  finished"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_control_characters_never_reach_the_terminal(
    command: str, name: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    runs = tmp_path / "runs"
    run = make_run(runs, os.fsdecode(NAMES[name]))
    words = [{"RUNS": str(runs), "RUN": str(run)}.get(word, word) for word in command.split()]
    code = main([*words, "--runs", str(runs)] if "checkpoints" not in command and "list" not in command else words)
    captured = capfdbinary.readouterr()
    assert code in (0, 1, 2, 3)
    for output in (captured.out, captured.err):
        shown = output.decode()  # must be valid UTF-8
        assert shown == printable(shown)
        if command.startswith(("logs list", "logs summary", "runs status")):  # a name cannot fake a row of a table
            assert "\nstate  finished" not in shown
        assert b"Traceback" not in output
    if "json" in command and code in (0, 3):
        json.loads(captured.out)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31m", "a\\x1b[31m"),
        ("a\x9b\x7f", "a\\u009b\\u007f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("é \U0001f600 日本\n\tx", "é \U0001f600 日本\n\tx"),
        (os.fsdecode(b"\xff"), "\\udcff"),
    ],
)
def test_printable_escapes_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert "\n" not in one_line(text)
