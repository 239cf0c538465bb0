"""The part of `paceline train` that runs in every worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from paceline.api.early_stopping import EarlyStopping
from paceline.api.trainer import Trainer
from paceline.checkpoint.folders import latest
from paceline.cli.config import Project, schema, trainer_setup
from paceline.cli.config.errors import fail, nearest
from paceline.cli.config.schema import ProjectSettings
from paceline.cli.train.monitoring import make_monitor
from paceline.cli.train.user_errors import UserFacingError, reporting_project_errors
from paceline.data.adopt import LoadingOptions, adopt, adopt_for_evaluation
from paceline.data.sources.streams import IterableStream
from paceline.observe.run_files import RunFiles
from paceline.observe.worker_status import WorkerStatus
from paceline.plan.cadence import Cadence
from paceline.plan.epoch import Steps
from paceline.run.evaluation.evaluate import preserved_modes
from paceline.run.monitor import MainMonitor
from paceline.run.step.record import StepRecord

# Settings that name a metric.
KEEP_BEST, EARLY_STOPPING = "checkpoints.keep_best.metric", "trainer.early_stopping.metric"


@dataclass(frozen=True)
class RunRequest:
    """A run to start or to resume.

    checkpoint: the checkpoint to resume from; without it, a run that `is_resumed` continues from its newest.
    live_file: where to write progress for the command, which shows it on its terminal; None to print it.
    """

    project: Project
    files: RunFiles
    is_resumed: bool = False
    checkpoint: Path | None = None
    live_file: Path | None = None
    quiet: bool = False


def train(request: RunRequest) -> None:
    """Train as one worker of the run."""
    settings = request.project.settings
    with ExitStack() as stack:
        with reporting_project_errors():
            trainer, monitor, evaluate_last = _prepare(request, stack)
        total = trainer.run.total_steps(settings.trainer.epochs, settings.trainer.max_steps)
        if request.is_resumed and total is not None and trainer.position.step >= total:
            monitor.note(f"all {total} steps are done: to train longer, raise trainer.epochs or trainer.max_steps")
        loss_of = loss_function(settings)
        step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
        for epoch in trainer.epochs(settings.trainer.epochs, max_steps=settings.trainer.max_steps):
            for batch in epoch:
                step(batch)
        evaluate_last()
        monitor.finish(lambda: _result_of_after(trainer, settings))


def _prepare(request: RunRequest, stack: ExitStack) -> tuple[Trainer, MainMonitor, Callable[[], None]]:
    """Import and build everything that the run needs; `stack` closes it.

    Returns the trainer, the monitor, and a function to call after the last step.
    """
    project, files, settings = request.project, request.files, request.project.settings
    check_imports(project)
    data = project.data("train")
    evaluation_data, _ = evaluated(project)
    timeline = files.timeline if settings.trainer.timeline else None
    arguments = trainer_setup.setup_arguments(settings, project.folder, files.checkpoints, timeline)
    saving = arguments.get("checkpoints")
    if saving is not None and request.is_resumed:  # from its own checkpoint, even if it started from another run's
        own = "auto" if saving.resume is None or latest(Path(saving.folder)) else saving.resume
        arguments["checkpoints"] = replace(saving, resume=request.checkpoint or own)
    if request.quiet:
        arguments["runtime"] = replace(arguments["runtime"], quiet=True)
    trainer = stack.enter_context(make_trainer(settings, data, arguments))
    stack.enter_context(WorkerStatus(files, lambda: trainer.world, lambda: trainer.position.step))
    monitor = make_monitor(trainer.run, request, stack)
    if settings.loggers and settings.checkpoints.save:
        trainer.register("loggers", monitor, "global")
    _stop_on_divergence(trainer, settings)
    if settings.data.evaluation is None:
        return trainer, monitor, lambda: None
    return trainer, monitor, _evaluate_periodically(trainer, settings, evaluation_data, monitor)


def make_trainer(settings: ProjectSettings, data: Any, arguments: dict[str, Any]) -> Trainer:
    scheduler = trainer_setup.scheduler(settings, lambda: _steps_per_epoch(data, arguments))
    optimizer = trainer_setup.optimizer(settings)
    return Trainer.setup(model_factory(settings), optimizer, data=data, scheduler=scheduler, **arguments)


def check_imports(project: Project) -> None:
    """Import what the project names, and check that it can be used. Its modules may register a backend."""
    project.check_parts()
    backend = project.settings.trainer.backend
    known = [name for name in torch.distributed.Backend.backend_list if name != "undefined"]
    for part in backend.split(",") if backend is not None else ():
        name = part.rpartition(":")[2].lower()
        if name not in known:
            key = "trainer.backend"
            raise fail(project.origin(key), f"{key}: torch.distributed has no backend {name!r}: {nearest(name, known)}")


def model_factory(settings: ProjectSettings) -> Callable[[], Any]:
    """Builds the model and applies `trainer.gradient_checkpointing` and `trainer.compile`."""
    build = settings.model.as_function()

    def factory() -> Any:
        model = build()
        if settings.trainer.gradient_checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise ValueError(
                    "trainer.gradient_checkpointing requires a model with gradient_checkpointing_enable(), which "
                    f"{type(model).__name__} lacks: call torch.utils.checkpoint in the model, and remove the setting"
                )
            model.gradient_checkpointing_enable()
        return torch.compile(model) if settings.trainer.compile else model

    return factory


def loss_function(settings: ProjectSettings) -> Callable[[Any, Any], torch.Tensor]:
    return (lambda model, batch: model(batch)) if settings.loss is None else settings.loss.as_function()


def evaluated(project: Project) -> tuple[Any, int]:
    """The opened evaluation data and its number of samples. Data that cannot be evaluated, as a stream, is an error."""
    if project.settings.data.evaluation is None:
        return None, 0
    data, collate = project.data("evaluation"), project.settings.data.collate
    collate_fn: Any = collate and collate.build()
    try:
        return data, len(adopt_for_evaluation(data, collate_fn, seed=0).source)
    except (TypeError, ValueError) as error:
        raise fail(project.origin("data.evaluation"), f"data.evaluation: {error}") from error


def _steps_per_epoch(data: Any, arguments: dict[str, Any]) -> int | None:
    """As `Trainer.setup` will count them, for schedules that end with the last epoch; None if unknown."""
    batching, has_cadence = arguments["batching"], isinstance(arguments["strategy"], Cadence)
    options = LoadingOptions.of(batching, arguments["loading"], **arguments, strategy_sets_step=has_cadence)
    adopted = adopt(data, options, arguments["seed"])
    if adopted.global_batch is None or isinstance(adopted.data, IterableStream):
        return None
    sizes = adopted.global_batch, adopted.micro_batch or adopted.global_batch
    return Steps(len(adopted.data), *sizes, batching.drop_last).num_steps


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


def _evaluate_periodically(
    trainer: Trainer, settings: ProjectSettings, data: Any, monitor: MainMonitor
) -> Callable[[], None]:
    """Evaluate on all workers, for metrics, the best checkpoints and early stopping.

    The returned function evaluates the last step, unless that was done.
    """
    function = metrics_function(trainer, settings)
    collate = settings.data.collate and settings.data.collate.build()
    best = settings.checkpoints.keep_best if settings.checkpoints.save else None
    stopping = settings.trainer.early_stopping or schema.EarlyStopping()
    rule = EarlyStopping(stopping.patience, stopping.min_delta, stopping.mode)
    if settings.trainer.early_stopping is not None and settings.checkpoints.save:
        trainer.register("early_stopping", rule)
    last_step = trainer.position.step

    def evaluate(_: Any = None) -> None:
        nonlocal last_step
        last_step = trainer.position.step
        values = named_metrics(trainer.evaluate(data, function, collate_fn=collate))
        monitor.after_evaluation(last_step, values)
        if best is not None:
            trainer.save({best.metric: metric_of(values, best.metric, KEEP_BEST)})
        if settings.trainer.early_stopping is None:
            return
        if rule.is_over(metric_of(values, stopping.metric, EARLY_STOPPING)):
            count = f"{stopping.patience} evaluations"
            monitor.note(f"{stopping.metric} did not improve in {count}: the run ends here")
            trainer.end()

    if settings.trainer.eval_every is None:
        trainer.every_epoch(1, evaluate)
    else:
        trainer.every(settings.trainer.eval_every, evaluate)
    return lambda: evaluate() if trainer.position.step > last_step else None


def metrics_function(trainer: Trainer, settings: ProjectSettings) -> Callable[[Any, Any], Any]:
    """Evaluates a batch: the project's metrics, or its loss."""
    function = loss_function(settings) if settings.metrics is None else settings.metrics.as_function()

    def in_precision(model: Any, batch: Any) -> Any:
        with trainer.autocast():
            return function(model, batch)

    return in_precision


def named_metrics(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {"loss": found}


def metric_of(values: dict[str, float], name: str, key: str) -> float:
    """The metric that a setting names."""
    if name not in values:
        raise UserFacingError(f"{key}={name} is not a metric of the evaluation: choose from {', '.join(values)}")
    return values[name]


def _result_of_after(trainer: Trainer, settings: ProjectSettings) -> str | None:
    """The text that the project's `after` returns for the trained model."""
    if settings.after is None:
        return None
    model = trainer.unwrapped_model
    with preserved_modes(model), torch.no_grad():
        result = settings.after.as_function()(model.eval())
    return None if result is None else str(result)
