"""The step of a fused optimizer, straight to its kernel.

Around that kernel torch collects parameters and states anew in every step, sorts them by device and type, opens a
profiler's range and looks for hooks: some 20 to 50 microseconds, a tenth of a small model's step. What it collects
hardly ever changes, so here it is kept, and looked at for changes. Whatever is not as usual goes torch's own way, which
comes to the same: the kernel is the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd import profiler
from torch.optim import optimizer as hooks_of_all


class DirectStep:
    """Steps one optimizer. Its first step, and the first after any change, is torch's own, which makes the states.

    `num_own_hooks`: pre-hooks of its steps that need not be called.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_own_hooks: int = 0) -> None:
        self._optimizer = optimizer
        self._num_own_hooks = num_own_hooks
        self._groups: list[_Group] = []
        self._known: tuple[Any, int, Any] | None = None  # the states, how many, and the groups that were prepared

    def __call__(self) -> None:
        if not self._is_prepared():
            self._step_as_torch_does()
            self._prepare()
            return
        gradients = [group.gradients() for group in self._groups]
        if None in gradients or _is_watched(self._optimizer, self._num_own_hooks):
            self._step_as_torch_does()
            return
        with torch.no_grad():
            for group, own in zip(self._groups, gradients, strict=True):
                group.update(cast("list[torch.Tensor]", own))
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

    def _step_as_torch_does(self) -> None:
        mixed = [group for group in self._optimizer.param_groups if _has_newcomers(group, self._optimizer.state)]
        for group in mixed:
            group["fused"] = None
        try:
            self._optimizer.step()
        finally:
            for group in mixed:
                group["fused"] = True

    def _is_prepared(self) -> bool:
        optimizer, groups = self._optimizer, self._groups
        return (
            self._known is not None
            and optimizer.state is self._known[0]
            and len(optimizer.state) == self._known[1]
            and optimizer.param_groups is self._known[2]
            and len(optimizer.param_groups) == len(groups)
            and all(group.is_unchanged() for group in groups)
        )

    def _prepare(self) -> None:
        optimizer = self._optimizer
        self._known = None
        kind = _KINDS.get(type(optimizer))
        if kind is not None and all(kind.takes(group, optimizer.state) for group in optimizer.param_groups):
            self._groups = [kind(group, optimizer.state) for group in optimizer.param_groups]
            self._known = optimizer.state, len(optimizer.state), optimizer.param_groups


def _has_newcomers(group: dict[str, Any], state: Any) -> bool:
    """Whether parameters get their first gradient when others have momentum: torch's fused SGD fails over them."""
    if not group.get("fused") or not group.get("momentum"):
        return False
    present = [state.get(p, {}).get("momentum_buffer") is not None for p in group["params"] if p.grad is not None]
    return any(present) and not all(present)


def _is_watched(optimizer: torch.optim.Optimizer, num_own_hooks: int) -> bool:
    """Whether anybody else wants to know of the step, or has put a step of their own in its place."""
    own = optimizer.__dict__.get("step")
    return bool(
        (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))
        or len(optimizer._optimizer_step_pre_hooks) > num_own_hooks
        or optimizer._optimizer_step_post_hooks
        or hooks_of_all._global_optimizer_pre_hooks
        or hooks_of_all._global_optimizer_post_hooks
        or profiler._is_profiler_enabled
        or getattr(optimizer, "found_inf", None) is not None
    )


class _Group:
    """The parameters of a group, and their states by name."""

    def __init__(self, group: dict[str, Any], state: Any) -> None:
        self._group = group
        self._parameters: list[torch.Tensor] = list(group["params"])
        self._states: list[dict[str, Any]] = [state.get(parameter, {}) for parameter in self._parameters]
        self._names = self.names(group)
        self._kept = {name: [own[name] for own in self._states] for name in self._names}
        self._places = self._where_kept()

    @classmethod
    def takes(cls, group: dict[str, Any], state: Any) -> bool:
        """Whether torch steps this group with one call of the fused kernel."""
        parameters = group["params"]
        names = cls.names(group)
        return (
            bool(parameters)
            and bool(group["fused"])
            and len({(parameter.device, parameter.dtype) for parameter in parameters}) == 1
            and all(isinstance(state.get(p, {}).get(name), torch.Tensor) for p in parameters for name in names)
        )

    @staticmethod
    def names(group: dict[str, Any]) -> tuple[str, ...]:
        """Of the states that the kernel updates."""
        raise NotImplementedError

    def is_unchanged(self) -> bool:
        group = self._group
        if (
            not group["fused"]
            or isinstance(group["lr"], torch.Tensor)
            or len(group["params"]) != len(self._parameters)
            or self.names(group) != self._names
        ):
            return False
        for state, name, own in self._places:  # noqa: SIM110 - `all` takes a third longer
            if state.get(name) is not own:
                return False
        return True

    def _where_kept(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        return [(self._states[i], name, own) for name, kept in self._kept.items() for i, own in enumerate(kept)]

    def gradients(self) -> list[torch.Tensor] | None:
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return found if len(found) == len(self._parameters) else None

    def update(self, gradients: list[torch.Tensor]) -> None:
        raise NotImplementedError


class _SgdGroup(_Group):
    @staticmethod
    def names(group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, gradients: list[torch.Tensor]) -> None:
        group = self._group
        torch._fused_sgd_(
            self._parameters,
            gradients,
            self._kept.get("momentum_buffer", []),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
        )


class _AdamGroup(_Group):
    _kernel = staticmethod(torch._fused_adam_)

    def __init__(self, group: dict[str, Any], state: Any) -> None:
        super().__init__(group, state)
        # Every parameter counts its steps; side by side in memory, all are counted at once.
        self._steps = torch.stack(self._kept["step"])
        self._kept["step"] = list(self._steps.unbind())
        for own, step in zip(self._states, self._kept["step"], strict=True):
            own["step"] = step
        self._places = self._where_kept()
        self._host_steps = self._steps.numpy() if self._steps.is_cpu else None  # the same memory: counted faster

    @staticmethod
    def names(group: dict[str, Any]) -> tuple[str, ...]:
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", "step", *largest)

    def update(self, gradients: list[torch.Tensor]) -> None:
        group, kept = self._group, self._kept
        beta1, beta2 = group["betas"]
        if self._host_steps is None:
            self._steps.add_(1)
        else:
            self._host_steps += 1
        self._kernel(
            self._parameters,
            gradients,
            kept["exp_avg"],
            kept["exp_avg_sq"],
            kept.get("max_exp_avg_sq", []),
            kept["step"],
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class _AdamWGroup(_AdamGroup):
    _kernel = staticmethod(torch._fused_adamw_)


_KINDS: dict[type, type[_Group]] = {
    torch.optim.SGD: _SgdGroup,
    torch.optim.Adam: _AdamGroup,
    torch.optim.AdamW: _AdamWGroup,
}
