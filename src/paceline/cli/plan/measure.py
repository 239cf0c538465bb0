"""Measures a project on this machine's devices: each kind alone, then all together, in separate processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from paceline.api.trainer import Trainer
from paceline.cli.commands import CommandError
from paceline.cli.config import Project, trainer_setup
from paceline.cli.train.dry_run import trainer_arguments
from paceline.cli.train.user_errors import UserFacingError, reporting_project_errors, user_facing
from paceline.cli.train.worker import loss_function, make_trainer, model_factory
from paceline.core.errors import WorkerError
from paceline.core.world import device_count, devices
from paceline.plan.predict import Device
from paceline.plan.profile import Profile, StepTimes
from paceline.run import probe
from paceline.run.launching.launch import Launch, launch_workers
from paceline.run.micro_batch_finder import FoundMicroBatch
from paceline.sync.averaging.settings import Averaging

T = TypeVar("T")


def measure(project: Project, num_steps: int) -> Profile:
    """This machine's profile."""
    kinds = _kinds()
    profiles = [_launch(_profile, 1, project, numbers[0], num_steps)[0] for numbers in kinds.values()]
    counts = tuple(map(len, kinds.values()))
    profile = replace(
        profiles[0],
        devices=tuple(own.devices[0] for own in profiles),
        counts=counts,
        cores=min(profiles[0].cores, probe.cpu_quota()),  # the workers share a container's quota
        epochs=project.settings.trainer.epochs,
    )
    everyone: list[Device] = [
        device for device, count in zip(profile.devices, counts, strict=True) for _ in range(count)
    ]
    if len(everyone) == 1:
        return profile
    _, together = _launch(_profile, len(everyone), project, None, num_steps)
    return profile.with_company(together, everyone)


def find(project: Project, num_workers: int) -> FoundMicroBatch:
    return _launch(_find, num_workers, project)


def _profile(project: Project, number: int | None, num_steps: int) -> tuple[Profile, StepTimes]:
    """Runs in a worker. number: the GPU to use; None for this worker's own."""
    settings = project.settings
    with reporting_project_errors():
        project.check_parts()
        arguments = trainer_arguments(project)
        if not torch.cuda.is_available() and arguments["runtime"].threads is None:  # the same alone and together
            arguments["runtime"] = replace(arguments["runtime"], threads=1)
        if arguments["strategy"] == "slow link" or isinstance(arguments["strategy"], Averaging):
            arguments["strategy"] = "gradients"  # workers that average report times only when they do
        if number is not None and torch.cuda.is_available():
            arguments["device"] = f"cuda:{number}"
        data = project.data("train")
        trainer = make_trainer(settings, data, arguments)
        size, steps = trainer.world.size, trainer.run.steps
        if trainer.run.config.max_micro_batches(size) < size:  # every worker needs one to be measured
            trainer.close()
            if arguments["batching"].batches_per_step is None:
                arguments |= {"global_batch": size * steps.micro_batch, "micro_batch": steps.micro_batch}
            else:
                arguments["batching"] = replace(arguments["batching"], batches_per_step=size)
            trainer = make_trainer(settings, data, arguments)
    loss_of = loss_function(settings)
    with trainer:
        step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
        return probe.profile(trainer.run, step, num_steps)


def _find(project: Project) -> FoundMicroBatch:
    """Runs in a worker."""
    settings = project.settings
    with reporting_project_errors():
        project.check_parts()
        if settings.trainer.global_batch is None:
            raise ValueError("--find micro_batch divides the global batch: give trainer.global_batch")
        arguments = trainer_arguments(project)
        return Trainer.find_micro_batch(
            model_factory(settings),
            trainer_setup.optimizer(settings),
            loss_function(settings),
            data=project.data("train"),
            global_batch=settings.trainer.global_batch,
            precision=settings.trainer.precision,
            exact=settings.trainer.exact,
            collate_fn=arguments["loading"].collate_fn,
            runtime=arguments["runtime"],
        )


def _kinds() -> dict[str, list[int]]:
    """The numbers of this machine's GPUs, by name. CPU workers: two, if there are two cores, to measure contention."""
    found: dict[str, list[int]] = {}
    device_count()  # finds out which GPUs cannot run a kernel
    for device in devices():
        if device.type == "cpu":
            return {"cpu": list(range(min(2, len(os.sched_getaffinity(0)))))}
        found.setdefault(torch.cuda.get_device_name(device), []).append(device.index)
    return found


def _launch(work: Callable[..., T], num_workers: int, *arguments: Any) -> T:
    """Rank 0's result. Errors in the project become one message."""
    try:
        result: T = launch_workers(work, arguments, {}, Launch(num_workers))
        return result
    except (WorkerError, UserFacingError) as error:
        reason = user_facing(error)
        raise CommandError(str(reason or error), 2 if reason else 1) from error
