"""From settings to what a run is set up with."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from project_files import LEAST, load

import paceline as pl
from paceline.cli.config import schema, trainer_setup
from paceline.cli.config.errors import DEFAULT
from paceline.cli.config.parts import Part
from paceline.cli.config.schema import settings_of
from paceline.cli.config.trainer_setup import build_data

REST = LEAST.rpartition("trainer:")[0]


def test_settings_have_the_defaults_of_the_trainer(tmp_path: Path) -> None:
    """So that a file that says nothing trains as a script that says nothing."""
    parameters = inspect.signature(pl.Trainer.setup).parameters
    given = trainer_setup.setup_arguments(load(tmp_path, LEAST).settings, tmp_path, tmp_path)
    given.pop("checkpoints")
    differing = {name for name, value in given.items() if parameters[name].default != value}
    assert differing == {"global_batch"}


@pytest.mark.parametrize(
    ("ours", "theirs", "others"),
    [
        (schema.Checkpoints, pl.Checkpoints, {"save", "folder", "init_from"}),
        (schema.Cadence, pl.Cadence, set()),
        (schema.Averaging, pl.Averaging, set()),
    ],
)
def test_a_section_has_the_settings_and_defaults_of_what_it_makes(ours: type, theirs: type, others: set[str]) -> None:
    made = {f.name: f.default for f in fields(theirs)}
    settings = {name: setting.default for name, setting in settings_of(ours).items() if name not in others}
    assert settings == {name: default for name, default in made.items() if default is not MISSING}


def test_every_setting_of_saving_arrives() -> None:
    given = {
        "every_steps": 5,
        "every_minutes": 2.0,
        "every_epochs": 3,
        "final": False,
        "keep_last": 4,
        "keep_every": 6,
        "snapshot_every": 7,
        "leave_out": ("optimizer",),
        "on_error": "continue",
        "check_replicas": {"model": "full", "optimizer": "quick"},
        "disk": "per node",
        "num_writers": 2,
        "handle_signals": False,
        "allow": ("seed",),
        "skip": ("ema",),
    }
    best = schema.KeepBest("loss", 2, "max")
    made = trainer_setup.checkpoints(schema.Checkpoints(**given, keep_best=best, resume="old"), Path("x"), Path("p"))
    assert made == pl.Checkpoints(Path("x"), **given, keep_best=("loss", 2, "max"), resume=Path("p/old"))


def test_strategies_are_made() -> None:
    hint = schema.SpeedHint(1, 2.0)
    cadence = schema.Cadence(5, 0.2, 50, 3, hint)
    assert trainer_setup.strategy(schema.Gradients()) == "gradients"
    assert trainer_setup.strategy(cadence) == pl.Cadence(5, 0.2, 50, 3, (1, 2.0))
    assert trainer_setup.strategy(schema.SlowLink()) == "slow link"
    assert trainer_setup.strategy(schema.Averaging(4, 3, True, "int4", 2, None, None)) == pl.Averaging(
        4, 3, True, "int4", 2, None, None
    )
    averaging = trainer_setup.strategy(schema.Averaging(every=schema.Cadence(5), outer=factory_of(torch.optim.SGD)))
    assert isinstance(averaging, pl.Averaging)
    assert averaging.every == pl.Cadence(5)
    assert callable(averaging.outer)


def factory_of(function: Callable[..., Any]) -> Part:
    return Part(f"{function.__module__}:{function.__qualname__}", {}, Path(), "", DEFAULT)


# Settings, and the learning rate after so many steps as a part of the highest.
SCHEDULES = {
    "schedule: constant": [1, 1, 1],
    "warmup_steps: 2": [0.5, 1, 1, 1],
    "schedule: linear, schedule_steps: 4": [1, 0.75, 0.5, 0.25, 0, 0],
    "schedule: linear, warmup_steps: 2, schedule_steps: 4": [0.5, 1, 1, 0.5, 0, 0],
    "schedule: cosine, max_steps: 4": [1, 0.85355, 0.5, 0.14645, 0, 0],
    "schedule: cosine, max_steps: 2, schedule_steps: 4": [1, 0.85355, 0.5],
    "schedule: linear, epochs: 2": [1, 0.75, 0.5, 0.25, 0],  # of two steps each
}


@pytest.mark.parametrize("written", SCHEDULES)
def test_a_schedule_takes_the_learning_rate_where_it_should_be(written: str, tmp_path: Path) -> None:
    length = "" if "max_steps" in written or "epochs" in written else ", epochs: 1"
    settings = load(tmp_path, f"{REST}trainer: {{global_batch: 8, learning_rate: 2, {written}{length}}}").settings
    optimizer = trainer_setup.optimizer(settings)([torch.zeros(1, requires_grad=True)])
    make = trainer_setup.scheduler(settings, steps_per_epoch=lambda: 2)
    if make is None:
        assert SCHEDULES[written] == [1, 1, 1]
        return
    scheduler, rates = make(optimizer), []
    for _ in SCHEDULES[written]:
        rates.append(optimizer.param_groups[0]["lr"] / 2)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(SCHEDULES[written], abs=1e-5)


def test_a_schedule_of_a_stream_needs_to_be_told_its_end(tmp_path: Path) -> None:
    settings = load(tmp_path, LEAST.replace("epochs: 1", "epochs: 1, schedule: linear")).settings
    with pytest.raises(ValueError, match=r"schedule=linear needs the number of steps, .*trainer\.schedule_steps"):
        trainer_setup.scheduler(settings, steps_per_epoch=lambda: None)


def test_the_optimizer_of_a_learning_rate_is_adamw(tmp_path: Path) -> None:
    settings = load(tmp_path, LEAST.replace("epochs: 1", "epochs: 1, weight_decay: 0.5")).settings
    optimizer = trainer_setup.optimizer(settings)([torch.zeros(1, requires_grad=True)])
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.1, 0.5)


def test_a_token_file_lies_in_the_projects_folder(tmp_path: Path) -> None:
    np.arange(41, dtype=np.uint16).tofile(tmp_path / "t.bin")
    text = LEAST.replace('{factory: "parts:samples"}', "{kind: tokens, paths: t.bin, length: 8}")
    assert len(load(tmp_path, text).data("train")) == 5


def test_an_arrow_file_lies_in_the_projects_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    table = pa.table({"x": [[1.0, 2.0]] * 6, "y": [1] * 6})
    with pa.ipc.new_file(tmp_path / "part-0.arrow", table.schema) as file:
        file.write_table(table)
    source = build_data(schema.Arrow(paths=("*.arrow",), columns=("x",)), tmp_path)
    assert len(source) == 6
    assert list(source.columns) == ["x"]


def test_a_saved_hf_data_set_is_found_with_its_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    datasets.DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "saved"))
    assert len(build_data(schema.Hf("saved", split="train"), tmp_path)) == 3
    with pytest.raises(ValueError, match=r"split=test is not in .*: choose from train"):
        build_data(schema.Hf("saved", split="test"), tmp_path)


def test_a_project_trains_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts together, in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts_that_train.py").write_text(
        "import torch\n"
        "def build_model(width): return torch.nn.Linear(width, 1)\n"
        "def samples(): return torch.arange(64.0).view(16, 4) / 64\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
    )
    text = """
