"""What a program of the table is: a user's training loop, the same in plain PyTorch, and what is to come of it.

Most programs differ from the usual loop in one thing, so that they name only that: a model, an optimizer, something
done after every step. Others have a loop of their own, or are written out as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from grouping import grouped
from models import vectors
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.core.seeding import Purpose, derive_seed

# 42 = 2 * 16 + 10: three steps an epoch, the last of three micro-batches of 4, 4 and 2 samples.
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 42, 16, 4
X, Y = vectors(NUM_SAMPLES)
# By number of workers. With two, both work in every step; of three, the last never has a share.
SHARES: Mapping[int, Sequence[float] | str] = {1: "measured", 2: (2, 1), 3: (200, 100, 1)}


@dataclass(frozen=True)
class Expected:
    """Equal to plain PyTorch to `tolerance`, or refused with an error in whose text `text` is found.

    With both, either will do: the issue leaves the choice to whoever mends it.
    """

    is_equal: bool = False
    text: str | None = None
    tolerance: float = 1e-5


EQUAL = Expected(is_equal=True)


def refused(text: str) -> Expected:
    return Expected(text=text)


def equal_or_refused(text: str) -> Expected:
    return Expected(is_equal=True, text=text)


def equal_to(tolerance: float) -> Expected:
    return Expected(is_equal=True, tolerance=tolerance)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    # An epsilon above rounding: Adam would turn gradients that are zero but for rounding into whole steps.
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


def class_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def in_order(_: int) -> Iterable[Any]:
    """The global batches of an epoch of X and Y, not shuffled."""
    for x, y in zip(X.split(GLOBAL_BATCH), Y.split(GLOBAL_BATCH), strict=True):
        yield SimpleNamespace(x=x, y=y)


@dataclass(frozen=True)
class Program:
    """`expect`: for any number of workers, or one expectation each for 1, 2 and 3.

    `after_step(model, optimizer, step)` is done by all workers after every step, `on_gradients(parameters)` before
    every update. `batches(epoch)`: the epoch's global batches as plain PyTorch takes them. `by_micro_batch`: plain
    PyTorch goes through a global batch in micro-batches too, each seeded as Paceline seeds it; for what depends on them
    (BatchNorm, dropout). `loop` and `plain_loop` replace the usual loops; what they return is compared, too. `whole`
    and `plain_whole` replace everything, set-up and closing included.
    """

    expect: Expected | tuple[Expected, Expected, Expected]
    build: Callable[[], Any] = small
    optimizer: Any = sgd
    scheduler: Any = None
    loss: Callable[[Any, Any], torch.Tensor] = class_loss
    data: Callable[[], Any] = lambda: (X, Y)
    batches: Callable[[int], Iterable[Any]] = in_order
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 2
    after_step: Callable[[Any, Any, int], object] | None = None
    on_gradients: Callable[[Mapping[str, Any]], object] | None = None
    by_micro_batch: bool = False
    loop: Callable[[pl.Trainer, Program], Mapping[str, Any] | None] | None = None
    plain_loop: Callable[[Any, Any, Program], Mapping[str, Any] | None] | None = None
    whole: Callable[[Program, dict[str, Any]], Mapping[str, Any]] | None = None
    plain_whole: Callable[[Program], Mapping[str, Any]] | None = None
    modes: tuple[str, ...] = ("plain", "exact")

    def expected(self, num_workers: int) -> Expected:
        return self.expect if isinstance(self.expect, Expected) else self.expect[num_workers - 1]

    def make(self) -> Any:
        torch.manual_seed(0)
        return self.build()


def all_settings(program: Program, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `Trainer.setup` is called with, beside model and optimizer."""
    settings = {"data": program.data(), "scheduler": program.scheduler, **given, **program.settings}
    if isinstance(settings["data"], tuple | list) and "shuffle" not in settings:
        settings["shuffle"] = False
    if "batches_per_step" not in settings:
        settings = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, **settings}
    return {name: value for name, value in settings.items() if value is not ...}


def run(program: Program, given: dict[str, Any]) -> Mapping[str, Any]:
    """The program with Paceline, in the world this process is in: what it ends with."""
    if program.whole is not None:
        return program.whole(program, given)
    losses: list[float] = []
    with pl.Trainer.setup(program.make, program.optimizer, **grouped(**all_settings(program, given))) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        if program.after_step is not None:
            trainer.every(1, lambda record: program.after_step(trainer.model, trainer.optimizer, record.step))  # type: ignore[misc]
        if program.on_gradients is not None:
            trainer.on_gradients(program.on_gradients)
        extra = (program.loop or usual_loop)(trainer, program) or {}
        return {"loss": losses, **weights_of(trainer.unwrapped_model), **extra}


def usual_loop(trainer: pl.Trainer, program: Program) -> None:
    for epoch in trainer.epochs(program.epochs):
        for batch in epoch:
            trainer.backward(program.loss(trainer.model, batch))
            trainer.step()


def run_plain(program: Program) -> Mapping[str, Any]:
    """The same in plain PyTorch, on whole global batches."""
    if program.plain_whole is not None:
        return program.plain_whole(program)
    model = program.make()
    if isinstance(model, nn.Module) and not model.training:
        model.train()
    made = program.optimizer([p for p in parameters_of(model) if p.requires_grad])
    extra = (program.plain_loop or usual_plain_loop)(model, made, program) or {}
    return {**weights_of(getattr(model, "_orig_mod", model)), **extra}


def usual_plain_loop(model: Any, made: Any, program: Program) -> Mapping[str, Any]:
    optimizers = made if isinstance(made, list) else [made]
    schedulers = as_list(program.scheduler(made)) if program.scheduler else []
    losses: list[float] = []
    for epoch in range(program.epochs):
        for batch in program.batches(epoch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = gradients(model, batch, program, len(losses))
            losses.append(loss)
            if program.on_gradients is not None:
                program.on_gradients({name: p for name, p in model.named_parameters() if p.requires_grad})
            if limit := program.settings.get("max_grad_norm"):
                nn.utils.clip_grad_norm_(parameters_of(model), limit)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if is_plateau else scheduler.step()
            if program.after_step is not None:
                program.after_step(model, made, len(losses))
    return {"loss": losses}


def gradients(model: Any, batch: Any, program: Program, step: int) -> float:
    """The gradient of the mean over the global batch, into `p.grad`; returns that mean."""
    if not program.by_micro_batch:
        loss = program.loss(model, batch)
        loss.backward()
        return loss.item()
    total = 0.0
    parts = zip(batch.x.split(MICRO_BATCH), batch.y.split(MICRO_BATCH), strict=True)
    for number, (x, y) in enumerate(parts):
        torch.manual_seed(derive_seed(0, Purpose.MICRO_BATCH, step, number))
        loss = program.loss(model, SimpleNamespace(x=x, y=y)) * (len(x) / len(batch.x))
        loss.backward()
        total += loss.item()
    return total


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict() if isinstance(model, nn.Module) else dict(enumerate(parameters_of(model)))
    return {f"model {name}": value.detach().clone() for name, value in state.items()}


def parameters_of(model: Any) -> list[torch.Tensor]:
    found = model.parameters()
    return list(found.values() if isinstance(found, Mapping) else found)


def as_list(one_or_several: Any) -> list[Any]:
    return list(one_or_several) if isinstance(one_or_several, list | tuple) else [one_or_several]


def copy_of(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)
