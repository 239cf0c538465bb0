"""Snapshots lie where every user can make folders: only this user's own count, and only where they were asked for."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from resumable import build, run, setup, snapshots_of, step
from torch import nn
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.checkpoint.run_folder import IDENTIFIER_NAME, memory_folder

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that was stopped after four steps."""
    run(tmp_path / "run", 4)
    return tmp_path / "run"


def memory_of(root: Path) -> Path:
    return memory_folder(root, (root / IDENTIFIER_NAME).read_text().strip())


def with_other_weights() -> nn.Module:
    model = build()
    nn.init.zeros_(model[0].weight)
    return model


@pytest.fixture
def planted(root: Path, tmp_path: Path) -> Iterator[Path]:
    """A snapshot of a later step with other weights, where the run's snapshots would lie, made by another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    run(tmp_path / "attack", 9, model=with_other_weights)
    folder = memory_of(root)
    shutil.copytree(tmp_path / "attack" / "step-00000009", folder / "step-00000009")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_planted_snapshot_is_ignored_where_none_are_asked_for(
    root: Path, planted: Path, pool: WorkerPool, num_workers: int
) -> None:
    def main() -> str:
        return run(root, 6)

    assert set(pool.run(main, num_workers)) == {run(None, 6)}
    assert (planted / "step-00000009").exists()


def test_a_planted_folder_is_named_where_no_snapshots_are_asked_for(
    root: Path, planted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup(root, skip=["average"]).close()
    assert f"{planted} is not used: it belongs to user {NOBODY}" in caplog.text


@pytest.mark.parametrize("num_workers", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_planted_folder_is_refused_where_snapshots_are_asked_for(
    root: Path, planted: Path, pool: WorkerPool, num_workers: int
) -> None:
    def main() -> None:
        setup(root, skip=["average"], snapshot_every=1)

    with pytest.raises(WorkersFailed) as caught:
        pool.run(main, num_workers)
    assert set(caught.value.errors) == set(range(num_workers))
    for error in caught.value.errors.values():
        assert isinstance(error, pl.errors.CheckpointError)
        assert f"{planted} is not a private folder of this user: it belongs to user {NOBODY}" in str(error)
        assert "snapshot_every=None" in str(error)
    assert (planted / "step-00000009").exists()


def test_own_snapshots_are_closed_to_others_and_found_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train_on(**settings: object) -> Path | None:
        """One step; leave as after an error, so that the snapshots stay."""
        with pytest.raises(RuntimeError, match="enough"), setup(root, skip=["average"], **settings) as trainer:
            for batch in next(trainer.epochs(1)):
                if trainer.position.step > first + 1:
                    raise RuntimeError("enough")
                step(trainer, batch)
        return trainer.resumed_from

    first = 4
    assert train_on(snapshot_every=1, final=False) == root / "step-00000004"
    assert stat.S_IMODE(memory_of(root).stat().st_mode) == 0o700
    assert snapshots_of(root)
    first = int(snapshots_of(root)[-1].name[-2:])
    assert train_on(snapshot_every=1, final=False) == memory_of(root) / f"step-{first:08d}"
    # A run without snapshots goes on from the disk, and what lies in memory is older then than what it saves.
    first = 4
    assert train_on() == root / "step-00000004"
    assert not snapshots_of(root)
    assert f"snapshots in {memory_of(root)} are removed: snapshot_every=None" in caplog.text


def test_own_snapshots_that_others_could_write_are_refused(root: Path) -> None:
    memory_of(root).mkdir()
    try:
        memory_of(root).chmod(0o777)
        with pytest.raises(pl.errors.CheckpointError, match=r"others have access to it, its mode is 0777; remove it"):
            setup(root, skip=["average"], snapshot_every=1)
    finally:
        memory_of(root).rmdir()
