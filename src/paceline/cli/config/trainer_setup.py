"""Turns settings into arguments of `Trainer.setup`.

The user's Python objects and torch are imported on demand: project files are checked and shown without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.cli.config import schema
from paceline.cli.config.parts import Part
from paceline.cli.config.schema import ProjectSettings
from paceline.core.imports import optional
from paceline.plan.cadence import Cadence
from paceline.run.config import Strategy
from paceline.run.saving.options import Checkpoints
from paceline.run.settings import GROUPS
from paceline.sync.averaging.settings import Averaging
from paceline.sync.compression.settings import Gradients

T = TypeVar("T")

# Settings that are plain parameters of `Trainer.setup`.
_PLAIN = ("global_batch", "micro_batch", "max_grad_norm", "shuffle", "seed", "exact", "precision")


def setup_arguments(
    settings: ProjectSettings, project_folder: Path, checkpoint_folder: Path, timeline: Path | None = None
) -> dict[str, Any]:
    """The keyword arguments of `Trainer.setup` except model, optimizer, scheduler and data."""
    trainer, saving, data = settings.trainer, settings.checkpoints, settings.data
    arguments = {name: getattr(trainer, name) for name in _PLAIN}
    arguments["strategy"] = strategy(trainer.strategy)
    arguments["weight_fn"] = data.weight and data.weight.build()
    if settings.devices == "cpu":
        arguments["device"] = "cpu"
    if saving.init_from is not None:
        arguments["init_from"] = project_folder / saving.init_from
    if saving.save:
        folder = checkpoint_folder if saving.folder is None else project_folder / saving.folder
        arguments["checkpoints"] = checkpoints(saving, folder, project_folder)
    return arguments | groups(trainer, collate_fn=data.collate and data.collate.build(), timeline=timeline)


def groups(trainer: schema.Trainer, **changes: Any) -> dict[str, Any]:
    """The groups of settings, by the name of their argument."""
    return {name: _make(group, trainer, **changes) for name, group in GROUPS.items()}


def _make(kind: type[T], section: Any, **changes: Any) -> T:
    """An object of the library with the values of a section, except for `changes`."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: changes[name] if name in changes else getattr(section, name) for name in names})


def strategy(settings: schema.Gradients | schema.Cadence | schema.Averaging | schema.SlowLink) -> Strategy:
    if isinstance(settings, schema.SlowLink):
        return "slow link"
    if isinstance(settings, schema.Averaging):
        every = strategy(settings.every) if isinstance(settings.every, schema.Cadence) else settings.every
        return _make(Averaging, settings, every=every, outer=settings.outer and settings.outer.as_function())
    if isinstance(settings, schema.Cadence):
        hint = settings.speed_hint
        return _make(Cadence, settings, speed_hint=hint and (hint.slow_rank, hint.ratio))
    return "gradients" if settings.compress == "fp32" else _make(Gradients, settings)


def checkpoints(settings: schema.Checkpoints, folder: Path, project_folder: Path) -> Checkpoints:
    best, resume = settings.keep_best, settings.resume
    if isinstance(resume, str) and resume != "auto":
        resume = project_folder / resume
    keep_best = best and (best.metric, best.count, best.mode)
    return _make(Checkpoints, settings, folder=folder, keep_best=keep_best, resume=resume)


def optimizer(settings: ProjectSettings) -> Callable[..., Any]:
    """A function from parameters to an optimizer: the section's, or AdamW with the trainer's learning rate."""
    if settings.optimizer is not None:
        return settings.optimizer.as_function()
    import torch

    trainer = settings.trainer
    assert trainer.learning_rate is not None, "checked on load"
    return partial(torch.optim.AdamW, lr=trainer.learning_rate, weight_decay=trainer.weight_decay or 0.0)


def scheduler(settings: ProjectSettings, steps_per_epoch: Callable[[], int | None]) -> Callable[..., Any] | None:
    """A function from an optimizer to a scheduler: the section's, or the trainer's schedule; None for a constant rate.

    steps_per_epoch: returns None if unknown. It is only called if neither schedule_steps nor max_steps is given.
    """
    if settings.scheduler is not None:
        return settings.scheduler.as_function()
    trainer = settings.trainer
    if trainer.schedule in (None, "constant") and not trainer.warmup_steps:
        return None
    from torch.optim.lr_scheduler import LambdaLR

    return partial(LambdaLR, lr_lambda=_rate(trainer, horizon(trainer, steps_per_epoch)))


def horizon(trainer: schema.Trainer, steps_per_epoch: Callable[[], int | None]) -> int | None:
    """The step at which the schedule reaches 0; None if it never does."""
    if trainer.schedule in (None, "constant"):
        return None
    steps = trainer.schedule_steps or trainer.max_steps
    if steps is None and trainer.epochs is not None and (count := steps_per_epoch()) is not None:
        steps = trainer.epochs * count
    if steps is None:
        raise ValueError(
            f"schedule={trainer.schedule} needs the number of steps, which is unknown for this data: "
            "give trainer.schedule_steps"
        )
    if steps <= trainer.warmup_steps:
        raise ValueError(f"warmup_steps={trainer.warmup_steps} must be < {steps}, the steps of the schedule")
    return steps


def _rate(trainer: schema.Trainer, steps: int | None) -> Callable[[int], float]:
    """The factor of the learning rate as a function of the completed steps."""
    warmup, is_linear = trainer.warmup_steps, trainer.schedule == "linear"

    def rate(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if steps is None:
            return 1.0
        part = min((done - warmup) / (steps - warmup), 1.0)
        return 1.0 - part if is_linear else (1.0 + math.cos(math.pi * part)) / 2

    return rate


def build_data(data: schema.Source, folder: Path) -> Any:
    """The opened data set, as `Trainer.setup` takes it. Paths are relative to the folder."""
    from paceline.data.sources.arrow import ArrowSource
    from paceline.data.sources.images import IMAGENET_MEAN, IMAGENET_STD, ImageFolder
    from paceline.data.sources.tokens import TokenFile

    match data:
        case Part():
            return data.build()
        case schema.Tokens():
            return TokenFile(**vars(data) | {"paths": _in(folder, data.paths)})
        case schema.Arrow():
            transform = data.transform and data.transform.build()
            return ArrowSource(**vars(data) | {"paths": _in(folder, data.paths), "transform": transform})
        case schema.Images():
            mean, std = data.mean or IMAGENET_MEAN, data.std or IMAGENET_STD
            return ImageFolder(folder / data.root, data.size, data.augment, data.classes, mean, std)
        case schema.Hf():
            return _hf(data, folder)


def _hf(data: schema.Hf, folder: Path) -> Any:
    datasets = optional("datasets", package="datasets", extra="hf")
    saved = folder / data.path
    if not (saved / "state.json").is_file() and not (saved / "dataset_dict.json").is_file():
        if data.path.startswith((".", "/")) and not saved.exists():
            raise FileNotFoundError(f"there is no data set at {saved}")
        files = None if data.data_files is None else _in(folder, data.data_files)
        path = str(saved) if saved.exists() else data.path
        return datasets.load_dataset(path, data.name, split=data.split, data_files=files, streaming=data.streaming)
    found = datasets.load_from_disk(str(saved))
    if isinstance(found, dict):
        if data.split not in found:
            raise ValueError(f"split={data.split} is not in {saved}: choose from {', '.join(found)}")
        found = found[data.split]
    return found.to_iterable_dataset() if data.streaming else found


def _in(folder: Path, paths: str | tuple[str, ...]) -> str | list[str]:
    return str(folder / paths) if isinstance(paths, str) else [str(folder / path) for path in paths]
