"""Optimizers and schedulers as users give them: which kinds can be stepped by the run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


def refuse_closures(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """An optimizer that calls the loss again by itself would need all of the step's micro-batches each time."""
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, whose step(closure) computes the loss several times: a "
                "step here has one gradient, the mean over its micro-batches. Choose an optimizer that steps from "
                "that, such as torch.optim.AdamW"
            )


def schedulers_of(scheduler: Any, optimizers: list[torch.optim.Optimizer], seen: Any) -> Any:
    """What `scheduler=` gives: a function is called with `seen`, the optimizer or all; what is made is checked."""
    if not callable(scheduler):
        given = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        for each in given:
            _check_scheduler(each, "scheduler is")
            if not any(getattr(each, "optimizer", None) is optimizer for optimizer in optimizers):
                raise TypeError(
                    f"scheduler is a {type(each).__name__} over another optimizer than the run's: pass a function, "
                    f"such as lambda optimizer: {type(each).__name__}(optimizer, ...), or the optimizer that it was "
                    "made with"
                )
        return scheduler
    made = scheduler(seen)
    for each in made if isinstance(made, Sequence) else [made]:
        _check_scheduler(each, "scheduler made")
    return made


def _check_scheduler(scheduler: Any, what: str) -> None:
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"{what} a {type(scheduler).__name__} without step(): pass a function from the optimizer to a torch "
            "scheduler, such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )
