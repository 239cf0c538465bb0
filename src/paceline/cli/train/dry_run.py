"""`paceline train --dry-run`: build everything, try one micro-batch, and describe the run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.api.trainer import Trainer
from paceline.cli.config import Project, trainer_setup
from paceline.cli.config.schema import ProjectSettings
from paceline.cli.train.monitor import total_steps
from paceline.cli.train.user_errors import reporting_project_errors
from paceline.cli.train.worker import loss_function, make_trainer
from paceline.core.world import devices
from paceline.observe import formats
from paceline.plan.shares import shares
from paceline.run.settings import Balancing

# After the first pass, which also compiles, allocates and reads ahead.
NUM_TIMED = 3


def dry_run(project: Project, num_workers: int) -> int:
    """Print a description. Starts no worker and leaves no file."""
    settings = project.settings
    with reporting_project_errors():
        project.check_parts()
        data = project.data("train")
        sizes = _size(data)
        if settings.data.evaluation is not None:
            sizes += f"; evaluation {_size(project.data('evaluation'))}"
        trainer = make_trainer(settings, data, _arguments(project))
    with trainer:
        with reporting_project_errors():
            loss, seconds = _try(trainer, settings)
        model: Any = trainer.unwrapped_model
        count = sum(parameter.numel() for parameter in model.parameters())
        lines = {
            "project": str(project.path),
            "model": f"{type(model).__name__}, {formats.rate(count)} parameters",
            "data": sizes,
            "step": _step(trainer, settings),
            "workers": _workers(num_workers, settings),
            "memory": _memory(trainer),
            "disk": _disk(trainer, settings),
            "loss": f"{loss:.4g} on the first micro-batch",
            "time": _time(trainer, settings, num_workers, seconds),
        }
    for name, text in lines.items():
        print(f"{name:<9} {text}")
    return 0


def _arguments(project: Project) -> dict[str, Any]:
    """The arguments of a trainer that has one worker and saves nothing."""
    arguments = trainer_setup.setup_arguments(project.settings, project.folder, Path())
    arguments.pop("checkpoints", None)
    arguments["balancing"] = Balancing()
    arguments["runtime"] = replace(arguments["runtime"], quiet=True)
    physical_batch = arguments["batching"].physical_batch
    if isinstance(physical_batch, tuple):
        arguments["batching"] = replace(arguments["batching"], physical_batch=physical_batch[0])
    return arguments


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


def _size(data: Any) -> str:
    try:
        return f"{len(data[0] if isinstance(data, tuple) else data)} samples"
    except TypeError:
        return "a stream"


def _micro_batches(settings: ProjectSettings) -> int | None:
    """Micro-batches per step; None if the strategy determines it."""
    trainer = settings.trainer
    return trainer.global_batch and trainer.global_batch // (trainer.micro_batch or trainer.global_batch)


def _step(trainer: Trainer, settings: ProjectSettings) -> str:
    global_batch, micro_batch = settings.trainer.global_batch, settings.trainer.micro_batch
    if global_batch is None:
        return f"micro-batches of {micro_batch} samples; the strategy determines their number"
    text = f"{global_batch} samples in {_micro_batches(settings)} micro-batches of {micro_batch or global_batch}"
    if trainer.steps_per_epoch is not None:
        text += f"; {trainer.steps_per_epoch} steps per epoch"
    total = total_steps(trainer, settings)
    return text if total is None else f"{text}; {total} steps in total"


def _workers(num_workers: int, settings: ProjectSettings) -> str:
    found = devices()
    is_cuda = found[0].type == "cuda"
    text = f"{num_workers} on {f'{len(found)} x {torch.cuda.get_device_name(found[0])}' if is_cuda else 'CPU'}"
    if (count := _micro_batches(settings)) is not None:
        given = settings.trainer.shares
        divided = shares(count, given if isinstance(given, tuple) else (1.0,) * num_workers)
        text += f"; initial micro-batches per step: {':'.join(map(str, divided))}"
    return text


def _memory(trainer: Trainer) -> str:
    device = trainer.world.device
    if device.type != "cuda":
        return "not measured on a CPU"
    peak, (_, total) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
    return f"{peak / 2**30:.2f} of {total / 2**30:.1f} GiB in one micro-batch, without the optimizer's state"


def _disk(trainer: Trainer, settings: ProjectSettings) -> str:
    saving = settings.checkpoints
    if not saving.save:
        return "the run is not saved"
    size = 3 * sum(p.nbytes for p in trainer.model.parameters())  # Adam keeps two numbers per parameter
    folder = Path(settings.output).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    kept = "all are kept" if saving.keep_last is None else f"{saving.keep_last} are kept"
    warning = "" if size * (saving.keep_last or 1) < free else "  NOT ENOUGH"
    return f"about {_bytes(size)} per checkpoint with Adam, {kept}; {_bytes(free)} free in {folder}{warning}"


def _time(trainer: Trainer, settings: ProjectSettings, num_workers: int, seconds: float) -> str:
    text, total, count = (
        f"{1e3 * seconds:.3g} ms per micro-batch",
        total_steps(trainer, settings),
        _micro_batches(settings),
    )
    if total is None or count is None:
        return text
    expected = total * max(shares(count, (1.0,) * num_workers)) * seconds
    return f"{text}; about {formats.duration(expected)} for the run, if all workers are this fast"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
