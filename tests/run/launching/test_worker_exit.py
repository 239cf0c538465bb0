from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from paceline.run.launching import worker_exit
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure, worker_file

SIGKILL, SIGSEGV, SIGTERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM


def report(kind: str, rank: int, time_s: float = 0.0) -> WorkerExit:
    return WorkerExit(ExitKind(kind), rank, f"rank {rank} failed: E: e", "T\n", time_s=time_s)


def death(rank: int, exit_code: int, folder: Path = Path("absent")) -> WorkerExit:
    return WorkerExit.read(folder, rank, exit_code)


# the exits of a start -> start of the failure's message, or None
TABLE = [
    ([report("done", 0), report("done", 1)], None),
    ([report("failed", 0), report("done", 1)], "rank 0 failed: E: e"),
    ([report("failed", 0, 2.0), report("failed", 1, 1.0)], "rank 1 failed: E: e"),
    ([report("communication", 0, 1.0), report("failed", 1, 2.0)], "rank 1 failed: E: e"),
    ([report("failed", 0, 1.0), death(1, SIGTERM)], "rank 0 failed: E: e"),
    ([death(1, SIGSEGV), report("failed", 0, 1.0)], "rank 0 failed: E: e"),
    ([report("communication", 0), death(1, SIGKILL)], "rank 1 was killed by SIGKILL (out of memory?"),
    ([report("communication", 0), report("ended", 1)], "rank 0 failed: E: e"),
    ([report("communication", 0), death(1, SIGTERM)], "rank 0 failed: E: e"),
    ([report("communication", 0, 2.0), report("communication", 1, 1.0)], "rank 1 failed: E: e"),
    ([death(1, SIGTERM), death(0, SIGTERM)], "rank 1 was killed by SIGTERM"),
    ([report("done", 0), death(1, 7)], "rank 1 exited with code 7 before its work was done"),
    ([report("done", 0), report("interrupted", 1)], "rank 1 failed: E: e"),
    ([report("failed", 0), report("interrupted", 1)], "rank 0 failed"),
    ([report("ended", 0), report("ended", 1)], None),
]


@pytest.mark.parametrize(("exits", "expected"), TABLE)
def test_which_failure_is_the_cause(exits: list[WorkerExit], expected: str | None) -> None:
    failure = first_failure(exits)
    if expected is None:
        assert failure is None
    else:
        assert failure is not None
        assert failure.message.startswith(expected)
        assert failure.rank == int(expected.split()[1])


def test_a_death_beside_an_exception_is_mentioned() -> None:
    failure = first_failure([death(1, SIGKILL), report("failed", 0)])
    assert failure is not None
    assert failure.message.startswith("rank 0 failed: E: e\n\nrank 1 was killed by SIGKILL")


def test_a_worker_that_returned_early_is_named_by_those_who_miss_it() -> None:
    failure = first_failure([report("communication", 0, 2.0), report("done", 1, 1.0), report("done", 2, 3.0)])
    assert failure is not None
    assert failure.message.startswith("rank 0 failed: E: e\n\nrank 1 had ended before, without an error")
    assert "rank 2" not in failure.message


def test_a_report_is_read_back_and_counts_more_than_the_exit_code(tmp_path: Path) -> None:
    written = WorkerExit(ExitKind.STOPPED, 3, "text", "trace", step=7)
    written.write(tmp_path)
    assert WorkerExit.read(tmp_path, 3, 75) == written


def test_stacks_are_shown_like_tracebacks_with_source_lines(tmp_path: Path) -> None:
    source = tmp_path / "user.py"
    source.write_text("def outer():\n    inner()\n")
    header = "123\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    dump = (
        f'{header}  File "{source}", line 2 in outer\n  File "{source}", line 1 in <module>\n\nExtension modules: x\n'
    )
    worker_file(tmp_path, "stack", 1).write_text(dump)
    failure = death(1, SIGSEGV, tmp_path)
    assert failure.traceback_text == (
        f'  File "{source}", line 1, in <module>\n    def outer():\n  File "{source}", line 2, in outer\n    inner()'
    )
    crash = "rank 1 was killed by SIGSEGV (a crash in native code)"
    assert failure.message == f"{crash}\n\nits last Python stack:\n{failure.traceback_text}"


def test_a_full_disk_does_not_hide_how_a_worker_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start-0"
    worker_exit.reserve_space(start)
    [reserved] = start.iterdir()

    def replace_file(path: Path, content: bytes) -> None:
        if reserved.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(worker_exit, "replace_file", replace_file)
    ended = WorkerExit(ExitKind.DONE, 1)
    ended.write(start)
    assert WorkerExit.read(start, 1, 0) == ended
