"""Workers that die are started again and go on from the newest state, as long as that gains anything."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
from disturbed import Disturbed, end, wait_until, workers_of
from resumable import NUM_STEPS, run, setup, snapshots_of, step

import paceline as pl
from paceline.checkpoint.folders import complete_steps


def last_due(step: int, every: int) -> int:
    """The last step before this one that was to be saved; 0 if none was."""
    return (step - 1) // every * every if every else 0


def wait_for_checkpoint(root: Path, step: int) -> None:
    while step and not (root / f"step-{step:08d}").exists():
        time.sleep(0.01)


def wait_for_snapshot(root: Path, step: int) -> None:
    while step and f"step-{step:08d}" not in [path.name for path in snapshots_of(root)]:
        time.sleep(0.01)


def job(root: Path, dies_at: dict[int, int], **settings: object) -> Callable[[], tuple[str, list[str]]]:
    """Train to the end; in the n-th start rank 1 (or 0, if alone) kills itself after step dies_at[n], once what was to
    be saved before that is on the disk.

    The result: a digest, and what each start was resumed from.
    """

    every = int(settings.get("every_steps", 0))
    snapshot_every = int(settings.get("snapshot_every", 0))

    def main() -> tuple[str, list[str]]:
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with setup(root, **settings) as trainer:
            if trainer.is_main:
                with (root.parent / "starts").open("a") as file:
                    file.write(f"{trainer.resumed_from}\n")

            def die(record: pl.StepRecord) -> None:
                if record.step == dies_at.get(start) and trainer.world.rank == trainer.world.size - 1:
                    wait_for_checkpoint(root, last_due(record.step, every))
                    wait_for_snapshot(root, last_due(record.step, snapshot_every))
                    os.kill(os.getpid(), signal.SIGKILL)

            trainer.every(1, die)
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    step(trainer, batch)
            weights = trainer.model.state_dict()
            return digest_of(weights), (root.parent / "starts").read_text().splitlines()

    def digest_of(weights: dict[str, object]) -> str:
        from models import digest

        return digest(weights)

    return main


def undisturbed(folder: Path) -> str:
    folder.mkdir()
    return job(folder / "run", {})()[0]


@pytest.mark.soak
def test_a_dead_worker_leads_to_a_restart_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    digest, starts = pl.launch(job(root, {0: 5}, every_steps=2), 1, max_restarts=1)
    assert digest == undisturbed(tmp_path / "other")
    assert starts == ["None", f"{root}/step-00000004"]


def test_a_restart_goes_on_from_memory_and_leaves_nothing_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    digest, starts = pl.launch(job(root, {0: 7, 1: 8}, snapshot_every=1), 2, max_restarts=2)
    assert digest == undisturbed(tmp_path / "other")
    # The snapshot of the step before the death is complete; whether that step's own is depends on the instant.
    assert [Path(start).parent.parent for start in starts[1:]] == [Path("/dev/shm")] * 2
    assert all(int(Path(start).name[-2:]) >= step for start, step in zip(starts[1:], [6, 7], strict=True))
    assert complete_steps(root) == [NUM_STEPS]
    assert not snapshots_of(root)
    err = capfd.readouterr().err
    assert "paceline: restart 1: rank 1 was killed by SIGKILL" in err
    assert "paceline: restart 2: " in err


def leave_a_snapshot(root: Path, at: int) -> None:
    with pytest.raises(ArithmeticError), setup(root, snapshot_every=1) as trainer:
        for batch in next(trainer.epochs(1)):
            if trainer.position.step == at:
                raise ArithmeticError
            step(trainer, batch)
    assert [path.name for path in snapshots_of(root)] == [f"step-{at:08d}"]


def test_a_run_that_ends_where_its_snapshot_was_taken_saves_that_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    leave_a_snapshot(root, 5)
    with setup(root, snapshot_every=1) as trainer:
        assert trainer.position.step == 5
    assert not snapshots_of(root)
    assert complete_steps(root) == [5]


def test_a_save_before_the_first_step_has_the_random_states_that_were_resumed(tmp_path: Path) -> None:
    """And so has the step after it."""
    root = tmp_path / "run"
    random.seed(1)
    leave_a_snapshot(root, 5)
    expected = random.random()
    for _ in range(2):
        random.seed(2)
        with setup(root, snapshot_every=1) as trainer:
            trainer.save()
            assert random.random() == expected


def test_restarts_are_counted_and_go_not_back_to_where_the_first_start_was_told_to_begin(tmp_path: Path) -> None:
    run(tmp_path / "old", 3)
    root, first = tmp_path / "run", tmp_path / "old" / "step-00000003"
    main = job(root, {0: 8, 1: 12}, snapshot_every=1, resume=first, skip=["average"])
    with pytest.raises(pl.errors.WorkerError, match="rank 0 was killed by SIGKILL"):
        pl.launch(main, 1, max_restarts=1)
    told, restarted = (tmp_path / "starts").read_text().splitlines()
    assert told == str(first)
    assert Path(restarted) in {path.parent / f"step-0000000{step}" for path in snapshots_of(root) for step in (6, 7)}
    # What the run left in memory is not found by one that begins after its folder was deleted.
    rmtree(root)
    with setup(root, snapshot_every=1) as trainer:
        assert trainer.resumed_from is None
    assert not snapshots_of(root)


def test_a_restart_without_progress_since_the_last_is_the_last(tmp_path: Path) -> None:
    root = tmp_path / "run"
    main = job(root, dict.fromkeys(range(100), 5), every_steps=2)
    with pytest.raises(pl.errors.WorkerError) as caught:
        pl.launch(main, 1, max_restarts=50)
    assert "NoProgressError: the workers were restarted at step 4 and died before a newer one was saved" in str(
        caught.value
    )
    # The first start, the one restart that nothing speaks against, and the one that finds nothing was gained.
    assert (tmp_path / "starts").read_text().splitlines() == ["None", f"{root}/step-00000004"]


def test_the_first_restart_of_every_launch_is_unconditional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives launches the same name, unless the user does."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    for restart in (1, 1, 2):
        for name, value in {**environment, "TORCHELASTIC_RESTART_COUNT": str(restart)}.items():
            monkeypatch.setenv(name, value)
        if restart == 1:
            setup(tmp_path / "run").close()
        else:
            with pytest.raises(pl.errors.NoProgressError, match="the workers were restarted at step 0"):
                setup(tmp_path / "run")


@pytest.mark.timeout(300)
def test_torchrun_restarts_the_group_and_passes_a_signal_on(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    disturbed = Disturbed(killed, pause_s=0.05, every_steps=1)
    torchrun = disturbed.start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
        *("--log-dir", str(tmp_path / "logs")),
    )
    wait_until(lambda: disturbed.step >= 4, torchrun)
    first, second = workers_of(torchrun)
    second.kill()
    # The group goes on from its newest checkpoint, in new processes.
    wait_until(lambda: len(found := workers_of(torchrun)) == 2 and first not in found, torchrun)
    before = disturbed.step
    wait_until(lambda: disturbed.step > before + 2, torchrun)
    torchrun.terminate()
    _, err = end(torchrun)
    (stopped,) = re.findall(r"paceline: stopped after step (\d+), saved as", err)
    assert complete_steps(disturbed.root)[-1] == int(stopped) > before
    assert disturbed.digest is None
    assert disturbed.run_here() == Disturbed(alone).run_here()


@pytest.mark.parametrize("max_restarts", [-1, 1.5, True])
def test_a_bad_number_of_restarts_is_named(max_restarts: object) -> None:
    with pytest.raises(ValueError, match=f"max_restarts={max_restarts!r}: choose an integer >= 0"):
        pl.launch(print, 2, max_restarts=max_restarts)  # type: ignore[arg-type]
