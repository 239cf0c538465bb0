"""The part of `paceline train` that runs in every worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader

from paceline.api.early_stopping import EarlyStopping
from paceline.api.trainer import Trainer
from paceline.cli.config import Project, trainer_setup
from paceline.cli.config.errors import fail, nearest
from paceline.cli.config.schema import ProjectSettings
from paceline.cli.train.monitor import Monitor
from paceline.cli.train.user_errors import UserFacingError, reporting_project_errors
from paceline.observe.loggers import Loggers
from paceline.observe.run_files import RunFiles
from paceline.run.step.loop import StepRecord


@dataclass(frozen=True)
class RunRequest:
    """A run to start or to resume.

    checkpoint: the one to resume from; without it, a run that `is_resumed` continues from its newest.
    terminal: name of the terminal to show progress on; None for the process's own output.
    """

    project: Project
    files: RunFiles
    is_resumed: bool = False
    checkpoint: Path | None = None
    terminal: str | None = None
    quiet: bool = False


def train(request: RunRequest) -> None:
    """Train as one worker of the run."""
    settings = request.project.settings
    with ExitStack() as stack:
        with reporting_project_errors():
            trainer, monitor, evaluation = _prepare(request, stack)
        loss_of = loss_function(settings)
        step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
        for epoch in trainer.epochs(settings.trainer.epochs, max_steps=settings.trainer.max_steps):
            for batch in epoch:
                step(batch)
        if evaluation is not None:
            evaluation.finish()
        if monitor is not None:
            monitor.finish(_result_of_after(trainer, settings))


def _prepare(request: RunRequest, stack: ExitStack) -> tuple[Trainer, Monitor | None, Evaluation | None]:
    """Import and build everything that the run needs; `stack` closes it. Only rank 0 has a monitor."""
    project, files, settings = request.project, request.files, request.project.settings
    project.check_parts()
    _check_backend(project)
    data = project.data("train")
    evaluation_data = None if settings.data.evaluation is None else project.data("evaluation")
    timeline = files.timeline if settings.trainer.timeline else None
    arguments = trainer_setup.setup_arguments(settings, project.folder, files.checkpoints, timeline)
    saving = arguments.get("checkpoints")
    if saving is not None and request.checkpoint is not None:
        arguments["checkpoints"] = replace(saving, resume=request.checkpoint)
    elif saving is not None and request.is_resumed and saving.resume is None:
        arguments["checkpoints"] = replace(saving, resume="auto")
    trainer = stack.enter_context(make_trainer(settings, data, arguments))
    monitor = None
    if trainer.is_main:
        monitor = stack.enter_context(Monitor(trainer, project, files, request.terminal, quiet=request.quiet))
        trainer.every(1, monitor.after_step)
    if settings.loggers and settings.checkpoints.save:
        trainer.register("loggers", Loggers([]) if monitor is None else monitor.loggers, "global")
    _stop_on_divergence(trainer, settings)
    evaluation = None if evaluation_data is None else Evaluation(trainer, settings, evaluation_data, monitor)
    return trainer, monitor, evaluation


def make_trainer(settings: ProjectSettings, data: Any, arguments: dict[str, Any]) -> Trainer:
    scheduler = trainer_setup.scheduler(settings, _steps_per_epoch(data, settings))
    optimizer = trainer_setup.optimizer(settings)
    return Trainer.setup(_model_factory(settings), optimizer, data=data, scheduler=scheduler, **arguments)


def _check_backend(project: Project) -> None:
    """After the imports, because a module of the project may register a backend."""
    backend = project.settings.trainer.backend
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    for part in backend.split(",") if backend is not None else ():
        name = part.rpartition(":")[2].lower()
        if name not in known:
            key = "trainer.backend"
            raise fail(project.origin(key), f"{key}: torch.distributed has no backend {name!r}: {nearest(name, known)}")


def _model_factory(settings: ProjectSettings) -> Callable[[], Any]:
    """Builds the model and applies `trainer.gradient_checkpointing` and `trainer.compile`."""
    build = settings.model.as_function()

    def factory() -> Any:
        model = build()
        if settings.trainer.gradient_checkpointing:
            enable = getattr(model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ValueError(
                    "trainer.gradient_checkpointing requires a model with gradient_checkpointing_enable(), which "
                    f"{type(model).__name__} lacks: call torch.utils.checkpoint in the model, and remove the setting"
                )
            enable()
        return torch.compile(model) if settings.trainer.compile else model

    return factory if settings.trainer.gradient_checkpointing or settings.trainer.compile else build


def loss_function(settings: ProjectSettings) -> Callable[[Any, Any], torch.Tensor]:
    if settings.loss is not None:
        loss: Callable[[Any, Any], torch.Tensor] = settings.loss.as_function()
        return loss
    return lambda model, batch: model(batch)


def _steps_per_epoch(data: Any, settings: ProjectSettings) -> int | None:
    """For schedules that end with the last epoch; None if unknown."""
    samples = data.dataset if isinstance(data, DataLoader) else data
    global_batch = settings.trainer.global_batch
    if global_batch is None or not isinstance(samples, Sized):
        return None
    count = len(samples[0] if isinstance(samples, tuple) else samples)  # a tuple holds columns
    return count // global_batch if settings.trainer.drop_last else -(-count // global_batch)


def _stop_on_divergence(trainer: Trainer, settings: ProjectSettings) -> None:
    limit, lowest = settings.trainer.max_loss_ratio, math.inf
    if limit is None:
        return

    def check(record: StepRecord) -> None:
        nonlocal lowest
        lowest = min(lowest, record.loss)
        if lowest > 0 and record.loss > limit * lowest:
            raise UserFacingError(
                f"the run diverges: the loss is {record.loss:.6g} at step {record.step}, more than "
                f"trainer.max_loss_ratio={limit:g} times its minimum, {lowest:.6g}; lower the learning rate, or clip "
                "gradients with max_grad_norm"
            )

    trainer.every(settings.trainer.log_every, check)


class Evaluation:
    """Evaluates periodically on all workers: for metrics, the best checkpoints and early stopping."""

    def __init__(self, trainer: Trainer, settings: ProjectSettings, data: Any, monitor: Monitor | None) -> None:
        self._trainer = trainer
        self._data = data
        self._monitor = monitor
        self._last_step = trainer.position.step
        self._function = settings.metrics.as_function() if settings.metrics is not None else loss_function(settings)
        self._collate = settings.data.collate and settings.data.collate.build()
        self._best = settings.checkpoints.keep_best if settings.checkpoints.save else None
        self._stopping = stopping = settings.trainer.early_stopping
        self._rule = None if stopping is None else EarlyStopping(stopping.patience, stopping.min_delta, stopping.mode)
        if self._rule is not None and settings.checkpoints.save:
            trainer.register("early_stopping", self._rule)
        if settings.trainer.eval_every is not None:
            trainer.every(settings.trainer.eval_every, lambda _: self._evaluate())
        else:
            trainer.every_epoch(1, lambda _: self._evaluate())

    def finish(self) -> None:
        """Evaluate the last step, unless that was done."""
        if self._trainer.position.step > self._last_step:
            self._evaluate()

    def _evaluate(self) -> None:
        self._last_step = self._trainer.position.step
        found = self._trainer.evaluate(self._data, self._in_precision, collate_fn=self._collate)
        values = found if isinstance(found, dict) else {"loss": found}
        if self._monitor is not None:
            self._monitor.after_evaluation(self._last_step, values)
        if self._best is not None:
            value = _metric(values, self._best.metric, "checkpoints.keep_best.metric")
            self._trainer.save({self._best.metric: value})
        if self._rule is not None and self._stopping is not None:
            name, patience = self._stopping.metric, self._stopping.patience
            if self._rule.is_over(_metric(values, name, "trainer.early_stopping.metric")):
                if self._monitor is not None:
                    self._monitor.note(f"{name} did not improve in {patience} evaluations: the run ends here")
                self._trainer.end()

    def _in_precision(self, model: Any, batch: Any) -> Any:
        with self._trainer.autocast():
            return self._function(model, batch)


def _metric(values: dict[str, float], name: str, key: str) -> float:
    if name not in values:
        raise UserFacingError(f"{key}={name} is not a metric of the evaluation: choose from {', '.join(values)}")
    return values[name]


def _result_of_after(trainer: Trainer, settings: ProjectSettings) -> str | None:
    """The text that the project's `after` returns for the trained model."""
    if settings.after is None:
        return None
    model = trainer.unwrapped_model
    was_training = model.training
    try:
        with torch.no_grad():
            result = settings.after.as_function()(model.eval())
    finally:
        model.train(was_training)
    return None if result is None else str(result)
