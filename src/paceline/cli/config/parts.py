"""From settings to the parts that a run is set up with. What is the user's is imported when its part is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from paceline.cli.config import schema
from paceline.cli.config.factories import Factory, Reference
from paceline.cli.config.schema import Settings
from paceline.plan.cadence import Cadence
from paceline.run.config import Strategy
from paceline.run.saving.options import Checkpoints
from paceline.run.settings import GROUPS
from paceline.sync.averaging.strategy import Averaging

# Settings of the section `trainer` that are parameters of `Trainer.setup`. Its groups have others of the same name.
_SAME = ("global_batch", "micro_batch", "seed", "exact", "precision", "max_grad_norm", "shuffle")


def setup_arguments(settings: Settings, project_folder: Path, run_folder: Path) -> dict[str, Any]:
    """The keyword arguments of `Trainer.setup` but for model, optimizer, scheduler and data."""
    trainer, saving, data = settings.trainer, settings.checkpoints, settings.data
    arguments = {name: getattr(trainer, name) for name in _SAME}
    others = {"collate_fn": data.collate and data.collate.build(), "fused": trainer.fused_optimizers, "timeline": None}
    for group, kind in GROUPS.items():
        names = [f.name for f in fields(kind) if f.name in others or hasattr(trainer, f.name)]
        arguments[group] = kind(**{n: others[n] if n in others else getattr(trainer, n) for n in names})
    arguments["strategy"] = strategy(trainer.strategy)
    arguments["weight_fn"] = data.weight and data.weight.build()
    if settings.devices == "cpu":
        arguments["device"] = "cpu"
    if saving.init_from is not None:
        arguments["init_from"] = project_folder / saving.init_from
    if saving.save:
        is_path = isinstance(saving.resume, str) and saving.resume != "auto"
        folder = run_folder if saving.folder is None else project_folder / saving.folder
        arguments["checkpoints"] = replace(
            checkpoints(saving, folder),
            resume=project_folder / str(saving.resume) if is_path else saving.resume,
            allow=saving.allow,
            skip=saving.skip,
        )
    return arguments


def strategy(settings: schema.Gradients | schema.Cadence | schema.Averaging) -> Strategy:
    match settings:
        case schema.Gradients():
            return "gradients"
        case schema.Cadence():
            return _cadence(settings)
        case schema.Averaging():
            return Averaging(
                every=settings.every if isinstance(settings.every, int) else _cadence(settings.every),
                first_step=settings.first_step,
                overlap=settings.overlap,
                transfer=settings.transfer,
                outer=None if settings.outer is None else settings.outer.as_function(),
                divergence_threshold=settings.divergence_threshold,
            )


def _cadence(settings: schema.Cadence) -> Cadence:
    hint = settings.speed_hint
    return Cadence(
        anchor=settings.anchor,
        overhead_target=settings.overhead_target,
        max_anchor=settings.max_anchor,
        max_batch_diff=settings.max_batch_diff,
        speed_hint=None if hint is None else (hint.slow_rank, hint.ratio),
    )


def checkpoints(settings: schema.Checkpoints, folder: Path) -> Checkpoints:
    best = settings.keep_best
    return Checkpoints(
        folder,
        every_steps=settings.every_steps,
        every_minutes=settings.every_minutes,
        every_epochs=settings.every_epochs,
        final=settings.final,
        keep_last=settings.keep_last,
        keep_best=None if best is None else (best.metric, best.count, best.mode),
        keep_every=settings.keep_every,
        snapshot_every=settings.snapshot_every,
        leave_out=settings.leave_out,
        on_error=settings.on_error,
        check_replicas=settings.check_replicas,
        disk=settings.disk,
        num_writers=settings.num_writers,
        handle_signals=settings.handle_signals,
    )


def optimizer(settings: Settings) -> Callable[..., Any]:
    """From parameters to an optimizer: the section's, or AdamW with the trainer's learning rate."""
    if settings.optimizer is not None:
        made: Callable[..., Any] = settings.optimizer.as_function()
        return made
    trainer = settings.trainer
    assert trainer.learning_rate is not None, "the file was checked for one"
    return partial(torch.optim.AdamW, lr=trainer.learning_rate, weight_decay=trainer.weight_decay or 0.0)


def scheduler(settings: Settings, steps_per_epoch: int | None) -> Callable[..., Any] | None:
    """From an optimizer to a scheduler: the section's, or the trainer's schedule; None for a constant rate.

    `steps_per_epoch`, None if it is not known, decides the horizon only where neither schedule_steps nor max_steps do.
    """
    if settings.scheduler is not None:
        return partial(_made_scheduler, settings.scheduler)
    trainer = settings.trainer
    if trainer.schedule in (None, "constant") and not trainer.warmup_steps:
        return None
    return partial(LambdaLR, lr_lambda=_rate(trainer, horizon(trainer, steps_per_epoch)))


def _made_scheduler(part: Reference | Factory, optimizer: Any) -> Any:
    made = part.as_function()(optimizer)
    for each in made if isinstance(made, list | tuple) else [made]:
        if not callable(getattr(each, "step", None)) or not callable(getattr(each, "state_dict", None)):
            kind = type(each).__name__
            raise part.site.fail(f"{part.target} made a {kind}: return a scheduler of torch.optim.lr_scheduler")
    return made


def horizon(trainer: schema.Trainer, steps_per_epoch: int | None) -> int | None:
    """The step at which the schedule reaches 0; None for one that never does."""
    if trainer.schedule in (None, "constant"):
        return None
    steps = trainer.schedule_steps or trainer.max_steps
    if steps is None and steps_per_epoch is not None and trainer.epochs is not None:
        steps = trainer.epochs * steps_per_epoch
    if steps is None:
        raise ValueError(
            f"nobody knows how many steps this run has, and schedule={trainer.schedule} ends with the last: "
            "give trainer.schedule_steps"
        )
    if steps <= trainer.warmup_steps:
        raise ValueError(
            f"warmup_steps={trainer.warmup_steps} leave nothing of a schedule of {steps} steps: warm up for fewer"
        )
    return steps


def _rate(trainer: schema.Trainer, steps: int | None) -> Callable[[int], float]:
    """What the learning rate is multiplied by, from the steps that are done."""
    warmup, is_linear = trainer.warmup_steps, trainer.schedule == "linear"

    def rate(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if steps is None:
            return 1.0
        part = min((done - warmup) / (steps - warmup), 1.0)
        return 1.0 - part if is_linear else (1.0 + math.cos(math.pi * part)) / 2

    return rate
