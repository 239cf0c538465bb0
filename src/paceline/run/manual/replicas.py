"""Replicas in the user's hands: checked against each other, put in their places, joined to those of other processes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.errors import MisuseError
from paceline.core.world import World, choose_device
from paceline.plan.shares import Plan, ranges
from paceline.run.determinism import process_settings
from paceline.run.step.replica import build_model, named_parameters, refuse_wrapped
from paceline.sync.replica_gradients import ReplicaGradients


@dataclass(frozen=True)
class Replicas:
    """The replicas of this process, joined to those of all others. `cleanup` takes it apart again."""

    models: tuple[Any, ...]
    devices: tuple[torch.device, ...]
    ranks: range
    gradients: ReplicaGradients
    communicator: Communicator
    cleanup: ExitStack

    def broadcast_state(self) -> None:
        """Replica 0's parameters, frozen ones too, and buffers to all."""
        self._broadcast([{**named_parameters(model), **_named_buffers(model)} for model in self.models])

    def broadcast_buffers(self) -> None:
        """Replica 0's buffers to all."""
        self._broadcast([_named_buffers(model) for model in self.models])

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Mapping[str, torch.Tensor]]) -> None:
        first, *others = [list(own.values()) for own in tensors]
        _broadcast_from_rank_0(first, self.communicator)
        for other in others:
            for target, source in zip(other, first, strict=True):
                target.copy_(source)


def join(
    models: Sequence[Any],
    devices: Sequence[torch.device | str] | None,
    *,
    exact: bool,
    timeout_s: float,
) -> Replicas:
    """Everything is checked that can be checked before a model is moved and processes connect."""
    if isinstance(models, nn.Module):
        raise TypeError(f"models is one {type(models).__name__}: give a list of replicas, such as [model0, model1]")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s} is no time-out: choose a finite number of seconds > 0")
    models = tuple(models)
    for model in models:
        refuse_wrapped(model)
    _check_number(len(models), World.from_environment("cpu").size)
    _check_parameters(models)
    _check_apart(models)
    _check_alike([_description(model) for model in models])
    places = _places_of(models) if devices is None else _chosen(devices, len(models))
    for model, place in zip(models, places, strict=True):
        build_model(model, place, seed=0)  # it exists: it is moved, its parameters stay the optimizer's
    world = World.from_environment(places[0])
    with ExitStack() as stack:
        if exact:
            _exact_settings.hold(world)
            stack.callback(_exact_settings.release)
        communicator = connect(world, timeout_s=timeout_s)
        stack.callback(communicator.close)
        ranks = _agree(models, communicator, exact=exact)
        gradients = ReplicaGradients([named_parameters(model) for model in models], communicator, ranks, exact=exact)
        stack.callback(gradients.close)
        return Replicas(models, places, ranks[world.rank], gradients, communicator, stack.pop_all())


class _ExactSettings:
    """The process settings of exact mode: they stay until the last who needs them goes, in whatever order they go."""

    def __init__(self) -> None:
        self._num_holders = 0
        self._undo = ExitStack()

    def hold(self, world: World) -> None:
        self._undo.enter_context(process_settings(world, exact=True, threads=None))
        self._num_holders += 1

    def release(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self._undo.close()


# Of the process, as are the settings.
_exact_settings = _ExactSettings()


def _named_buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def _check_number(num_models: int, num_processes: int) -> None:
    if num_models == 0:
        raise ValueError("models is empty: give at least 1 replica in every process")
    if num_models == 1 and num_processes == 1:
        raise ValueError(
            "1 model in a single process has nobody to exchange with: give at least 2 replicas, or start the script "
            "on several workers, with `paceline run` or torchrun"
        )


def _check_parameters(models: Sequence[Any]) -> None:
    for number, model in enumerate(models):
        trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        if not trainable:
            raise ValueError(
                f"replica {number} has no parameter that requires a gradient: unfreeze what is to be trained, then wrap"
            )
        for name, parameter in trainable.items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} of replica {number} is {parameter.dtype}: only real floating point can be "
                    "averaged"
                )


