"""The part of one worker in a run of the builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.api.trainer import Trainer
from paceline.comm.messages import gather
from paceline.core.world import World
from paceline.data.feeds.device import map_items
from paceline.plan.epoch import Position
from paceline.run.epoch_metrics import EpochMetrics, Tally
from paceline.run.evaluation.evaluate import preserved_modes
from paceline.run.launching.background import Channel
from paceline.run.saving.state import model_state, optimizer_state
from paceline.run.saving.stopping import Stopped
from paceline.run.step.build import named_parameters
from paceline.run.step.record import StepRecord


@dataclass(frozen=True)
class TrainedState:
    """The state of a run at its end, on the host.

    model: a state_dict. parameters, buffers: the same tensors by kind; tied parameters appear once. optimizer: its
    state_dict; where replicas are averaged, rank 0's. position: the first step that was not taken.
    """

    model: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: Any
    position: Position


@dataclass(frozen=True)
class WorkerTask:
    """Everything a worker needs, sent by value. `settings` are parameters of `Trainer.setup`."""

    model_factory: Callable[[], Any]
    optim_factory: Callable[[list[torch.Tensor]], Any]
    train_fn: Callable[[Any, Any], Any]
    dataset: Any
    num_epochs: int
    devices: tuple[torch.device, ...]  # of the workers on this machine, by local rank
    settings: Mapping[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0
    checkpoint_every: int = 1
    checkpoint_fn: Callable[[int, Any], object] | None = None
    epoch_fn: Callable[[int, Any], object] | None = None
    metrics_fn: Callable[[EpochMetrics], object] | None = None


def train(task: WorkerTask, channel: Channel) -> TrainedState:
    """Train on this worker."""
    with Trainer.setup(
        task.model_factory,
        partial(_scaled, task.optim_factory, task.lr_factor),
        data=task.dataset,
        device=task.devices[World.from_environment("cpu").local_rank],
        **task.settings,
    ) as trainer:
        run = trainer.run
        tally = Tally(run)

        def loss_of(batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
            with run.autocast():
                return _loss_and_scalars(task.train_fn(run.model, batch))

        def after_step(record: StepRecord) -> None:
            tally.add(record)
            if channel.is_stop_requested():
                trainer.request_stop()

        trainer.every(1, after_step)
        step = run.stepping.with_function(loss_of)
        try:
            for epoch in trainer.epochs(task.num_epochs):
                tally.begin()
                for batch in epoch:
                    if scalars := step.run_micro_batch(batch):
                        tally.note(scalars, run.loop.open.weight)
                    trainer.step()
                metrics = tally.end(epoch.number)
                channel.send(metrics.to_dict())
                if _call_back(task, trainer, metrics):
                    break
        except Stopped:
            pass  # on all workers after the same step
        return _state(trainer)


def _loss_and_scalars(returned: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    loss, scalars = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, torch.Tensor) or not isinstance(scalars, Mapping):
        raise TypeError(
            f"train_fn returned a {type(returned).__name__}: return the micro-batch's loss, a tensor with one number, "
            'or (loss, {"name": number})'
        )
    return loss, scalars


def _call_back(task: WorkerTask, trainer: Trainer, metrics: EpochMetrics) -> bool:
    """Call the callbacks of an epoch's end. Returns whether one of any worker asked to end the run."""
    answers: list[object] = []
    with preserved_modes(trainer.model):  # a callback may leave the model in evaluation mode
        if task.checkpoint_fn is not None and trainer.is_main and (metrics.epoch + 1) % task.checkpoint_every == 0:
            task.checkpoint_fn(metrics.epoch, trainer.model)
        if task.epoch_fn is not None:
            answers.append(task.epoch_fn(metrics.epoch, trainer.model))
        if task.metrics_fn is not None and trainer.is_main:
            answers.append(task.metrics_fn(metrics))
    if task.epoch_fn is None and task.metrics_fn is None:
        return False
    wants_end = any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers)
    run = trainer.run
    return any(run.together(lambda: gather("end" if wants_end else "", run.communicator)))


def _scaled(factory: Callable[[list[torch.Tensor]], Any], factor: float, parameters: list[torch.Tensor]) -> Any:
    """The optimizers, with their learning rates multiplied by `factor`."""
    made = factory(parameters)
    for optimizer in made if isinstance(made, list | tuple) else [made]:
        for group in getattr(optimizer, "param_groups", ()) if factor != 1.0 else ():  # the run refuses other objects
            group["lr"] = group["lr"] * factor
    return made


def _state(trainer: Trainer) -> TrainedState:
    """The final state, copied to the host. Tensors that share memory share it in the copy."""
    model = trainer.unwrapped_model
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if memory not in copies:
                copies[memory] = value.detach().to("cpu", copy=True)
            return copies[memory]
        return map_items(value, copied)

    return TrainedState(
        model=copied(model_state(model)),
        parameters=copied(named_parameters(model)),
        buffers=copied(dict(model.named_buffers()) if isinstance(model, nn.Module) else {}),
        optimizer=copied(optimizer_state(trainer.run.loop.replica, lambda _: True)),
        position=trainer.position,
    )
