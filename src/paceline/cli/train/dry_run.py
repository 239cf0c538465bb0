"""`paceline train --dry-run`: build everything, try one micro-batch, and say what a run would be."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.api.trainer import Trainer
from paceline.cli.config import Project, parts
from paceline.cli.train.monitor import total_steps
from paceline.cli.train.user_errors import noticing_mistakes
from paceline.cli.train.work import loss_function, model_factory, steps_per_epoch
from paceline.core.world import devices
from paceline.observe import formats
from paceline.plan.shares import shares

# The first pass also compiles, allocates and reads ahead.
NUM_TIMED = 3


def dry_run(project: Project, num_workers: int) -> int:
    """Prints; starts no worker and leaves no file."""
    with ExitStack() as stack:
        with noticing_mistakes():
            trainer, data, evaluation = _prepare(project, stack)
            loss, seconds = _try(trainer, project)
        lines = {
            "project": str(project.path),
            "model": _model(trainer),
            "data": _data(data, evaluation),
            "step": _step(trainer, project),
            "workers": _workers(num_workers, project),
            "memory": _memory(trainer),
            "disk": _disk(trainer, project),
            "loss": f"{loss:.4g} on the first micro-batch",
            "time": _time(trainer, project, num_workers, seconds),
        }
    for name, text in lines.items():
        print(f"{name:<9} {text}")
    return 0


def _prepare(project: Project, stack: ExitStack) -> tuple[Trainer, Any, Any]:
    """A trainer that saves nothing, and the data to train and to evaluate on."""
    settings = project.settings
    project.check_names()
    data = project.data("train")
    evaluation = None if settings.data.evaluation is None else project.data("evaluation")
    arguments = parts.setup_arguments(settings, project.folder, Path())
    for name in ("checkpoints", "balancing"):
        arguments.pop(name, None)
    if isinstance(physical_batch := arguments["batching"].physical_batch, tuple):
        arguments["batching"] = replace(arguments["batching"], physical_batch=physical_batch[0])
    arguments["runtime"] = replace(arguments["runtime"], quiet=True)
    trainer = Trainer.setup(
        model_factory(settings),
        parts.optimizer(settings),
        data=data,
        scheduler=parts.scheduler(settings, steps_per_epoch(data, settings)),
        **arguments,
    )
    return stack.enter_context(trainer), data, evaluation


def _try(trainer: Trainer, project: Project) -> tuple[float, float]:
    """The first micro-batch's loss, and the seconds that one takes."""
    loss_of = loss_function(project.settings)
    first: float | None = None
    seconds = []
    for epoch in trainer.epochs(1):
        for batch in epoch:
            for _ in range(1 + NUM_TIMED):
                start = perf_counter()
                with trainer.autocast():
                    loss = loss_of(trainer.model, batch)
                trainer.backward(loss)
                first = float(loss.detach()) if first is None else first  # waits for the device
                seconds.append(perf_counter() - start)
            break
    assert first is not None
    return first, min(seconds[1:])


def _model(trainer: Trainer) -> str:
    model: Any = trainer.unwrapped_model
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {formats.rate(count)} parameters"


def _data(data: Any, evaluation: Any) -> str:
    def size(part: Any) -> str:
        try:
            return f"{len(part[0] if isinstance(part, tuple) else part)} samples"
        except TypeError:
            return "a stream"

    return size(data) + ("" if evaluation is None else f"; evaluation {size(evaluation)}")


def _step(trainer: Trainer, project: Project) -> str:
    settings = project.settings.trainer
    micro_batch = settings.micro_batch or settings.global_batch
    if settings.global_batch is None:
        return f"as many micro-batches of {micro_batch} samples as the strategy says"
    per_step = settings.global_batch // (micro_batch or 1)
    text = f"{settings.global_batch} samples in {per_step} micro-batches of {micro_batch}"
    if trainer.steps_per_epoch is not None:
        text += f"; {trainer.steps_per_epoch} steps in an epoch"
    total = total_steps(trainer, project)
    return text if total is None else f"{text}; {total} steps in all"


def _workers(num_workers: int, project: Project) -> str:
    found = devices()
    name = torch.cuda.get_device_name(found[0]) if found[0].type == "cuda" else "CPU"
    text = f"{num_workers} on {len(found)} x {name}" if found[0].type == "cuda" else f"{num_workers} on {name}"
    settings = project.settings.trainer
    if settings.global_batch is not None:
        micro_batches = settings.global_batch // (settings.micro_batch or settings.global_batch)
        speeds = settings.shares if isinstance(settings.shares, tuple) else (1.0,) * num_workers
        text += f"; micro-batches per step, to begin with: {':'.join(map(str, shares(micro_batches, speeds)))}"
    return text


def _memory(trainer: Trainer) -> str:
    device = trainer.world.device
    if device.type != "cuda":
        return "not measured on a CPU"
    peak, (_, total) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
    return f"{peak / 2**30:.2f} of {total / 2**30:.1f} GiB in one micro-batch; the optimizer's state comes on top"


def _disk(trainer: Trainer, project: Project) -> str:
    saving = project.settings.checkpoints
    if not saving.save:
        return "the run is not saved"
    weights = sum(p.nbytes for p in trainer.model.parameters())
    size = 3 * weights  # with an optimizer that keeps two numbers for each
    place = Path(project.settings.output)
    while not place.exists():
        place = place.parent if place.parent != place else Path()
    free = shutil.disk_usage(place).free
    kept = "all are kept" if saving.keep_last is None else f"{saving.keep_last} are kept"
    warning = "" if size * (saving.keep_last or 1) < free else "  NOT ENOUGH"
    return f"about {_mb(size)} per checkpoint with Adam, {kept}; {_mb(free)} free in {place.absolute()}{warning}"


def _time(trainer: Trainer, project: Project, num_workers: int, seconds: float) -> str:
    text = f"{1e3 * seconds:.3g} ms per micro-batch here"
    total, settings = total_steps(trainer, project), project.settings.trainer
    if total is None or settings.global_batch is None:
        return text
    per_step = settings.global_batch // (settings.micro_batch or settings.global_batch)
    expected = total * max(shares(per_step, (1.0,) * num_workers)) * seconds
    return f"{text}; about {formats.duration(expected)} for the run, if every worker is as fast"


def _mb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
