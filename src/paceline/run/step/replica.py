"""A replica: one worker's copy of model, optimizers and schedulers, equal on all workers after every step."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.run.sharding.optimizers import PieceOptimizers
from paceline.run.step.build import (
    as_list,
    build_model,
    check_modules,
    check_optimizers,
    named_parameters,
    only_or_all,
    plain_name,
    refuse_closures,
    schedulers_of,
    share_weights,
)
from paceline.run.step.fused_optimizers import fuse, step_sgd
from paceline.run.step.grad_norm import whole_norm

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# An optimizer over the parameters of an existing model, or a function from parameters to an optimizer.
OptimizerFactory: TypeAlias = Optimizers | Callable[[list[torch.Tensor]], Optimizers]
# From the optimizer, or the list of optimizers, to schedulers; or a scheduler over an existing optimizer.
SchedulerFactory: TypeAlias = Callable[[Any], Any] | torch.optim.lr_scheduler.LRScheduler


class Replica:
    """Built from the user's parts, on this worker's device, with the weights of rank 0."""

    _has_closed: ClassVar[bool] = False  # in this process, since the last full collection here
    _digest: int
    _digested: list[Any]  # the hyper-parameters at that time

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
        if self._has_closed and device.type == "cuda":
            # A run's objects refer to each other in circles: a closed one holds its GPU memory until it is collected.
            gc.collect()
            Replica._has_closed = False
        self.model = build_model(model, device, seed)
        parameters = named_parameters(self.model)
        self._device = device
        self._note_parameters(parameters)
        self._check_parameters(device)
        check_modules(self.model)
        if train_mode and isinstance(self.model, nn.Module) and not self.model.training:
            self.model.train()  # a model in training mode may have single layers in eval mode: they stay
        share_weights(self.model, self.parameters, communicator)
        made = optimizer(list(self.parameters.values())) if callable(optimizer) else optimizer
        self.optimizers: list[torch.optim.Optimizer] = as_list(made)
        check_optimizers(self.optimizers, [*parameters.values()])
        refuse_closures(self.optimizers)
        if fused and callable(optimizer):
            fuse(self.optimizers)
        self.pieces: PieceOptimizers | None = None  # where the optimizers' state is divided among the workers
        self._num_parameters = _count_parameters(self.optimizers)
        self._is_stepping = False
        seen = only_or_all(self.optimizers)
        self.schedulers: list[Any] = [] if scheduler is None else schedulers_of(scheduler, self.optimizers, seen)
        self.note_schedulers()
        # Whether an update may draw random numbers. Torch's own optimizers draw none.
        is_torchs = [type(each).__module__.startswith("torch.optim.") for each in self.optimizers]
        self.may_draw = bool(self.schedulers) or not all(is_torchs)
        # Last, so that an error above leaves the user's optimizers as they were.
        self._guards = [each.register_step_pre_hook(self._refuse_foreign_step) for each in self.optimizers]

    @property
    def learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_learning_rate(self, rate: float, group: int = -1) -> None:
        """group: counted over all optimizers; -1 for all groups."""
        for each in self.groups_for(rate, group):
            if isinstance(each["lr"], torch.Tensor):
                each["lr"].fill_(rate)
            else:
                each["lr"] = rate

    def groups_for(self, rate: float, group: int) -> list[dict[str, Any]]:
        """The parameter groups that get this learning rate; see `set_learning_rate`."""
        groups = [each for optimizer in self.optimizers for each in optimizer.param_groups]
        if not -1 <= group < len(groups):
            raise ValueError(f"group={group}: the optimizers have {len(groups)} parameter groups, counted from 0")
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr={rate}: choose a finite number >= 0")
        return groups if group < 0 else [groups[group]]

    def digest(self) -> int:
        """Of everything that must be equal on all workers: hyper-parameters and trained parameters. Below 2**48."""
        values: list[Any] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                values += group.values()
        is_same = len(values) == len(self._digested) and all(map(operator.is_, values, self._digested))
        if not is_same or torch.Tensor in map(type, values):  # a tensor may change in place
            self._digested = values
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            plain = [[plain_value(value) for key, value in group.items() if key != "params"] for group in groups]
            total = self._hash_of_parameters.copy()  # a scheduler changes a rate in every step, and no parameter
            total.update(json.dumps(plain).encode())
            self._digest = int.from_bytes(total.digest(), "big")
        return self._digest

    def step_optimizers(self) -> None:
        self._is_stepping = True
        try:
            for optimizer in self.optimizers:
                if isinstance(optimizer, torch.optim.SGD):
                    step_sgd(optimizer)
                else:
                    optimizer.step()
        finally:
            self._is_stepping = False

    def _refuse_foreign_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise MisuseError(
                f"{type(optimizer).__name__}.step() was called on an optimizer that belongs to the trainer, which "
                "steps it with the mean gradient of the global batch: remove this call (also scaler.step(optimizer)), "
                "trainer.step() does it. For fp16 pass precision='fp16', which includes loss scaling"
            )

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        Replica._has_closed = True
        if self.pieces is not None:
            self.pieces.close()
        for guard in self._guards:
            guard.remove()

    def step_schedulers(self, loss: Callable[[], float] | None = None) -> None:
        """loss: of the step, for ReduceLROnPlateau; None at the end of an epoch, see `refuse_plateau`."""
        self._check_schedulers()
        self._step_schedulers(loss)
        self.note_schedulers()

    def note_schedulers(self) -> None:
        """Remember the schedulers' states, to detect steps by other code."""
        self._scheduler_steps = [getattr(scheduler, "last_epoch", None) for scheduler in self.schedulers]

    def _check_schedulers(self) -> None:
        for scheduler, steps in zip(self.schedulers, self._scheduler_steps, strict=True):
            if getattr(scheduler, "last_epoch", None) != steps:
                raise MisuseError(
                    f"{type(scheduler).__name__}.step() was called on a scheduler that belongs to the trainer, which "
                    "steps it after every optimizer step, or every epoch (scheduler_every=): remove this call"
                )

    def refuse_plateau(self) -> None:
        """Schedulers are stepped at the end of an epoch, which has no loss of its own."""
        if any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in self.schedulers):
            raise MisuseError(
                "ReduceLROnPlateau needs a value at the end of an epoch: leave scheduler= out, step it in a hook "
                "of trainer.every_epoch, and register it with trainer.register for checkpoints"
            )

    def _step_schedulers(self, loss: Callable[[], float] | None) -> None:
        for scheduler in self.schedulers:
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            elif loss is not None and not math.isnan(value := loss()):  # NaN: the loss is unknown
                scheduler.step(value)

    def take_changes(self) -> list[torch.Tensor]:
        """Update the set of trained parameters. Returns those that are new to the run."""
        known = {id(p) for p in (*self._trained, *self._frozen)}
        parameters = named_parameters(self.model)
        check_optimizers(self.optimizers, [*parameters.values()])
        check_modules(self.model)
        self._note_parameters(parameters)
        if self.pieces is not None:
            self.pieces.note_groups()
        self._num_parameters = _count_parameters(self.optimizers)
        self._check_parameters(self._device)
        return [p for p in parameters.values() if id(p) not in known]

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """All parameters, frozen ones too, by their names in the plain model."""
        return {plain_name(name): p for name, p in named_parameters(self.model).items()}

    def names_to_train(self) -> list[str]:
        """The names of the parameters that the next step trains."""
        return [name for name, p in self.parameters_by_name().items() if p.requires_grad]

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        names = {id(p): name for name, p in self.parameters_by_name().items()}
        return [names[id(p)] for p in parameters]

    def group_names(self) -> list[list[list[str]]]:
        """The names of the parameters, by optimizer and group."""
        names = {id(p): name for name, p in self.parameters_by_name().items()}
        return [[[names.get(id(p), "") for p in group["params"]] for group in o.param_groups] for o in self.optimizers]

    def add_groups(self, saved: Sequence[Sequence[Sequence[str]]]) -> None:
        """Add the parameter groups that a saved run had added after its set-up."""
        parameters = self.parameters_by_name()
        for optimizer, groups, own in zip(self.optimizers, saved, self.group_names(), strict=False):
            if [list(group) for group in groups[: len(own)]] != own:
                continue
            for group in groups[len(own) :]:
                if all(name in parameters for name in group):
                    optimizer.add_param_group({"params": [parameters[name] for name in group]})

    def set_trained(self, names: Sequence[str]) -> None:
        """Train the parameters with these names, and freeze all others."""
        for name, parameter in self.parameters_by_name().items():
            if parameter.is_floating_point():
                parameter.requires_grad_(name in names)

    def has_changed(self) -> bool:
        """Whether parameters were frozen, unfrozen, or added by `add_param_group` since they were last noted."""
        for parameter in self._trained:
            if not parameter.requires_grad:
                return True
        for parameter in self._frozen:
            if parameter.requires_grad:
                return True
        count = 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                count += len(group["params"])
        return count != self._num_parameters

    def _note_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._trained = list(self.parameters.values())
        described = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items()]
        self._hash_of_parameters = hashlib.blake2b(json.dumps(described).encode(), digest_size=6)
        self._digest, self._digested = 0, []
        self._frozen = [p for p in parameters.values() if not p.requires_grad]

    def _check_parameters(self, device: torch.device) -> None:
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in self.parameters.items():
            if parameter.device != device:
                raise ValueError(f"parameter {name!r} is on {parameter.device}, this worker drives {device}")
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} is {parameter.dtype}: only real floating point can be averaged")


def plain_value(value: Any) -> Any:
    """The value if its text is the same in all processes; otherwise the name of its type."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    if isinstance(value, torch.Tensor) and value.is_cpu:
        return value.tolist()
    return type(value).__name__


def _count_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The number of parameters in all groups."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


class Number(Protocol):
    """A tensor with one number, or a number on its way to the host."""

    def item(self) -> float: ...


class Update:
    """Clips the mean gradient and steps the optimizers. max_norm: None disables clipping, inf only measures.

    exact: the norm has the bits that it has where the gradient is divided among workers.
    """

    def __init__(self, replica: Replica, max_norm: float | None, *, exact: bool = False) -> None:
        self._replica = replica
        self._max_norm = max_norm
        self._is_exact = exact

    def clip(self) -> Number | None:
        """Returns the norm before clipping."""
        return self._clip()

    def _clip(self) -> torch.Tensor | None:
        if self._max_norm is None:
            return None
        parameters = [p for p in self._replica.parameters.values() if p.grad is not None]
        if self._is_exact:
            norm = whole_norm([p.grad for p in parameters if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, norm)
            return norm
        return torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)

    def step(self) -> None:
        self._replica.step_optimizers()

    @property
    def can_be_voided(self) -> bool:
        """Whether `clip_and_step_unless` is available: fused Adam and AdamW take a flag on the device."""
        return all(
            type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(g["fused"] for g in optimizer.param_groups)
            for optimizer in self._replica.optimizers
        )

    def clip_and_step_unless(self, is_void: torch.Tensor) -> Number | None:
        """Queue the whole update before the host knows whether the step counts: 1.0 in `is_void` makes it a no-op."""
        norm = self._clip()
        optimizers = self._replica.optimizers
        for optimizer in optimizers:
            optimizer.found_inf = is_void  # type: ignore[attr-defined]  # as torch.amp.GradScaler does
        try:
            self._replica.step_optimizers()
        finally:
            for optimizer in optimizers:
                del optimizer.found_inf  # type: ignore[attr-defined]
        return norm
