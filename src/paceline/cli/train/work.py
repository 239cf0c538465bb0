"""What each worker of `paceline train` does: build the parts, train, evaluate, write down how it goes."""

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
from paceline.cli.config import Project, parts
from paceline.cli.config.errors import fail, nearest
from paceline.cli.config.schema import Settings
from paceline.cli.train.monitor import Watch
from paceline.cli.train.user_errors import Told, noticing_mistakes
from paceline.observe.loggers.base import Loggers
from paceline.observe.run_files import RunFiles
from paceline.run.step.loop import StepRecord


@dataclass(frozen=True)
class Assignment:
    """What a worker is told. `terminal`: where the leading one may show its progress, if anywhere but in its output.

    `checkpoint`: the one to go on from; else a run that `is_resumed` goes on from its newest.
    """

    project: Project
    files: RunFiles
    is_resumed: bool = False
    checkpoint: Path | None = None
    terminal: str | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Prepared:
    """A run that is put together."""

    trainer: Trainer
    watch: Watch | None
    evaluation: Evaluation | None


def train(assignment: Assignment) -> None:
    """One worker's part of the run."""
    settings = assignment.project.settings
    with ExitStack() as stack:
        with noticing_mistakes():
            run = _prepare(assignment, stack)
        trainer, loss_of = run.trainer, loss_function(settings)
        step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
        for epoch in trainer.epochs(settings.trainer.epochs, max_steps=settings.trainer.max_steps):
            for batch in epoch:
                step(batch)
        if run.evaluation is not None:
            run.evaluation.finish()
        if run.watch is not None:
            run.watch.finish(_last_words(trainer, settings))


def _prepare(assignment: Assignment, stack: ExitStack) -> Prepared:
    """Everything that the run needs, imported and built; `stack` closes it."""
    project, files = assignment.project, assignment.files
    settings = project.settings
    project.check_names()
    data = project.data("train")
    evaluation_data = None if settings.data.evaluation is None else project.data("evaluation")
    arguments = parts.setup_arguments(settings, project.folder, files.checkpoints)
    _check_backend(project)
    if settings.trainer.timeline:
        arguments["runtime"] = replace(arguments["runtime"], timeline=files.timeline)
    if (saving := arguments.get("checkpoints")) is not None:
        if assignment.checkpoint is not None:
            arguments["checkpoints"] = replace(saving, resume=assignment.checkpoint)
        elif assignment.is_resumed and saving.resume is None:
            arguments["checkpoints"] = replace(saving, resume="auto")
    trainer = stack.enter_context(
        Trainer.setup(
            model_factory(settings),
            parts.optimizer(settings),
            data=data,
            scheduler=parts.scheduler(settings, steps_per_epoch(data, settings)),
            **arguments,
        )
    )
    watch = None
    if trainer.is_main:
        watch = stack.enter_context(Watch(trainer, project, files, assignment.terminal, quiet=assignment.quiet))
    if settings.loggers and settings.checkpoints.save:
        trainer.register("loggers", Loggers([]) if watch is None else watch.loggers, "global")
    _follow(trainer, settings, watch)
    evaluation = None
    if evaluation_data is not None:
        evaluation = Evaluation(trainer, settings, evaluation_data, watch)
    return Prepared(trainer, watch, evaluation)


def _check_backend(project: Project) -> None:
    """Only here: a module of the project may have registered one of its own."""
    backend = project.settings.trainer.backend
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    for part in backend.split(",") if backend is not None else ():
        name = part.rpartition(":")[2].lower()
        if name not in known:
            key = "trainer.backend"
            raise fail(project.origin(key), f"{key}: torch.distributed has no backend {name!r}: {nearest(name, known)}")


