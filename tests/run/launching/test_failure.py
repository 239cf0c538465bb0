from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import WorkerError
from paceline.run.launching.failure import first_failure
from paceline.run.launching.worker import report_file, stack_file


def told(outcome: str, time_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "time_s": time_s, "summary": "E: e", "traceback": "T\n", "peers": {}, **more}


DONE = {"outcome": "done"}
SIGKILL, SIGSEGV, SIGTERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM

# reports by rank, exit codes by rank, ranks that the launcher killed -> start of the message, or None
TABLE = [
    ({0: DONE, 1: DONE}, {}, set(), None),
    ({0: told("failed"), 1: DONE}, {0: 1}, set(), "rank 0 failed: E: e\n\nT"),
    ({0: told("failed", 2.0), 1: told("failed", 1.0)}, {0: 1, 1: 1}, set(), "rank 1 failed: E: e"),
    ({0: told("communication", 1.0), 1: told("failed", 2.0)}, {0: 1, 1: 1}, set(), "rank 1 failed: E: e"),
    ({0: told("failed", 1.0)}, {0: 1, 1: SIGTERM}, set(), "rank 0 failed: E: e"),
    ({0: told("failed", 1.0)}, {1: SIGSEGV, 0: 1}, set(), "rank 0 failed: E: e"),
    ({0: told("communication")}, {0: 1, 1: SIGKILL}, set(), "rank 1 was killed by SIGKILL (out of memory?"),
    ({0: told("communication")}, {0: 1, 1: SIGKILL}, {1}, "rank 0 failed: E: e"),
    ({0: told("communication")}, {0: 1, 1: SIGTERM}, set(), "rank 0 failed: E: e"),
    ({0: told("communication", 2.0), 1: told("communication", 1.0)}, {0: 1, 1: 1}, set(), "rank 1 failed: E: e"),
    ({}, {1: SIGTERM, 0: SIGTERM}, set(), "rank 1 was killed by SIGTERM"),
    ({0: DONE}, {1: 7}, set(), "rank 1 exited with code 7"),
    ({0: DONE, 1: told("interrupted")}, {1: 1}, set(), KeyboardInterrupt),
    ({0: told("failed"), 1: told("interrupted")}, {0: 1, 1: 1}, set(), "rank 0 failed"),
]


@pytest.mark.parametrize(("reports", "exit_codes", "killed", "expected"), TABLE)
def test_which_failure_is_the_first(
    tmp_path: Path, reports: dict[int, Any], exit_codes: dict[int, int], killed: set[int], expected: Any
) -> None:
    for rank, report in reports.items():
        report_file(tmp_path, rank).write_text(json.dumps(report))
    error = first_failure(tmp_path, 2, exit_codes, killed)
    if isinstance(expected, str):
        assert isinstance(error, WorkerError)
        assert str(error).startswith(expected)
        assert error.rank == int(expected.split()[1])
    else:
        assert error is None if expected is None else isinstance(error, expected)


def test_a_death_beside_an_exception_is_mentioned(tmp_path: Path) -> None:
    report_file(tmp_path, 0).write_text(json.dumps(told("failed")))
    error = first_failure(tmp_path, 2, {1: SIGKILL, 0: 1}, set())
    assert str(error).startswith("rank 0 failed: E: e\n\nT\n\nrank 1 was killed by SIGKILL")


def test_stacks_are_shown_like_tracebacks_with_source_lines(tmp_path: Path) -> None:
    source = tmp_path / "user.py"
    source.write_text("def outer():\n    inner()\n")
    header = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    dump = (
        f'{header}  File "{source}", line 2 in outer\n  File "{source}", line 1 in <module>\n\nExtension modules: x\n'
    )
    stack_file(tmp_path, 1).write_text(dump)
    error = first_failure(tmp_path, 2, {1: SIGSEGV}, set())
    assert isinstance(error, WorkerError)
    assert error.traceback_text == (
        f'  File "{source}", line 1, in <module>\n    def outer():\n  File "{source}", line 2, in outer\n    inner()'
    )
    assert (
        str(error) == f"rank 1 was killed by SIGSEGV (a crash in native code)\n\nit stood at:\n{error.traceback_text}"
    )
