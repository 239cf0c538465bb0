"""`Trainer.setup(run=...)`: a loop of one's own has a run folder, as with `paceline train`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.api import recording
from paceline.core.processes import LAUNCHED_VARIABLE
from paceline.observe.metrics import read_curves
from paceline.observe.run_files import RunFiles, process_started, read_status, state_of, write_json
from paceline.run import control


def train(run: Any, steps: int = 12, hook: Any = lambda *_: None, **settings: Any) -> None:
    with pl.Trainer.setup(
        mlp,
        lambda params: torch.optim.SGD(params, lr=0.1),
        data=vectors(64),
        global_batch=8,
        micro_batch=4,
        run=run,
        runtime=pl.Runtime(quiet=True),
        **settings,
    ) as trainer:
        trainer.every(1, lambda record: hook(trainer, record))
        for epoch in trainer.epochs(max_steps=steps):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()


def test_a_run_that_another_process_records_is_not_written_to(tmp_path: Path) -> None:
    train(pl.Recording(tmp_path, name="mine", quiet=True))
    files = RunFiles(tmp_path / "mine")
    status, before = read_status(files), files.metrics.read_bytes()
    assert status is not None
    parent = os.getppid()
    other = replace(status, state="running", pid=parent, process_started=process_started(parent))
    write_json(files.status, asdict(other))
    with pytest.raises(ValueError, match=rf"mine is running, in process {parent}: wait for it, or choose another name"):
        train(pl.Recording(tmp_path, name="mine", quiet=True))
    assert files.metrics.read_bytes() == before
    write_json(files.status, asdict(replace(other, process_started=1)))  # it has crashed: this process is another one
    train(pl.Recording(tmp_path, name="mine", quiet=True))


def test_evaluations_are_recorded(tmp_path: Path) -> None:
    def evaluate(trainer: pl.Trainer, record: pl.StepRecord) -> None:
        if record.step in (4, 8):
            loss = trainer.evaluate(vectors(8), lambda model, batch: functional.cross_entropy(model(batch.x), batch.y))
            trainer.log_evaluation({"loss": loss, "accuracy": torch.tensor(0.25 * record.step)})

    train(tmp_path, hook=evaluate)
    curves = read_curves(only_run(tmp_path).metrics, ("eval/loss", "eval/accuracy"))
    assert curves.series("eval/loss")[0].tolist() == [4, 8]
    assert curves.series("eval/accuracy")[1].tolist() == [1.0, 2.0]


def test_evaluations_of_a_run_that_is_not_recorded_are_refused() -> None:
    with pytest.raises(
        pl.errors.MisuseError, match=r"log_evaluation\(\) needs a recorded run: give Trainer.setup\(run="
    ):
        train(None, hook=lambda trainer, _: trainer.log_evaluation({"loss": 1.0}))


def test_a_closed_trainer_records_nothing(tmp_path: Path) -> None:
    model = mlp()
    trainer = pl.Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data=vectors(8), global_batch=8, run=tmp_path
    )
    trainer.close()
    with pytest.raises(pl.errors.MisuseError, match="this trainer is closed"):
        trainer.epochs(1)
    assert not list(tmp_path.iterdir())


def only_run(folder: Path) -> RunFiles:
    (root,) = folder.iterdir()
    return RunFiles(root)


def test_a_run_has_its_folder_with_metrics_plot_and_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["folder/my_script.py", "--lr", "0.1"])
    answers = []

    def ask(_: pl.Trainer, record: pl.StepRecord) -> None:
        if record.step == 6:
            answers.append(control.ask(control.socket_path(only_run(tmp_path).root), {"command": "status"}))

    train(pl.Recording(tmp_path, log_every=3), hook=ask)
    files = only_run(tmp_path)
    assert files.root.name.startswith("my_script_20")
    status = read_status(files)
    assert status is not None
    assert (state_of(files, status), status.total_steps) == ("finished", 12)
    metrics = read_curves(files.metrics)
    assert metrics.series("loss")[0].tolist() == [1, 3, 6, 9, 12]
    assert json.loads(files.config.read_text())["trainer"]["global_batch"] == 8
    assert json.loads(files.report.read_text())["steps"] == 12
    assert (files.plots / "training.png").is_file()
    assert (answers[0]["step"], answers[0]["total_steps"]) == (6, 12)
    shown = capsys.readouterr().out
    assert f"run {files.root}" in shown
    assert "step 12/12  loss" in shown


def test_launches_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if workers may change. Every worker of a launch finds the same folder."""
    run: Any = SimpleNamespace(rejoining=object())

    def folder(launched: float) -> Path:
        monkeypatch.setenv(LAUNCHED_VARIABLE, str(launched))
        return recording._files_of(pl.Recording(tmp_path), run).root

    assert folder(1e9 + 0.25) == folder(1e9 + 0.25)
    assert folder(1e9 + 0.25) != folder(1e9 + 0.5)


def test_how_a_run_ended_is_recorded(tmp_path: Path) -> None:
    def fail(_: pl.Trainer, record: pl.StepRecord) -> None:
        if record.step == 3:
            raise RuntimeError("the data is gone")

    with pytest.raises(RuntimeError, match="the data is gone"):
        train(pl.Recording(tmp_path, name="mine", quiet=True), hook=fail)
    status = read_status(RunFiles(tmp_path / "mine"))
    assert status is not None
    assert (status.state, status.reason) == ("failed", "RuntimeError: the data is gone")
    with pytest.raises(pl.errors.Stopped):
        train(pl.Recording(tmp_path, name="mine", quiet=True), hook=lambda trainer, _: trainer.request_stop())
    again = read_status(RunFiles(tmp_path / "mine"))
    assert again is not None
    assert (again.state, again.num_starts) == ("stopped", 2)


def test_several_workers_have_one_run(tmp_path: Path, pool: WorkerPool) -> None:
    pool.run(lambda: train(pl.Recording(tmp_path / "runs", quiet=True), steps=4), 2)
    files = only_run(tmp_path / "runs")
    assert read_curves(files.metrics).last_step == 4
    assert sum(read_curves(files.metrics).shares) > 0
    reports = [json.loads(files.worker(rank).read_text()) for rank in range(2)]
    assert [(each["rank"], each["device"], each["step"]) for each in reports] == [(0, "cpu", 4), (1, "cpu", 4)]


def test_if_the_folder_is_refused_all_workers_raise(tmp_path: Path, pool: WorkerPool) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(WorkersFailed) as caught:
        pool.run(lambda: train(pl.Recording(tmp_path / "runs", quiet=True)), 2)
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_every": 0}, "log_every=0 must be >= 1"),
        ({"loggers": "csv"}, "loggers='csv': give a list of names"),
        ({"loggers": ["cvs"]}, "'cvs' is unknown: choose from"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pl.Recording("runs", **settings)
