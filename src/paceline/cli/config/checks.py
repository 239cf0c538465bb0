"""Checks across settings: contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.cli.config import schema, trainer_setup
from paceline.cli.config.errors import nearest
from paceline.cli.config.schema import ProjectSettings
from paceline.plan.steps import Steps
from paceline.run.config import RunConfig
from paceline.run.saving.resuming import OWN
from paceline.run.settings import Balancing, Batching
from paceline.sync.averaging.strategy import Averaging

# Components of the checkpoints of a run from a project file.
COMPONENTS = (*OWN, "loggers", "early_stopping")

# A number of samples, for checks that do not depend on it.
_MANY = 1 << 40
# A step keeps a few numbers for each of its micro-batches.
MAX_MICRO_BATCHES = 1_000_000


def contradictions(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    """Dotted keys, each with what is wrong with it."""
    trainer, saving = settings.trainer, settings.checkpoints
    if trainer.epochs is None and trainer.max_steps is None:
        yield "trainer.epochs", "is missing: give the length of the run, with epochs or max_steps"
    if settings.devices == ():
        yield "devices", "is []: name at least one device, or remove the setting to use all"
    yield from _optimizer(settings)
    if settings.data.evaluation is None:
        needed = {"trainer.eval_every": trainer.eval_every, "trainer.early_stopping": trainer.early_stopping}
        for key, value in {**needed, "checkpoints.keep_best": saving.keep_best}.items():
            if value is not None:
                yield key, "requires data.evaluation"
    try:
        trainer_setup.checkpoints(saving, Path(), Path())
    except ValueError as error:
        yield "checkpoints", f"is inconsistent: {error}"
    for name in saving.leave_out:
        if name not in COMPONENTS:
            yield "checkpoints.leave_out", f"names an unknown component, {name!r}: {nearest(name, COMPONENTS)}"
    if not saving.save and saving.resume not in ("auto", None, False):
        yield "checkpoints.resume", "has no effect: checkpoints.save is false"
    batches = list(_batches(trainer))
    yield from batches or _run_config(settings)


def _optimizer(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    trainer = settings.trainer
    if settings.optimizer is None and trainer.learning_rate is None:
        yield "optimizer", "is missing: give a factory, or trainer.learning_rate for AdamW"
    if settings.optimizer is not None:
        for name in ("learning_rate", "weight_decay"):
            if getattr(trainer, name) is not None:
                yield f"trainer.{name}", "has no effect: pass it to the optimizer as an argument"
    if settings.scheduler is not None:
        for name in ("schedule", "warmup_steps", "schedule_steps"):
            if getattr(trainer, name):
                yield f"trainer.{name}", "has no effect: there is a scheduler section"
    elif trainer.scheduler_every != "step":
        yield "trainer.scheduler_every", "has no effect: there is no scheduler section"
    elif trainer.schedule_steps or trainer.max_steps:
        try:
            trainer_setup.horizon(trainer, None)
        except ValueError as error:
            yield "trainer.warmup_steps", f"is too large: {error}"


def _batches(trainer: schema.Trainer) -> Iterator[tuple[str, str]]:
    per_worker, global_batch, micro_batch = trainer.micro_batches_per_worker, trainer.global_batch, trainer.micro_batch
    has_cadence = isinstance(trainer.strategy, schema.Cadence)
    if per_worker is not None and micro_batch is None:
        yield "trainer.micro_batches_per_worker", "requires trainer.micro_batch, the samples of a micro-batch"
    if per_worker is not None and has_cadence:
        message = "has no effect: a cadence determines the number of micro-batches per step"
        yield "trainer.micro_batches_per_worker", message
    if trainer.batches_per_step is not None:
        for name in ("global_batch", "micro_batch", "micro_batches_per_worker"):
            if getattr(trainer, name) is not None:
                yield f"trainer.{name}", "has no effect: with batches_per_step, the data determines the batch size"
    elif global_batch is None and per_worker is None and not has_cadence:
        message = "is missing: give the samples per optimizer step, or micro_batch and micro_batches_per_worker"
        yield "trainer.global_batch", message
    elif global_batch is not None and micro_batch is not None and global_batch // micro_batch > MAX_MICRO_BATCHES:
        count = f"{global_batch // micro_batch} micro-batches of {micro_batch}: a step has at most {MAX_MICRO_BATCHES}"
        yield (
            "trainer.global_batch",
            f"is {global_batch}, {count}; choose a smaller global_batch or a larger micro_batch",
        )


def _run_config(settings: ProjectSettings) -> Iterator[tuple[str, str]]:
    """Errors that the run itself would raise when it starts."""
    trainer = resolved(settings.trainer, settings.workers or 1)
    try:
        strategy = trainer_setup.strategy(trainer.strategy)
    except ValueError as error:
        yield "trainer.strategy", f"is inconsistent: {error}"
        return
    if trainer.ema is not None and isinstance(strategy, Averaging):
        yield "trainer.ema", "does not work with averaging, where workers have different weights: remove one"
    try:
        config = RunConfig(
            global_batch=trainer.batches_per_step or trainer.global_batch,
            micro_batch=trainer.micro_batch if trainer.batches_per_step is None else 1,
            exact=trainer.exact,
            strategy=strategy,
            batching=Batching(physical_batch=trainer.physical_batch),
            balancing=Balancing(trainer.shares, trainer.speed_hints),
        )
        if config.global_batch is not None:
            Steps(_MANY, config.global_batch, config.micro_batch or config.global_batch)
        if settings.workers is not None:
            config.check_workers(settings.workers)
    except ValueError as error:
        yield "trainer", f"is inconsistent: {error}"


def resolved(trainer: schema.Trainer, num_workers: int) -> schema.Trainer:
    """The section with the global batch for this number of workers."""
    per_worker = trainer.micro_batches_per_worker
    if per_worker is None or trainer.micro_batch is None:
        return trainer
    global_batch = trainer.micro_batch * per_worker * num_workers
    return replace(trainer, global_batch=global_batch, micro_batches_per_worker=None)
