"""Replicas that the user trains: checked against each other, and placed on devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.errors import MisuseError
from paceline.core.world import World, choose_devices
from paceline.plan.shares import Plan, ranges
from paceline.run.step.build import build_model, named_parameters, refuse_wrapped


def tensors_of(model: Any, *kinds: str) -> list[torch.Tensor]:
    """The model's parameters and buffers, or only these kinds."""
    return [tensor for kind, _, tensor in _tensors(model) if not kinds or kind in kinds]


def _tensors(model: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    yield from (("parameter", name, parameter) for name, parameter in named_parameters(model).items())
    if isinstance(model, nn.Module):
        yield from (("buffer", name, buffer) for name, buffer in model.named_buffers())


def check_models(models: Sequence[Any]) -> None:
    """Refuse models that are not replicas of one model."""
    if isinstance(models, nn.Module):
        raise TypeError(f"models is one {type(models).__name__}: give a list of replicas, such as [model0, model1]")
    if len(models) < (2 if World.from_environment("cpu").size == 1 else 1):
        raise ValueError(
            f"models has {len(models)} replicas: give at least 2, or at least 1 in each of several processes, started "
            "by `paceline run` or torchrun"
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
    for number, model in enumerate(models):
        if difference := _difference(_description(model), _description(models[0])):
            raise ValueError(f"replica {number} {difference} in replica 0: replicas must be built alike")


def shared_parameter(models: Sequence[Any]) -> tuple[int, int, str] | None:
    """Two models that share a parameter, and its name. Parameters tied inside a model do not count."""
    holders: dict[object, int] = {}
    for number, model in enumerate(models):
        for name, parameter in named_parameters(model).items():
            memory = (parameter.device, parameter.data_ptr()) if parameter.numel() else id(parameter)
            if (holder := holders.setdefault(memory, number)) != number:
                return holder, number, name
    return None


def move_models(models: Sequence[Any], devices: Sequence[torch.device | str] | None) -> tuple[torch.device, ...]:
    """Move each model to its device, by default its current one. Parameters stay the same objects."""
    if devices is None:
        found = [sorted({tensor.device for tensor in tensors_of(model)}, key=str) for model in models]
        for number, several in enumerate(found):
            if len(several) > 1:
                raise ValueError(
                    f"replica {number} is on {' and '.join(map(str, several))}: a replica must be on one device. Move "
                    "it, or pass devices=[...], one for each replica"
                )
        chosen = [device for (device,) in found]
    elif isinstance(devices, str | torch.device) or len(devices) != len(models):
        raise ValueError(f"devices={devices!r} for {len(models)} replicas: give a list of {len(models)}, one for each")
    else:
        chosen = [*choose_devices(devices, World.from_environment("cpu").local_rank)]
    for model, device in zip(models, chosen, strict=True):
        build_model(model, device, seed=0)
    return tuple(chosen)


def agree(models: Sequence[Any], communicator: Communicator, *, exact: bool) -> Plan:
    """Check that the replicas of all processes are built alike. Returns the ranks of all replicas, by process."""
    own = json.dumps([len(models), exact, _description(models[0])])
    answers = [json.loads(text) for text in gather(own, communicator)]
    _, first_exact, first = answers[0]
    for rank, (_, other_exact, other) in enumerate(answers):
        if other_exact != first_exact:
            raise MisuseError(
                f"rank {rank} passed exact={other_exact}, rank 0 exact={first_exact}: all processes must pass the same"
            )
        if difference := _difference(other, first):
            raise MisuseError(f"rank {rank}'s model {difference} on rank 0: replicas must be built alike")
    return ranges([count for count, _, _ in answers])


def _description(model: Any) -> list[str]:
    """One line for each tensor, equal for replicas that are built alike."""
    return [
        f"{kind} {name!r} of shape {tuple(t.shape)} and type {t.dtype}"
        f"{', frozen' if kind == 'parameter' and not t.requires_grad else ''}"
        for kind, name, t in _tensors(model)
    ]


def _difference(own: Sequence[str], first: Sequence[str]) -> str | None:
    if len(own) != len(first):
        return f"has {len(own)} parameters and buffers, not {len(first)} as"
    return next((f"has {mine}, not {other} as" for mine, other in zip(own, first, strict=True) if mine != other), None)
