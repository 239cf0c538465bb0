"""The check that no test leaves anything behind: it finds a leak, and does not count what other programs make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
import session_shm

TESTS = Path(__file__).parents[1]

LEAKING = """
import os, time
from pathlib import Path

def test_meanwhile_others_make_files(request):
    folder = Path(os.environ["MEETING"])
    (folder / "begun").touch()
    while not (folder / "made").exists():
        time.sleep(0.01)

def test_leaks():
    Path("/dev/shm", os.environ["LEAK"]).touch()
"""


@pytest.mark.parametrize("shares_memory", [False, True])
def test_only_the_sessions_own_shared_memory_counts(tmp_path: Path, shares_memory: bool) -> None:
    """Also where the session cannot have a /dev/shm of its own, as without root's rights (here by a variable)."""
    if not shares_memory and os.geteuid() != 0:
        pytest.skip("a session has its own /dev/shm only as root")
    name = f"paceline-leak-check-{os.getpid()}"
    foreign, leaked = session_shm.SHARED_MEMORY / f"{name}-foreign", session_shm.SHARED_MEMORY / f"{name}-leaked"
    file = tmp_path / "test_leaking.py"
    file.write_text(LEAKING)
    variables = {"MEETING": str(tmp_path), "LEAK": leaked.name, "PYTHONPATH": str(TESTS)}
    if shares_memory:
        variables["PACELINE_TESTS_SHARE_SHM"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'base'}"]
    try:
        with subprocess.Popen(
            [*command, str(file)],
            cwd=tmp_path,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        ) as session:
            deadline = monotonic() + 60
            while not (tmp_path / "begun").exists():
                assert monotonic() < deadline
                sleep(0.02)
            with foreign.open("w"):  # held open, as by another session's workers
                (tmp_path / "made").touch()
                output, _ = session.communicate()
    finally:
        foreign.unlink(missing_ok=True)
        leaked.unlink(missing_ok=True)
    assert "2 passed, 1 error" in output, output
    assert f"test_leaks left behind: ['{leaked}']" in output
    assert foreign.name not in output
