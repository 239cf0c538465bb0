"""Replicas that the user trains: checked against each other, placed on devices, connected to other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from paceline.run.settings import Runtime
from paceline.run.step.replica import build_model, named_parameters, refuse_wrapped
from paceline.sync.replica_gradients import ReplicaGradients


@dataclass(frozen=True)
class Replicas:
    """The replicas of this process, connected to those of all others. `cleanup` releases what they hold."""

    models: tuple[Any, ...]
    devices: tuple[torch.device, ...]
    ranks: range
    gradients: ReplicaGradients
    communicator: Communicator
    cleanup: ExitStack

    @torch.no_grad()
    def broadcast(self, *, parameters: bool) -> None:
        """Copy replica 0's buffers, and with `parameters` also all its parameters, to all replicas."""
        first, *others = [
            [*(named_parameters(model).values() if parameters else ()), *_named_buffers(model).values()]
            for model in self.models
        ]
        if self.communicator.world.size > 1:
            # Not every backend carries booleans.
            carriers = [t.to(torch.uint8) if t.dtype == torch.bool else t.detach().contiguous() for t in first]
            for pending in [self.communicator.broadcast(carrier, 0) for carrier in carriers]:
                pending.wait()
            others = [first, *others]
            first = carriers
        for other in others:
            for target, source in zip(other, first, strict=True):
                target.copy_(source)


def connect_replicas(
    models: Sequence[Any], devices: Sequence[torch.device | str] | None, *, exact: bool, runtime: Runtime
) -> Replicas:
    """Check what can be checked, then move the models and connect the processes."""
    models = _checked_models(models)
    description = _description(models[0])
    for number, model in enumerate(models):
        if difference := _difference(_description(model), description):
            raise ValueError(f"replica {number} {difference} in replica 0: replicas must be built alike")
    chosen = _own_devices(models) if devices is None else _chosen_devices(devices, len(models))
    for model, device in zip(models, chosen, strict=True):
        build_model(model, device, seed=0)  # moves it; its parameters stay the optimizer's
    world = World.from_environment(chosen[0])
    with ExitStack() as stack:
        if exact:
            _exact_settings.hold(world)
            stack.callback(_exact_settings.release)
        communicator = connect(world, runtime.backend, runtime.timeout_s)
        stack.callback(communicator.close)
        ranks = _agree(len(models), description, communicator, exact=exact)
        gradients = ReplicaGradients([named_parameters(model) for model in models], communicator, ranks, exact=exact)
        stack.callback(gradients.close)
        return Replicas(models, chosen, ranks[world.rank], gradients, communicator, stack.pop_all())


def shared_parameter(models: Sequence[Any]) -> tuple[int, int, str] | None:
    """Two models that share a parameter, and its name. Parameters tied inside a model do not count."""
    holders: dict[object, int] = {}
    for number, model in enumerate(models):
        for name, parameter in named_parameters(model).items():
            memory = (parameter.device, parameter.data_ptr()) if parameter.numel() else id(parameter)
            if (holder := holders.setdefault(memory, number)) != number:
                return holder, number, name
    return None


class _ExactSettings:
    """The process settings of exact mode, reference-counted: holders may release them in any order."""

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


_exact_settings = _ExactSettings()


def _named_buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def _checked_models(models: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(models, nn.Module):
        raise TypeError(f"models is one {type(models).__name__}: give a list of replicas, such as [model0, model1]")
    if not models:
        raise ValueError("models is empty: give at least 1 replica in every process")
    if len(models) == 1 and World.from_environment("cpu").size == 1:
        raise ValueError(
            "1 model in a single process has no other to exchange with: give at least 2 replicas, or start the script "
            "on several workers, with `paceline run` or torchrun"
        )
    for number, model in enumerate(models):
        refuse_wrapped(model)
        trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        if not trainable:
            raise ValueError(
                f"replica {number} has no parameter that requires a gradient: unfreeze what is to be trained, then wrap"
            )
        for name, p in trainable.items():
            if not p.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} of replica {number} is {p.dtype}: only real floating point can be averaged"
                )
    if (shared := shared_parameter(models)) is not None:
        holder, number, name = shared
        raise ValueError(
            f"replicas {holder} and {number} share parameter {name!r}: give each replica its own model, such as "
            "copy.deepcopy(model)"
        )
    return tuple(models)


def _description(model: Any) -> list[str]:
    """One line for each tensor, equal for replicas that are built alike."""
    return [
        f"{kind} {name!r} of shape {tuple(t.shape)} and type {t.dtype}"
        f"{', frozen' if kind == 'parameter' and not t.requires_grad else ''}"
        for kind, named in (("parameter", named_parameters(model)), ("buffer", _named_buffers(model)))
        for name, t in named.items()
    ]


def _difference(own: Sequence[str], first: Sequence[str]) -> str | None:
    if len(own) != len(first):
        return f"has {len(own)} parameters and buffers, not {len(first)} as"
    return next((f"has {mine}, not {other} as" for mine, other in zip(own, first, strict=True) if mine != other), None)


def _own_devices(models: Sequence[Any]) -> tuple[torch.device, ...]:
    """The device that each replica is on."""
    found = [
        sorted({t.device for t in (*named_parameters(model).values(), *_named_buffers(model).values())}, key=str)
        for model in models
    ]
    for number, several in enumerate(found):
        if len(several) > 1:
            raise ValueError(
                f"replica {number} is on {' and '.join(map(str, several))}: a replica must be on one device. Move it, "
                "or pass devices=[...], one for each replica"
            )
    return tuple(only for (only,) in found)


def _chosen_devices(devices: Sequence[torch.device | str], num_models: int) -> tuple[torch.device, ...]:
    if isinstance(devices, str | torch.device) or len(devices) != num_models:
        raise ValueError(f"devices={devices!r} for {num_models} replicas: give a list of {num_models}, one for each")
    first = World.from_environment("cpu").local_rank * num_models
    return tuple(choose_device(first + i, device) for i, device in enumerate(devices))


def _agree(num_models: int, description: list[str], communicator: Communicator, *, exact: bool) -> Plan:
    """Check that the replicas of all processes are built alike; the ranks of all replicas, by process."""
    answers = [json.loads(text) for text in gather(json.dumps([num_models, exact, description]), communicator)]
    _, first_exact, first = answers[0]
    for rank, (_, other_exact, other) in enumerate(answers):
        if other_exact != first_exact:
            raise MisuseError(
                f"rank {rank} passed exact={other_exact}, rank 0 exact={first_exact}: all processes must pass the same"
            )
        if difference := _difference(other, first):
            raise MisuseError(f"rank {rank}'s model {difference} on rank 0: replicas must be built alike")
    return ranges([count for count, _, _ in answers])