def model_factory(settings: Settings) -> Callable[[], Any]:
    """What builds the model, with what `trainer.compile` and `trainer.gradient_checkpointing` ask for."""
    build = settings.model.as_function()

    def factory() -> Any:
        model = build()
        if settings.trainer.gradient_checkpointing:
            enable = getattr(model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise ValueError(
                    f"trainer.gradient_checkpointing needs a model with gradient_checkpointing_enable(), which "
                    f"{type(model).__name__} lacks: call torch.utils.checkpoint in the model, and leave the setting out"
                )
            enable()
        return torch.compile(model) if settings.trainer.compile else model

    return factory if settings.trainer.gradient_checkpointing or settings.trainer.compile else build


def loss_function(settings: Settings) -> Callable[[Any, Any], torch.Tensor]:
    if settings.loss is not None:
        loss: Callable[[Any, Any], torch.Tensor] = settings.loss.as_function()
        return loss
    return lambda model, batch: model(batch)


def steps_per_epoch(data: Any, settings: Settings) -> int | None:
    """What a schedule over epochs needs to know; None where nobody does."""
    samples = data.dataset if isinstance(data, DataLoader) else data
    global_batch = settings.trainer.global_batch
    if global_batch is None or not isinstance(samples, Sized):
        return None
    if isinstance(samples, tuple):  # columns
        samples = samples[0]
    count = len(samples)
    return count // global_batch if settings.trainer.drop_last else -(-count // global_batch)


def _follow(trainer: Trainer, settings: Settings, watch: Watch | None) -> None:
    """Tell the watch of every step, and end a run whose loss has left for good."""
    if watch is not None:
        trainer.every(1, watch.after_step)
    limit = settings.trainer.max_loss_ratio
    lowest = math.inf

    def check(record: StepRecord) -> None:
        nonlocal lowest
        lowest = min(lowest, record.loss)
        if limit is not None and lowest > 0 and record.loss > limit * lowest:
            raise Told(
                f"the loss is {record.loss:.6g} at step {record.step}, more than trainer.max_loss_ratio={limit:g} "
                f"times its lowest, {lowest:.6g}: the run diverges; lower the learning rate, or clip with max_grad_norm"
            )

    if limit is not None:
        trainer.every(settings.trainer.log_every, check)


class Evaluation:
    """Evaluates regularly, on all workers together: for the metrics, the best checkpoints, and an early end."""

    def __init__(self, trainer: Trainer, settings: Settings, data: Any, watch: Watch | None) -> None:
        self._trainer = trainer
        self._settings = settings
        self._data = data
        self._watch = watch
        self._last_step = trainer.position.step
        self._function = settings.metrics.as_function() if settings.metrics is not None else loss_function(settings)
        self._collate = settings.data.collate and settings.data.collate.build()
        stopping = settings.trainer.early_stopping
        self._rule = None if stopping is None else EarlyStopping(stopping.patience, stopping.min_delta, stopping.mode)
        if self._rule is not None and settings.checkpoints.save:
            trainer.register("early_stopping", self._rule)
        if settings.trainer.eval_every is not None:
            trainer.every(settings.trainer.eval_every, lambda _: self._evaluate())
        else:
            trainer.every_epoch(1, lambda _: self._evaluate())

    def finish(self) -> None:
        """The last step may have come in the middle of an interval."""
        if self._trainer.position.step > self._last_step:
            self._evaluate()

    def _evaluate(self) -> None:
        self._last_step = self._trainer.position.step
        found = self._trainer.evaluate(self._data, self._in_precision, collate_fn=self._collate)
        values = found if isinstance(found, dict) else {"loss": found}
        if self._watch is not None:
            self._watch.after_evaluation(self._last_step, values)
        best = self._settings.checkpoints.keep_best
        if self._settings.checkpoints.save and best is not None:
            self._trainer.save(_only(values, best.metric, "checkpoints.keep_best.metric"))
        self._stop_if_no_better(values)

    def _in_precision(self, model: Any, batch: Any) -> Any:
        with self._trainer.autocast():
            return self._function(model, batch)

    def _stop_if_no_better(self, values: dict[str, float]) -> None:
        stopping = self._settings.trainer.early_stopping
        if self._rule is None or stopping is None:
            return
        if self._rule.is_over(_only(values, stopping.metric, "trainer.early_stopping.metric")[stopping.metric]):
            if self._watch is not None:
                self._watch.note(f"no better {stopping.metric} in {stopping.patience} evaluations: the run ends here")
            self._trainer.end()


def _only(values: dict[str, float], name: str, key: str) -> dict[str, float]:
    if name not in values:
        raise Told(f"{key}={name} is not among what the evaluation gives: choose one of {', '.join(values)}")
    return {name: values[name]}


def _last_words(trainer: Trainer, settings: Settings) -> str | None:
    """What the project has to say about the trained model."""
    if settings.after is None:
        return None
    model = trainer.unwrapped_model
    was_training = model.training
    try:
        with torch.no_grad():
            said = settings.after.as_function()(model.eval())
    finally:
        model.train(was_training)
    return None if said is None else str(said)
