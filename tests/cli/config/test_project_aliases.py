"""Names that people know from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from project_files import LEAST, error_of, load

from paceline.cli.config import load_project
from paceline.cli.config.aliases import ACCEPTED_IN, SIMILAR
from paceline.cli.config.schema import ProjectSettings, settings_of, top_sections

REST = LEAST.rpartition("trainer:")[0]

# In `trainer`, with what else it needs: what ours it becomes.
BECOMES: dict[str, dict[str, Any]] = {
    "num_train_epochs: 3, global_batch: 8": {"trainer.epochs": 3},
    "max_steps: 3, global_batch: 8": {"trainer.max_steps": 3},
    "epochs: 1, per_device_train_batch_size: 4": {"trainer.micro_batch": 4, "trainer.micro_batches_per_worker": 1},
    "epochs: 1, per_device_train_batch_size: 4, gradient_accumulation_steps: 2": {
        "trainer.micro_batch": 4,
        "trainer.micro_batches_per_worker": 2,
    },
    "epochs: 1, micro_batch: 4, gradient_accumulation_steps: 2": {"trainer.micro_batches_per_worker": 2},
    "epochs: 1, per_device_train_batch_size: 4, strategy: cadence": {"trainer.micro_batches_per_worker": None},
    "epochs: 1, per_device_train_batch_size: 4, global_batch: null": {"trainer.micro_batch": 4},
    "epochs: 1, global_batch: 8, lr_scheduler_type: cosine, warmup_steps: 2": {
        "trainer.schedule": "cosine",
        "trainer.warmup_steps": 2,
    },
    "epochs: 1, global_batch: 8, lr_scheduler_type: constant_with_warmup": {"trainer.schedule": "constant"},
    "epochs: 1, global_batch: 8, logging_steps: 7": {"trainer.log_every": 7},
    "epochs: 1, global_batch: 8, fused_optimizers: false": {"trainer.fused": False},
    "epochs: 1, global_batch: 8, max_grad_norm: 1": {"trainer.max_grad_norm": 1.0},
    "epochs: 1, global_batch: 8, dispatch_batches: true": {"trainer.feed": "dispatched"},
    "epochs: 1, global_batch: 8, dispatch_batches: false": {"trainer.feed": "sharded"},
    "epochs: 1, global_batch: 8, dispatch_batches: auto": {"trainer.feed": None},
    "epochs: 1, global_batch: 8, shard_dataset: true": {"trainer.feed": "sharded"},
    "epochs: 1, global_batch: 8, shard_dataset: false": {"trainer.feed": None},
    "epochs: 1, global_batch: 8, shard_dataset: true, dispatch_batches: false": {"trainer.feed": "sharded"},
    "epochs: 1, global_batch: 8, shard_dataset: false, dispatch_batches: true": {"trainer.feed": "dispatched"},
    "epochs: 1, global_batch: 8, save_strategy: no": {"checkpoints.save": False},
    "epochs: 1, global_batch: 8, save_strategy: no, save_steps: 5": {"checkpoints.save": False},
    "epochs: 1, global_batch: 8, save_strategy: epoch": {"checkpoints.every_epochs": 1},
    "epochs: 1, global_batch: 8, save_strategy: steps, save_steps: 5": {"checkpoints.every_steps": 5},
    "epochs: 1, global_batch: 8, save_total_limit: 2": {"checkpoints.keep_last": 2},
    "epochs: 1, global_batch: 8, save_optimizer_state: true": {"checkpoints.leave_out": ()},
    "epochs: 1, global_batch: 8, save_optimizer_state: false, save_scheduler_state: false, save_rng_state: false": {
        "checkpoints.leave_out": ("optimizer", "scheduler", "random")
    },
    "epochs: 1, global_batch: 8, save_dataset_state: true": {"checkpoints.leave_out": ()},
}


def at(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


@pytest.mark.parametrize("written", BECOMES)
def test_an_alias_becomes_our_setting(written: str, tmp_path: Path) -> None:
    settings = load(tmp_path, f"{REST}trainer: {{learning_rate: 1, {written}}}").settings
    assert {key: at(settings, key) for key in BECOMES[written]} == BECOMES[written]


def test_aliases_of_saving_are_taken_where_saving_is_set_too(tmp_path: Path) -> None:
    text = f"{LEAST}checkpoints: {{save_strategy: steps, save_steps: 5, save_total_limit: 2, save_rng_state: false}}"
    saving = load(tmp_path, text).settings.checkpoints
    assert (saving.every_steps, saving.keep_last, saving.leave_out) == (5, 2, ("random",))


# Two that are one: what is said.
TWICE = {
    "{epochs: 1, num_train_epochs: 2}": (
        "p.yaml:3:22: trainer.num_train_epochs and trainer.epochs at p.yaml:3:11 both set trainer.epochs: remove one"
    ),
    "{feed: sharded, dispatch_batches: true}": (
        "p.yaml:3:26: trainer.dispatch_batches and trainer.feed at p.yaml:3:11 both set trainer.feed: remove one"
    ),
    "{global_batch: 8, per_device_train_batch_size: 4}": (
        "p.yaml:3:28: trainer.per_device_train_batch_size and trainer.global_batch at p.yaml:3:11 both "
        "set the global batch: remove one"
    ),
    "{global_batch: 8, micro_batch: 2, gradient_accumulation_steps: 4}": (
        "p.yaml:3:44: trainer.gradient_accumulation_steps and trainer.global_batch at p.yaml:3:11 both "
        "set the global batch: remove one"
    ),
    "{global_batch: 8, micro_batch: 2, micro_batches_per_worker: 4}": (
        "p.yaml:3:44: trainer.micro_batches_per_worker and trainer.global_batch at p.yaml:3:11 both set "
        "the global batch: remove one"
    ),
    "{micro_batch: 4, per_device_train_batch_size: 4}": (
        "p.yaml:3:27: trainer.per_device_train_batch_size and trainer.micro_batch at p.yaml:3:11 both "
        "set trainer.micro_batch: remove one"
    ),
    "{shard_dataset: true, dispatch_batches: true}": (
        "p.yaml:3:11: trainer.shard_dataset and trainer.dispatch_batches at p.yaml:3:32 both set "
        "trainer.feed: remove one"
    ),
    "{save_steps: 4}\ncheckpoints: {every_steps: 4}": (
        "p.yaml:3:11: trainer.save_steps and checkpoints.every_steps at p.yaml:4:15 both set "
        "checkpoints.every_steps: remove one"
    ),
    "{save_steps: 4}\ncheckpoints: {save_steps: 4}": (
        "p.yaml:4:15: checkpoints.save_steps and trainer.save_steps at p.yaml:3:11 both set "
        "checkpoints.every_steps: remove one"
    ),
    "{save_rng_state: false}\ncheckpoints: {leave_out: [optimizer]}": (
        "p.yaml:3:11: trainer.save_rng_state and checkpoints.leave_out at p.yaml:4:15 both set "
        "checkpoints.leave_out: remove one"
    ),
}


@pytest.mark.parametrize("written", TWICE)
def test_one_setting_under_two_names_is_an_error_that_names_both(written: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, f"{REST}trainer: {written}") == TWICE[written]


def test_two_names_in_two_files_are_one_setting_too(tmp_path: Path) -> None:
    message = error_of(tmp_path, "extends: base.yaml\ntrainer: {num_train_epochs: 2}", base=LEAST)
    assert message == (
        "p.yaml:2:11: trainer.num_train_epochs and trainer.epochs at base.yaml:3:11 both set trainer.epochs: remove one"
    )


def test_null_takes_away_what_an_extended_file_says(tmp_path: Path) -> None:
    over = "extends: base.yaml\ntrainer: {global_batch: null, per_device_train_batch_size: 4}"
    assert load(tmp_path, over, base=LEAST).resolve(3).settings.trainer.global_batch == 12


def test_a_batch_per_worker_becomes_a_global_batch_when_the_workers_are_known(tmp_path: Path) -> None:
    trainer = "trainer: {epochs: 1, learning_rate: 1, per_device_train_batch_size: 4, gradient_accumulation_steps: 2}"
    project = load(tmp_path, REST + trainer)
    for num_workers, expected in ((1, 8), (3, 24)):
        resolved = project.resolve(num_workers)
        assert resolved.settings.trainer.global_batch == expected
        assert resolved.settings.trainer.micro_batches_per_worker is None
        assert resolved.origin("trainer.global_batch").alias == "trainer.gradient_accumulation_steps"
        assert resolved.resolve(7) is resolved


def test_a_resumed_run_keeps_the_global_batch_of_its_first_start(tmp_path: Path) -> None:
    project = load(tmp_path, f"{REST}trainer: {{epochs: 1, learning_rate: 1, per_device_train_batch_size: 4}}")
    assert project.resolve(3, global_batch=8).settings.trainer.global_batch == 8


def test_a_global_batch_that_is_given_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST).resolve(3).settings.trainer.global_batch == 8


@pytest.mark.parametrize(
    ("file", "overrides", "key", "value"),
    [
        ("per_device_train_batch_size: 4", "trainer.micro_batch=2 trainer.global_batch=8", "micro_batch", 2),
        ("micro_batch: 4\n  global_batch: 8", "trainer.per_device_train_batch_size=2", "micro_batch", 2),
        ("global_batch: 8\n  num_train_epochs: 4", "trainer.epochs=2", "epochs", 2),
        ("global_batch: 8\n  epochs: 4", "trainer.num_train_epochs=2", "epochs", 2),
        ("gradient_accumulation_steps: 4\n  micro_batch: 2", "trainer.global_batch=8", "global_batch", 8),
        ("global_batch: 8\n  dispatch_batches: true", "trainer.feed=sharded", "feed", "sharded"),
        ("global_batch: 8\n  feed: sharded", "trainer.dispatch_batches=true", "feed", "dispatched"),
    ],
)
def test_the_command_line_wins_over_a_file_under_any_name(
    tmp_path: Path, file: str, overrides: str, key: str, value: object
) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(f"""\
model: {{factory: torch.nn:Linear}}
data: {{train: {{factory: a:b}}}}
trainer:
  learning_rate: 0.1
  max_steps: 10
  {file}
""")
    assert getattr(load_project(path, overrides.split()).settings.trainer, key) == value


def test_the_settings_that_errors_name_for_other_tools_names_exist() -> None:
    known = {f"{key}.{name}" for key, kind in top_sections().items() for name in settings_of(kind)}
    known |= {f"trainer.{name}" for name in ACCEPTED_IN["trainer"]} | set(settings_of(ProjectSettings))
    assert set(SIMILAR.values()) <= known
    assert not {name.rpartition(".")[2] for name in known} & set(SIMILAR)
