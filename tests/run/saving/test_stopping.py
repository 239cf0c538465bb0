"""SIGTERM, SIGINT, SIGHUP: the step is finished, the run saved, the process left with exit code 75. Twice: at once."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import pytest
from disturbed import PACELINE_RUN, Disturbed, end, wait_until, workers_of
from resumable import setup, step
from worker_pool import WorkerPool

import paceline as pl
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.policy import Decision
from paceline.core.errors import CommunicationError
from paceline.run.membership.generation import Generation
from paceline.run.saving.stopping import StopSignals


def stopped(folder: Path, number: signal.Signals, *launcher: str) -> tuple[Disturbed, int, str]:
    """A run that got the signal, its exit code and its stderr."""
    run = Disturbed(folder, pause_s=0.05)
    process = run.start(*launcher)
    wait_until(lambda: run.step >= 2, process)
    process.send_signal(number)
    return run, *end(process)


def check_alone(folder: Path, number: signal.Signals) -> None:
    run, code, err = stopped(folder, number)
    (step,) = complete_steps(run.root)
    assert code == 75, err
    assert f"{number.name}: stopping after this step, which is saved if all workers complete it" in err
    assert "ended without saving" not in err
    assert f"paceline: stopped after step {step}, saved as {run.root}/step-{step:08d}" in err
    assert "Traceback" not in err
    assert run.step in (step, step - 1)
    assert run.digest is None


def check_launcher(folder: Path, number: signal.Signals) -> None:
    run, code, err = stopped(folder, number, *PACELINE_RUN)
    assert code == 75, err
    assert len(complete_steps(run.root)) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_alone_saves_and_leaves_with_code_75(tmp_path: Path, number: signal.Signals) -> None:
    check_alone(tmp_path, number)


def test_a_launcher_lets_its_workers_save(tmp_path: Path) -> None:
    check_launcher(tmp_path, signal.SIGINT)


@pytest.mark.soak
@pytest.mark.parametrize(("check", "number"), [(check_alone, signal.SIGINT), (check_launcher, signal.SIGTERM)])
def test_the_other_signal(
    tmp_path: Path, check: Callable[[Path, signal.Signals], None], number: signal.Signals
) -> None:
    check(tmp_path, number)


def test_a_signal_to_one_worker_stops_all_at_the_same_step(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, pause_s=0.05)
    launcher = run.start(*PACELINE_RUN, "--max-restarts", "3")
    wait_until(lambda: run.step >= 2, launcher)
    workers_of(launcher)[1].send_signal(signal.SIGTERM)
    code, err = end(launcher)
    assert code == 75, err
    assert "restart" not in err
    (step,) = complete_steps(run.root)
    assert {(tmp_path / "marks" / f"rank-{rank}").read_text() for rank in (0, 1)} == {str(step)}


@pytest.mark.parametrize("launcher", [(), PACELINE_RUN], ids=["alone", "launched"])
def test_a_stderr_without_a_reader_is_no_obstacle(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """As in `paceline run train.py 2>&1 | tee log`: Ctrl-C ends `tee` too. A closed terminal is similar."""
    run = Disturbed(tmp_path, pause_s=0.05)
    process = run.start(*launcher)
    wait_until(lambda: run.step >= 2, process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75
    process.stdout.close()
    assert len(complete_steps(run.root)) == 1


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP]])
def test_signals_to_all_processes_stop_the_run_once(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """As systemd sends them when a service is stopped, or a login session."""
    run = Disturbed(tmp_path, pause_s=0.05)
    launcher = run.start(*PACELINE_RUN)
    wait_until(lambda: run.step >= 2, launcher)
    family = psutil.Process(launcher.pid)
    processes = [*family.children(recursive=True), family]
    for number, process in product(numbers, processes):
        process.send_signal(number)
    code, err = end(launcher)
    assert code == 75, err
    assert len(complete_steps(run.root)) == 1


@pytest.mark.parametrize("whom", ["launcher", "worker"])
def test_a_stop_does_not_wait_for_a_worker_that_is_joining(tmp_path: Path, whom: str) -> None:
    run = Disturbed(tmp_path, pause_s=2.0)
    launcher = run.start(*PACELINE_RUN, "--min-workers", "1", "--max-restarts", "1")
    wait_until(lambda: run.step >= 1, launcher)
    survivor, victim = workers_of(launcher)
    victim.kill()

    def is_joining() -> bool:
        [path] = run.folder.glob("paceline-*/start-0/generation")
        return bool(Generation.from_json(path.read_text()).joined)

    wait_until(is_joining, launcher)
    os.kill(launcher.pid if whom == "launcher" else survivor.pid, signal.SIGTERM)
    code, err = end(launcher)
    assert code == 75, err
    assert len(complete_steps(run.root)) == 1


@pytest.mark.parametrize("min_workers", [1, 2])
def test_survivors_of_a_worker_that_dies_while_they_stop_save(tmp_path: Path, min_workers: int) -> None:
    run = Disturbed(tmp_path, pause_s=1.0)
    launcher = run.start(*PACELINE_RUN, "--min-workers", str(min_workers))
    wait_until(lambda: run.step >= 2, launcher)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: len([*run.folder.glob("paceline-*/start-0/heard-*")]) == 2, launcher)
    workers_of(launcher)[1].kill()
    code, err = end(launcher)
    assert "rank 1 was killed by SIGKILL" in err, err
    assert ("1 worker continues" in err) == (min_workers == 1)
    assert code == (75 if min_workers == 1 else 1), err
    assert len(complete_steps(run.root)) == (min_workers == 1)


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_survivors_of_a_killed_worker_say_that_their_step_was_not_saved(tmp_path: Path, num_workers: int) -> None:
    """The agent ends them by SIGTERM while they are in a step that can never be completed."""
    run = Disturbed(tmp_path, pause_s=0.5, every_steps=1)
    launcher = run.start("-m", "paceline", "run", "--workers", str(num_workers))
    wait_until(lambda: complete_steps(run.root) and len(workers_of(launcher)) == num_workers, launcher)
    workers_of(launcher)[-1].kill()
    code, err = end(launcher)
    assert code != 75, err
    assert "is finished and saved" not in err
    saved = complete_steps(run.root)[-1]
    said = re.findall(r"paceline: rank (\d) ended without saving: .*; the newest checkpoint is (.*)", err)
    assert {rank for rank, _ in said} == {str(rank) for rank in range(num_workers - 1)}, err
    assert Path(said[-1][1]) == run.root / f"step-{saved:08d}"


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, pause_s=30.0)
    process = run.start()
    wait_until(lambda: run.step >= 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "SIGTERM: stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
    assert complete_steps(run.root) == []
    process.communicate()


def test_handlers_are_set_for_the_runs_time_only_and_never_over_the_users(tmp_path: Path) -> None:
    def users_own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, users_own)
    try:
        with setup(tmp_path / "a"):
            assert signal.getsignal(signal.SIGTERM) is users_own
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with setup(tmp_path / "b", handle_signals=False):
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_thread_that_is_not_the_main_one_sets_no_handler() -> None:
    made: list[StopSignals] = []
    thread = threading.Thread(target=lambda: made.append(StopSignals(lambda: None)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    made[0].close()


def test_a_save_asked_for_is_made_once_and_training_goes_on(tmp_path: Path) -> None:
    with setup(tmp_path, final=False) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                if trainer.position.step == 2:
                    trainer.request_save()
                step(trainer, batch)
        assert trainer.position.step == 11
    assert complete_steps(tmp_path) == [3]


def test_minutes_are_rank_0s_to_decide_and_all_workers_save_at_that_step(tmp_path: Path, pool: WorkerPool) -> None:
    def main() -> list[int]:
        import paceline.run.saving.checkpointer as module

        # An hour passes with every step on rank 1, on rank 0 only with the fourth.
        clock = {"hours": 0}
        saved: list[int] = []

        def tick(trainer: pl.Trainer, record: pl.StepRecord) -> None:
            clock["hours"] += trainer.world.rank == 1 or record.step == 4

        real, module.monotonic = module.monotonic, lambda: 3600.0 * clock["hours"]
        try:
            with setup(tmp_path, every_minutes=30.0, final=False) as trainer:
                trainer.listen(lambda event: saved.append(event.step) if event.name == "save" else None)
                trainer.every(1, partial(tick, trainer))
                for batch in next(trainer.epochs(1)):
                    step(trainer, batch)
        finally:
            module.monotonic = real
        return saved

    assert pool.run(main, 2) == [[5], [5]]
    assert complete_steps(tmp_path) == [5]


def test_a_stop_outlives_the_worker_that_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost while the run is saved. The others have agreed to stop, and save and stop after a further step."""
    with setup(tmp_path) as trainer:
        checkpointer, loop = trainer.run.checkpointer, trainer.run.loop
        batches = iter(next(trainer.epochs(1)))
        step(trainer, next(batches))
        with monkeypatch.context() as patch, pytest.raises(CommunicationError, match="a worker was lost"):
            patch.setattr(checkpointer._writers[0], "abandon", lambda *_: None)
            patch.setattr(type(checkpointer._writers[0]), "is_abandoned", True)
            patch.setattr(checkpointer._writers[0], "poll", lambda **_: CheckpointError("rank 0 was lost"))
            checkpointer.stop(loop)
        assert checkpointer.requested is Decision.STOP
        batches.close()  # type: ignore[attr-defined]
