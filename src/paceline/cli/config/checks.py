"""What one setting cannot say alone: settings that contradict one another, and settings that nobody would look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from paceline.cli.config import parts, schema
from paceline.cli.config.errors import nearest
from paceline.cli.config.schema import Settings
from paceline.plan.steps import Steps
from paceline.run.config import RunConfig
from paceline.run.saving.resuming import OWN
from paceline.run.settings import Balancing, Batching
from paceline.sync.averaging.strategy import Averaging

# What checkpoints of a run from a project file hold.
COMPONENTS = (*OWN, "loggers", "early_stopping")

# For checks that need a number of samples and do not depend on it.
_MANY = 1 << 40
# A step keeps some numbers of each of its micro-batches.
MAX_MICRO_BATCHES = 1_000_000


def contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """Dotted keys, and what is to be said of them."""
    trainer = settings.trainer
    if trainer.epochs is None and trainer.max_steps is None:
        yield "trainer.epochs", "is missing: say how long to train, with epochs or max_steps"
    if settings.devices == ():
        yield "devices", "is []: name at least one, or leave it out for all"
    yield from _learning_rate(settings)
    yield from _evaluation(settings)
    yield from _saving(settings)
    batches = list(_batches(trainer))
    yield from batches
    if not batches:
        yield from _run_config(settings)


def _learning_rate(settings: Settings) -> Iterator[tuple[str, str]]:
    trainer = settings.trainer
    if settings.optimizer is None and trainer.learning_rate is None:
        yield "optimizer", "is missing: give a factory, or trainer.learning_rate for AdamW"
    if settings.optimizer is not None:
        for name in ("learning_rate", "weight_decay"):
            if getattr(trainer, name) is not None:
                yield f"trainer.{name}", "would be ignored: give it to the optimizer as an argument"
    if settings.scheduler is not None:
        for name in ("schedule", "warmup_steps", "schedule_steps"):
            if getattr(trainer, name):
                yield f"trainer.{name}", "would be ignored: there is a scheduler section"
    elif trainer.scheduler_every != "step":
        yield "trainer.scheduler_every", "would be ignored: there is no scheduler section"
    elif trainer.schedule_steps or trainer.max_steps:
        try:
            parts.horizon(trainer, None)
        except ValueError as error:
            yield "trainer.warmup_steps", f"does not fit: {error}"


def _evaluation(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.data.evaluation is not None:
        return
    trainer = settings.trainer
    for name, is_given in (("eval_every", trainer.eval_every), ("early_stopping", trainer.early_stopping)):
        if is_given is not None:
            yield f"trainer.{name}", "needs something to evaluate on: give data.evaluation"
    if settings.checkpoints.keep_best is not None:
        yield "checkpoints.keep_best", "needs something to evaluate on: give data.evaluation"


def _saving(settings: Settings) -> Iterator[tuple[str, str]]:
    try:
        parts.checkpoints(settings.checkpoints, Path())
    except ValueError as error:
        yield "checkpoints", f"does not fit together: {error}"
    saving = settings.checkpoints
    for name in saving.leave_out:
        if name not in COMPONENTS:
            yield "checkpoints.leave_out", f"names no component, {name!r}: {nearest(name, COMPONENTS)}"
    if not saving.save and saving.resume not in ("auto", None, False):
        yield "checkpoints.resume", "would be ignored: checkpoints.save is false"


def _batches(trainer: schema.Trainer) -> Iterator[tuple[str, str]]:
    if trainer.micro_batches_per_worker is not None:
        key = "trainer.micro_batches_per_worker"
        if trainer.micro_batch is None:
            yield key, "needs trainer.micro_batch: the samples of a micro-batch"
        if isinstance(trainer.strategy, schema.Cadence):
            yield key, "would be ignored: a cadence decides how many micro-batches make a step"
    if trainer.batches_per_step is not None:
        for name in ("global_batch", "micro_batch", "micro_batches_per_worker"):
            if getattr(trainer, name) is not None:
                yield f"trainer.{name}", "would be ignored: with batches_per_step batches come as they are"
    elif (
        trainer.global_batch is None
        and trainer.micro_batches_per_worker is None
        and not isinstance(trainer.strategy, schema.Cadence)
    ):
        yield (
            "trainer.global_batch",
            "is missing: give the samples per optimizer step, or micro_batch and micro_batches_per_worker",
        )
    elif trainer.global_batch is not None and trainer.micro_batch is not None:
        count = trainer.global_batch // trainer.micro_batch
        if count > MAX_MICRO_BATCHES:
            yield (
                "trainer.global_batch",
                f"is {trainer.global_batch}, {count} micro-batches of {trainer.micro_batch}: a step has at most "
                f"{MAX_MICRO_BATCHES}, choose a smaller global_batch or a larger micro_batch",
            )


def _run_config(settings: Settings) -> Iterator[tuple[str, str]]:
    """What the run itself would say when it is put together."""
    trainer = resolved(settings.trainer, settings.workers or 1)
    try:
        strategy = parts.strategy(trainer.strategy)
    except ValueError as error:
        yield "trainer.strategy", f"does not fit together: {error}"
        return
    if trainer.ema is not None and isinstance(strategy, Averaging):
        yield "trainer.ema", "does not go with averaging, where every worker has weights of its own: leave one out"
    has_batches = trainer.batches_per_step is not None
    try:
        config = RunConfig(
            global_batch=trainer.batches_per_step or trainer.global_batch,
            micro_batch=1 if has_batches else trainer.micro_batch,
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
        yield "trainer", f"does not fit together: {error}"


def resolved(trainer: schema.Trainer, num_workers: int) -> schema.Trainer:
    """With the global batch that so many workers have."""
    per_worker = trainer.micro_batches_per_worker
    if per_worker is None or trainer.micro_batch is None:
        return trainer
    global_batch = trainer.micro_batch * per_worker * num_workers
    return replace(trainer, global_batch=global_batch, micro_batches_per_worker=None)