def _check_apart(models: Sequence[Any]) -> None:
    """Whether no two replicas hold the same parameter; tied ones inside a replica are its own affair."""
    holders: dict[object, int] = {}
    for number, model in enumerate(models):
        for name, parameter in named_parameters(model).items():
            memory = (parameter.device, parameter.data_ptr()) if parameter.numel() else id(parameter)
            holder = holders.setdefault(memory, number)
            if holder != number:
                raise ValueError(
                    f"replicas {holder} and {number} share parameter {name!r}: give each replica a model of its own, "
                    "such as copy.deepcopy(model)"
                )


def _description(model: Any) -> list[str]:
    """One line for each tensor, equal for replicas that are built alike."""
    parameters = [
        f"parameter {name!r} of shape {tuple(p.shape)} and type {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in named_parameters(model).items()
    ]
    buffers = [
        f"buffer {name!r} of shape {tuple(b.shape)} and type {b.dtype}" for name, b in _named_buffers(model).items()
    ]
    return parameters + buffers


def _check_alike(descriptions: Sequence[Sequence[str]]) -> None:
    for number, description in enumerate(descriptions):
        if difference := _difference(description, descriptions[0]):
            raise ValueError(f"replica {number} {difference} in replica 0: replicas must be built alike")


def _difference(own: Sequence[str], first: Sequence[str]) -> str | None:
    if len(own) != len(first):
        return f"has {len(own)} parameters and buffers, not {len(first)} as"
    return next(
        (f"has {mine}, not {theirs} as" for mine, theirs in zip(own, first, strict=True) if mine != theirs), None
    )


def _places_of(models: Sequence[Any]) -> tuple[torch.device, ...]:
    places = []
    for number, model in enumerate(models):
        tensors = [*named_parameters(model).values(), *_named_buffers(model).values()]
        found = sorted({tensor.device for tensor in tensors}, key=str)
        if len(found) > 1:
            raise ValueError(
                f"replica {number} lies on {' and '.join(map(str, found))}: a replica lives on one device. Move it, or "
                "pass devices=[...], one for each replica"
            )
        places.append(found[0])
    return tuple(places)


def _chosen(devices: Sequence[torch.device | str], num_models: int) -> tuple[torch.device, ...]:
    if isinstance(devices, str | torch.device) or len(devices) != num_models:
        raise ValueError(f"devices={devices!r} for {num_models} replicas: give a list of {num_models}, one for each")
    first = World.from_environment("cpu").local_rank * num_models
    return tuple(choose_device(first + i, device) for i, device in enumerate(devices))


def _agree(models: Sequence[Any], communicator: Communicator, *, exact: bool) -> Plan:
    """The numbers of all replicas, by process, once it is known that all are built alike."""
    own = json.dumps([len(models), exact, _description(models[0])])
    answers = [json.loads(text) for text in gather(own, communicator)]
    _, first_exact, first = answers[0]
    for rank, (_, other_exact, description) in enumerate(answers):
        if other_exact != first_exact:
            raise MisuseError(
                f"rank {rank} passed exact={other_exact}, rank 0 exact={first_exact}: all processes must pass the same"
            )
        if difference := _difference(description, first):
            raise MisuseError(f"rank {rank}'s model {difference} on rank 0: replicas must be built alike")
    return ranges([num_models for num_models, _, _ in answers])


def _broadcast_from_rank_0(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    if communicator.world.size == 1:
        return
    # Not every backend carries booleans.
    carriers = [t.to(torch.uint8) if t.dtype == torch.bool else t.detach().contiguous() for t in tensors]
    for pending in [communicator.broadcast(carrier, 0) for carrier in carriers]:
        pending.wait()
    for tensor, carrier in zip(tensors, carriers, strict=True):
        tensor.copy_(carrier)
