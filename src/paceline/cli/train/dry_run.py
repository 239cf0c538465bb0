"""`paceline train --dry-run`: build everything, try one micro-batch, and describe the run."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.api.trainer import Trainer
from paceline.cli import commands as cli
from paceline.cli.config import Project, trainer_setup
from paceline.cli.config.schema import ProjectSettings
from paceline.cli.train.user_errors import reporting_project_errors
from paceline.cli.train.worker import (
    EARLY_STOPPING,
    KEEP_BEST,
    check_imports,
    evaluated,
    loss_function,
    make_trainer,
    metric_of,
    metrics_function,
    named_metrics,
)
from paceline.core.world import devices
from paceline.observe import formats
from paceline.plan.shares import shares
from paceline.run.memory import memory_report
from paceline.run.settings import Balancing

# After the first pass, which also compiles, allocates and reads ahead.
NUM_TIMED = 3


def dry_run(project: Project, num_workers: int) -> int:
    """Print a description. Starts no worker and leaves no file."""
    settings = project.settings
    with reporting_project_errors():
        check_imports(project)
        evaluation_data, num_evaluated = evaluated(project)
        trainer = make_trainer(settings, project.data("train"), trainer_arguments(project))
    with trainer:
        with reporting_project_errors():
            metrics = {} if evaluation_data is None else _try_evaluation(trainer, settings, evaluation_data)
            loss, seconds = _try(trainer, settings)
        model: Any = trainer.unwrapped_model
        count = sum(parameter.numel() for parameter in model.parameters())
        fields = {
            "project": str(project.path),
            "model": f"{type(model).__name__}, {formats.rate(count)} parameters",
            "data": _size(trainer, settings) + (f"; evaluation {num_evaluated} samples" if num_evaluated else ""),
            **_step(trainer, settings, num_workers, seconds),
            "memory": _memory(trainer, num_workers),
            "disk": _disk(trainer, project),
            "loss": f"{loss:.4g} on the first micro-batch",
            **{f"eval/{name}": f"{float(value):.4g} on the first micro-batch" for name, value in metrics.items()},
        }
    cli.print_fields(fields)
    return 0


def trainer_arguments(project: Project) -> dict[str, Any]:
    """The arguments of a trainer that has one worker and saves nothing."""
    arguments = trainer_setup.setup_arguments(project.settings, project.folder, Path())
    arguments.pop("checkpoints", None)
    arguments["balancing"] = Balancing()
    arguments["runtime"] = replace(arguments["runtime"], quiet=True)
    batching, optimization = arguments["batching"], arguments["optimization"]
    if isinstance(batching.physical_batch, tuple):
        arguments["batching"] = replace(batching, physical_batch=batching.physical_batch[0])
    if isinstance(optimization.shard_by, tuple):
        arguments["optimization"] = replace(optimization, shard_by="auto")
    return arguments


class _TriedError(Exception):
    """Ends an evaluation."""


def _try_evaluation(trainer: Trainer, settings: ProjectSettings, data: Any) -> dict[str, Any]:
    """The metrics of the first micro-batch. Settings that name a metric must name one of them."""
    function, found = metrics_function(trainer, settings), dict[str, Any]()

    def once(model: Any, batch: Any) -> Any:
        if found:
            raise _TriedError  # in the second micro-batch: what was returned for the first one has been checked
        values = function(model, batch)
        found.update(named_metrics(values))
        return values

    with suppress(_TriedError):
        trainer.evaluate(data, once, collate_fn=settings.data.collate and settings.data.collate.build())
    if settings.checkpoints.save and settings.checkpoints.keep_best is not None:
        metric_of(found, settings.checkpoints.keep_best.metric, KEEP_BEST)
    if settings.trainer.early_stopping is not None:
        metric_of(found, settings.trainer.early_stopping.metric, EARLY_STOPPING)
    return found


def _try(trainer: Trainer, settings: ProjectSettings) -> tuple[float, float]:
    """The loss of the first micro-batch, and the seconds per micro-batch."""
    loss_of = loss_function(settings)
    losses, seconds = [], []
    for epoch in trainer.epochs(1):
        for batch in epoch:
            for _ in range(1 + NUM_TIMED):
                start = perf_counter()
                with trainer.autocast():
                    loss = loss_of(trainer.model, batch)
                trainer.backward(loss)
                losses.append(float(loss.detach()))  # waits for the device
                seconds.append(perf_counter() - start)
            break
    return losses[0], min(seconds[1:])


def _size(trainer: Trainer, settings: ProjectSettings) -> str:
    if trainer.run.micro_batches_per_epoch is None:
        return "a stream"
    return f"{trainer.run.steps.num_samples} {'batches' if _is_batched(trainer, settings) else 'samples'}"


def _is_batched(trainer: Trainer, settings: ProjectSettings) -> bool:
    """Whether the data consists of whole batches, so that a step is a number of them."""
    return settings.trainer.batches_per_step == trainer.run.config.global_batch is not None


def _step(trainer: Trainer, settings: ProjectSettings, num_workers: int, micro_batch_s: float) -> dict[str, str]:
    global_batch, steps = trainer.run.config.global_batch, trainer.run.steps
    found = devices()
    is_cuda = found[0].type == "cuda"
    workers = f"{num_workers} on {f'{len(found)} x {torch.cuda.get_device_name(found[0])}' if is_cuda else 'CPU'}"
    time = f"{1e3 * micro_batch_s:.3g} ms per micro-batch"
    if global_batch is None:
        step = f"micro-batches of {steps.micro_batch} samples; the strategy determines their number"
    else:
        count = steps.max_micro_batches
        total = trainer.run.total_steps(settings.trainer.epochs, settings.trainer.max_steps)
        step = f"{global_batch} samples in {count} micro-batches of {steps.micro_batch}"
        if _is_batched(trainer, settings):
            step = f"{count} micro-batches, each a batch of the data"
        if trainer.steps_per_epoch is not None:
            step += f"; {trainer.steps_per_epoch} steps per epoch"
        equal, given = (1.0,) * num_workers, settings.trainer.shares
        divided = shares(count, given if isinstance(given, tuple) else equal)
        workers += f"; initial micro-batches per step: {':'.join(map(str, divided))}"
        if total is not None:
            step += f"; {total} steps in total"
            expected = formats.duration(total * max(shares(count, equal)) * micro_batch_s)
            time += f"; about {expected} for the run, if all workers are this fast"
    return {"step": step, "workers": workers, "time": time}


def _memory(trainer: Trainer, num_workers: int) -> str:
    expected = str(memory_report(trainer.run, num_workers))
    device = trainer.world.device
    if device.type != "cuda":
        return expected
    peak, (_, total) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
    return f"{expected}; one micro-batch took {peak / 1e9:.1f} of {total / 1e9:.1f} GB, without the optimizer's state"


def _disk(trainer: Trainer, project: Project) -> str:
    saving = project.settings.checkpoints
    if not saving.save:
        return "the run is not saved"
    num_bytes = 3 * sum(p.nbytes for p in trainer.model.parameters())  # Adam keeps two numbers per parameter
    own = Path(project.settings.output) if saving.folder is None else project.folder / saving.folder
    folder = nearest_existing(own)
    free = shutil.disk_usage(folder).free
    kept = "all are kept" if saving.keep_last is None else f"{saving.keep_last} are kept"
    warning = "" if num_bytes * (saving.keep_last or 1) < free else "  NOT ENOUGH"
    size = f"about {formats.size(num_bytes)} per checkpoint with Adam, {kept}"
    return f"{size}; {formats.size(free)} free in {folder}{warning}"


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
