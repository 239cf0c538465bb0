"""Checks across settings: contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.config import schema, trainer_setup
from paceline.cli.config.errors import nearest
from paceline.cli.config.schema import ProjectSettings, settings_of
from paceline.plan.epoch import Steps
from paceline.run.config import RunConfig
from paceline.run.saving.options import OWN

# Components of the checkpoints of a run from a project file.
COMPONENTS = (*OWN, "loggers", "early_stopping")

# A number of samples, for checks that do not depend on it.
_MANY = 1 << 40


def contradictions(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    """Pairs of a dotted key and its problem."""
    trainer, saving = settings.trainer, settings.checkpoints
    if trainer.epochs is None and trainer.max_steps is None:
        yield "trainer.epochs", "is missing: give the length of the run, with epochs or max_steps"
    if settings.devices == ():
        yield "devices", "is []: name at least one device, or remove the setting to use all"
    if isinstance(settings.devices, tuple) and len(set(settings.devices)) < len(settings.devices):
        yield "devices", "names a GPU twice: name it once; workers share GPUs if there are more of them"
    if settings.stall_s is not None and settings.min_workers is None:
        yield "stall_s", "has no effect without min_workers"
    if settings.optimizer is None and trainer.learning_rate is None:
        yield "optimizer", "is missing: give a factory, or trainer.learning_rate for AdamW"
    if settings.scheduler is None and (trainer.schedule_steps or trainer.max_steps):
        try:
            trainer_setup.horizon(trainer, lambda: None)
        except ValueError as error:
            yield "trainer.warmup_steps", f"is too large: {error}"
    try:
        trainer_setup.checkpoints(saving, Path(), Path())
    except ValueError as error:
        yield "checkpoints", f"is inconsistent: {error}"
    for name in saving.leave_out:
        if name not in COMPONENTS:
            yield "checkpoints.leave_out", f"names an unknown component, {name!r}: {nearest(name, COMPONENTS)}"
    ruled_out = list(_ruled_out(settings))
    yield from ruled_out
    if not any("batch" in key for key, _ in ruled_out):
        yield from _run_config(settings)


def _ruled_out(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    """Settings that require others, or have no effect with them."""
    trainer, saving = settings.trainer, settings.checkpoints

    def given(section: Any, *names: str) -> list[str]:
        """The keys of settings that differ from their defaults."""
        kind: Any = type(section)
        declared, prefix = settings_of(kind), kind.__name__.lower()
        return [f"{prefix}.{name}" for name in names if getattr(section, name) != declared[name].default]

    if settings.optimizer is not None:
        for key in given(trainer, "learning_rate", "weight_decay"):
            yield key, "has no effect: pass it to the optimizer as an argument"
    if settings.scheduler is not None:
        for key in given(trainer, "schedule", "warmup_steps", "schedule_steps"):
            yield key, "has no effect: there is a scheduler section"
    elif given(trainer, "scheduler_every"):
        yield "trainer.scheduler_every", "has no effect: there is no scheduler section"
    if settings.data.evaluation is None:
        for key in given(trainer, "eval_every", "early_stopping") + given(saving, "keep_best"):
            yield key, "requires data.evaluation"
    if not saving.save and saving.resume not in ("auto", None, False):
        yield "checkpoints.resume", "has no effect: checkpoints.save is false"
    if trainer.ema is not None and isinstance(trainer.strategy, schema.Averaging):
        yield "trainer.ema", "does not work with averaging, where workers have different weights: remove one"
    has_cadence, per_worker = isinstance(trainer.strategy, schema.Cadence), "trainer.micro_batches_per_worker"
    if trainer.batches_per_step is not None:
        for key in given(trainer, "global_batch", "micro_batch", "micro_batches_per_worker"):
            yield key, "has no effect: with batches_per_step, the data determines the batch size"
    elif trainer.micro_batches_per_worker is not None and has_cadence:
        yield per_worker, "has no effect: a cadence determines the number of micro-batches per step"
    elif trainer.micro_batches_per_worker is not None and trainer.micro_batch is None:
        yield per_worker, "requires trainer.micro_batch, the samples of a micro-batch"
    elif trainer.micro_batches_per_worker is None and trainer.global_batch is None and not has_cadence:
        message = "is missing: give the samples per optimizer step, or micro_batch and micro_batches_per_worker"
        yield "trainer.global_batch", message


def _run_config(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    """Errors that the run itself would raise when it starts."""
    trainer = resolved(settings.trainer, settings.workers or 1)
    try:
        strategy = trainer_setup.strategy(trainer.strategy)
    except ValueError as error:
        yield "trainer.strategy", f"is inconsistent: {error}"
        return
    try:
        config = RunConfig(
            global_batch=trainer.batches_per_step or trainer.global_batch,
            micro_batch=trainer.micro_batch if trainer.batches_per_step is None else 1,
            exact=trainer.exact,
            strategy=strategy,
            **trainer_setup.groups(trainer, ema=None),  # _ruled_out checks the average
        )
        if config.global_batch is not None:
            Steps(_MANY, config.global_batch, config.micro_batch or config.global_batch)
        if settings.workers is not None:
            config.check_workers(settings.workers)
    except ValueError as error:
        yield "trainer", f"is inconsistent: {error}"


def resolved(trainer: schema.Trainer, num_workers: int, global_batch: int | None = None) -> schema.Trainer:
    """The section with a global batch, by default for `num_workers` workers, instead of a batch per worker."""
    per_worker = trainer.micro_batches_per_worker
    if per_worker is None or trainer.micro_batch is None:
        return trainer
    global_batch = global_batch or trainer.micro_batch * per_worker * num_workers
    return replace(trainer, global_batch=global_batch, micro_batches_per_worker=None)
