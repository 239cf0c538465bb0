"""A replica: one worker's copy of model, optimizer and scheduler, the same on every worker after every step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.core.seeding import Purpose, derive_seed, host_randomness, seed_device
from paceline.run.direct_step import DirectStep
from paceline.run.fused_optimizers import fuse
from paceline.run.model_checks import check_modules
from paceline.run.optimizer_kinds import refuse_closures, schedulers_of

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# Made already, over the parameters of a model that is made already; or a function that makes it.
OptimizerFactory: TypeAlias = Optimizers | Callable[[list[torch.Tensor]], Optimizers]
# From the optimizer, or from all of them where there are several, to a scheduler or several; or one made already, over
# an optimizer that is made already.
SchedulerFactory: TypeAlias = Callable[[Any], Any] | torch.optim.lr_scheduler.LRScheduler


class Replica:
    """Made from the user's parts, on this worker's device, with rank 0's weights."""

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        communicator: Communicator,
        seed: int,
        *,
        fused: bool = True,
        train_mode: bool = True,
    ) -> None:
        device = communicator.world.device
        self.model = build_model(model, device, seed)
        parameters = named_parameters(self.model)
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._trained = list(self.parameters.values())
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._check_parameters(device)
        check_modules(self.model)
        if train_mode and isinstance(self.model, nn.Module):
            self.model.train()
        _share_weights(self.model, self.parameters, communicator)
        made = optimizer(list(self.parameters.values())) if callable(optimizer) else optimizer
        self.optimizers: list[torch.optim.Optimizer] = _as_list(made)
        _check_optimizers(self.optimizers, [*parameters.values()])
        refuse_closures(self.optimizers)
        if fused:
            fuse(self.optimizers)
        self._direct_steps = [DirectStep(each) for each in self.optimizers] if fused else None
        seen = only_or_all(self.optimizers)
        self.schedulers: list[Any] = (
            [] if scheduler is None else _as_list(schedulers_of(scheduler, self.optimizers, seen))
        )

    @property
    def learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def step_optimizers(self) -> None:
        if self._direct_steps is not None:
            for step in self._direct_steps:
                step()
            return
        for optimizer in self.optimizers:
            optimizer.step()

    def step_schedulers(self, loss: Callable[[], float] | None = None) -> None:
        """`loss`: of the step, for a scheduler that follows it; None at the end of an epoch."""
        for scheduler in self.schedulers:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            elif loss is not None:
                if not math.isnan(value := loss()):  # nobody knows the loss: no reason to lower the rate
                    scheduler.step(value)
            else:
                raise MisuseError(
                    "ReduceLROnPlateau needs to be told a value at the end of an epoch: leave scheduler= out, step it "
                    "yourself in trainer.every_epoch, and register it with trainer.register for checkpoints"
                )

    def check_trained(self) -> None:
        """Whether the parameters that are exchanged are still those that get gradients."""
        for trained in self._trained:
            if not trained.requires_grad:
                raise self._changed(trained)
        for frozen in self._frozen.values():
            if frozen.requires_grad:
                raise self._changed(frozen)

    def _changed(self, changed: torch.Tensor) -> MisuseError:
        name = next(name for name, p in {**self.parameters, **self._frozen}.items() if p is changed)
        return MisuseError(
            f"requires_grad of parameter {name!r} is {changed.requires_grad} and was {not changed.requires_grad} when "
            "the run was set up, which fixed what workers exchange: set it before, or close this trainer and set up "
            "another one from here on (init_from= or the same model)"
        )

    def _check_parameters(self, device: torch.device) -> None:
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in self.parameters.items():
            if parameter.device != device:
                raise ValueError(f"parameter {name!r} is on {parameter.device}, this worker drives {device}")
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} is {parameter.dtype}: only real floating point can be averaged")


def only_or_all(things: list[Any]) -> Any:
    """What users see: the thing itself, or a list where there are several."""
    return things[0] if len(things) == 1 else things


def _as_list(one_or_several: Any) -> list[Any]:
    return list(one_or_several) if isinstance(one_or_several, Sequence) else [one_or_several]


def _check_optimizers(optimizers: list[Any], parameters: list[torch.Tensor]) -> None:
    own = {id(parameter) for parameter in parameters}
    if not optimizers:
        raise ValueError("optimizer is an empty list: give at least one optimizer")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer made a {type(optimizer).__name__}: pass a function from parameters to a torch "
                "optimizer, such as lambda params: torch.optim.AdamW(params, lr=1e-3), or a list of optimizers"
            )
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise MisuseError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} of the "
                        f"{type(optimizer).__name__} optimizer is not one of the model's, and would not be trained: "
                        "build the optimizer over the model that is given to the trainer, or pass a function from "
                        "parameters to an optimizer"
                    )


def named_parameters(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a module, or of any object whose `parameters()` gives tensors or a dict of them.

    Tied parameters appear once, under their first name.
    """
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(
            f"the model is a {type(model).__name__} without a parameters() method: "
            "return an nn.Module, or an object with forward(x) and parameters()"
        )
    found: Mapping[str, torch.Tensor] | Iterable[torch.Tensor] = model.parameters()
    items = found.items() if isinstance(found, Mapping) else ((str(i), p) for i, p in enumerate(found))
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in items:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameters() gave {type(parameter).__name__} for {name!r}: it must give tensors")
        unique.setdefault(id(parameter), (name, parameter))
    return dict(unique.values())


def build_model(model: Any, device: torch.device, seed: int) -> Any:
    """Move a model that exists; call a factory with the generators seeded, so that every worker builds the same."""
    is_factory = isinstance(model, type) or (callable(model) and not hasattr(model, "parameters"))
    if not is_factory:
        return _move(model, device)
    with host_randomness() as randomness:
        model_seed = derive_seed(seed, Purpose.MODEL_INIT)
        randomness.seed(model_seed)
        seed_device(device, model_seed)
        built = model()
    return _move(built, device)


def _move(model: Any, device: torch.device) -> Any:
    if isinstance(model, nn.Module):
        return model.to(device)
    for parameter in named_parameters(model).values():
        parameter.data = parameter.data.to(device)
    return model


@torch.no_grad()
def _share_weights(model: Any, parameters: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
    """Every worker gets rank 0's parameters and buffers, frozen ones too, once their shapes are known to agree."""
    if communicator.world.size == 1:
        return
    if isinstance(model, nn.Module):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    else:
        tensors = dict(parameters)
    _check_agreement(tensors, communicator)
    for tensor in tensors.values():
        carrier = tensor.detach().to(torch.uint8) if tensor.dtype == torch.bool else tensor.detach().contiguous()
        communicator.broadcast(carrier, 0).wait()
        tensor.copy_(carrier)


def _check_agreement(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
    """Exchanging tensors of different shapes would hang or corrupt: compare a digest of all shapes first."""
    world = communicator.world
    text = ";".join(f"{name}:{tuple(t.shape)}:{t.dtype}" for name, t in tensors.items())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact in a float64
    digests = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    digests[world.rank] = digest
    communicator.all_reduce(digests).wait()
    different = [rank for rank, other in enumerate(digests.tolist()) if other != digests[0].item()]
    if different:
        raise MisuseError(
            f"ranks {different} built a model whose parameters or buffers differ from rank 0's in name, shape or "
            f"dtype (rank {world.rank} has {len(tensors)}): every worker must build the same model"
        )
