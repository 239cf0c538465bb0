"""Several trainers in one process: one after another, nested, closed in any order, after one that failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import preloaded_python
import pytest
from worker_pool import WorkerPool

import paceline as pl

TESTS = Path(__file__).parents[2]

# Prints one line: the number of trainers, and one digest for all of them if they agree.
SCRIPT = """
import many_trainers
many_trainers.main()
"""

LAUNCHERS = {
    "paceline": ("-m", "paceline", "run", "--workers"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("launcher", [pytest.param("paceline", marks=pytest.mark.soak), "torchrun"])
def test_any_number_of_trainers_in_any_order(launcher: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    logs = ("--log-dir", str(tmp_path / "logs")) if launcher == "torchrun" else ()
    ended = preloaded_python.run(
        [sys.executable, *LAUNCHERS[launcher], str(size), *logs, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "run", Path(__file__).parent)))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("trainers: ")]
    import many_trainers

    assert (
        line == f"trainers: {many_trainers.count(many_trainers.SHORT_ORDERS)} digests: {[many_trainers.digest_alone()]}"
    )


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_any_number_of_trainers_in_a_launched_function(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import many_trainers

    orders = many_trainers.SHORT_ORDERS if size < 3 else many_trainers.ALL_ORDERS
    assert pl.launch(many_trainers.all_digests, size, args=(orders,)) == {many_trainers.digest_alone()}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_any_number_of_trainers_beside_the_users_group(
    size: int, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import many_trainers

    assert pool.run(many_trainers.all_digests, size) == [{many_trainers.digest_alone()}] * size