model: {factory: "parts_that_train:build_model", arguments: {width: 4}}
data: {train: {factory: "parts_that_train:samples"}}
loss: parts_that_train:loss
trainer: {epochs: 2, per_device_train_batch_size: 4, gradient_accumulation_steps: 2, learning_rate: 0.1, exact: true}
checkpoints: {every_epochs: 1}
"""
    assert train(load(tmp_path, text), tmp_path / "run") == 4
    assert train(load(tmp_path, text, "trainer.epochs=3"), tmp_path / "run") == 2


def train(project: Any, run_folder: Path) -> int:
    """Steps taken until the project's epochs are over."""
    project = project.resolve(1)
    settings, steps = project.settings, []
    with pl.Trainer.setup(
        settings.model.as_function(),
        trainer_setup.optimizer(settings),
        data=project.data("train"),
        scheduler=trainer_setup.scheduler(settings, lambda: None),
        **trainer_setup.setup_arguments(settings, project.folder, run_folder),
    ) as trainer:
        loss = settings.loss.build()
        trainer.every(1, steps.append)
        for epoch in trainer.epochs(settings.trainer.epochs):
            for batch in epoch:
                trainer.backward(loss(trainer.model, batch))
                trainer.step()
    return len(steps)


def test_every_setting_of_the_trainer_is_used() -> None:
    """A new one belongs to a group of run/settings.py, to the plain parameters, or to the command."""
    of_the_command = {
        *("micro_batches_per_worker", "epochs", "max_steps", "learning_rate", "weight_decay", "schedule"),
        *("warmup_steps", "schedule_steps", "strategy", "compile", "gradient_checkpointing", "eval_every"),
        *("log_every", "early_stopping", "max_loss_ratio"),
    }
    assert {*trainer_setup._PLAIN, *of_the_command} == set(settings_of(schema.Training))
