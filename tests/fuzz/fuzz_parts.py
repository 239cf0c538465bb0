"""What the programs are made of. Each part works in plain PyTorch too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

from paceline.plan.shares import Plan, ranges, shares
from paceline.run.step import planner

Batch = Mapping[str, torch.Tensor]
WIDTH, CLASSES = 6, 3


def columns(count: int, seed: int, *, weighted: bool) -> dict[str, torch.Tensor]:
    """x, y, and w: what each sample weighs in the mean, such as its tokens. Every second one weighs something."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    y = (x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
    w = torch.randint(0, 4, (count,), generator=generator) if weighted else torch.ones(count, dtype=torch.long)
    w[::2].clamp_(min=1)
    return {"x": x, "y": y, "w": w}


class Samples(Dataset[Any]):
    def __init__(self, data: Batch) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}


def listed(data: Batch) -> list[dict[str, torch.Tensor]]:
    samples = Samples(data)
    return [samples[i] for i in range(len(samples))]


def loader(data: Batch, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(Samples(data), batch_size=batch_size, shuffle=shuffle)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The weighted mean over a batch; zero where nothing weighs anything."""
    each = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["w"]).sum() / batch["w"].sum().clamp(min=1)


def weight(batch: Batch) -> int:
    return int(batch["w"].sum())


# ---- models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Experts(nn.Module):
    """One of its layers is used by few samples, one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.expert = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 1.0
        y = self.head(torch.tanh(self.first(x)))
        return y.index_add(0, chosen.nonzero()[:, 0], self.expert(x[chosen])) if chosen.any() else y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(2, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x.unflatten(1, (3, 2)))[0][:, -1])


def _mlp(*between: nn.Module) -> nn.Module:
    # A bias before BatchNorm has no gradient but rounding, which Adam would turn into steps.
    has_bias = not any(isinstance(layer, nn.BatchNorm1d) for layer in between)
    named = [
        ("first", nn.Linear(WIDTH, 8, bias=has_bias)),
        *((f"between{i}", layer) for i, layer in enumerate(between)),
    ]
    model = nn.Sequential()
    for name, layer in [*named, ("tanh", nn.Tanh()), ("head", nn.Linear(8, CLASSES))]:
        model.add_module(name, layer)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "tied": Tied,
    "experts": Experts,
    "lstm": Recurrent,
    "weight norm": lambda: _mlp(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "batch norm": lambda: _mlp(nn.BatchNorm1d(8)),
    "running mean": lambda: _mlp(nn.BatchNorm1d(8, momentum=None)),
    "dropout": lambda: _mlp(nn.Dropout(0.4)),
}
# What comes of these depends on how a global batch is cut.
BY_MICRO_BATCH = ("batch norm", "running mean", "dropout")
BATCH_NORMS = ("batch norm", "running mean")


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def set_frozen(model: nn.Module, step: int, frozen: Sequence[tuple[int, int]]) -> None:
    """`first` gets no gradient in the steps of these ranges."""
    is_frozen = any(start <= step < stop for start, stop in frozen)
    for parameter in model.first.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(not is_frozen)
        if is_frozen:
            parameter.grad = None


# ---- optimizers and schedulers


class Damped(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.2)
                    parameter.sub_(torch.tanh(mean * 5) * group["lr"])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, eps=1e-2)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.5, eps=1e-2)


def groups(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    vectors = [p for p in params if p.ndim < 2]
    decayed = {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.Adam([decayed, {"params": vectors, "lr": 0.03}], lr=0.02, amsgrad=True, eps=1e-2)


def two(params: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    return [momentum([p for p in params if p.ndim > 1]), adamw([p for p in params if p.ndim < 2])]


OPTIMIZERS = ("sgd", "momentum", "adamw", "rmsprop", "groups", "two", "Damped")


def _of_each(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Any], list[Any]]:
    return lambda made: [make(optimizer) for optimizer in (made if isinstance(made, list) else [made])]


halving = _of_each(lambda o: lr_scheduler.StepLR(o, 2, 0.5))
warm_up = _of_each(lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)))
cosine = _of_each(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4))
plateau = _of_each(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.05))
SCHEDULERS = ("halving", "warm_up", "cosine", "plateau")


def halve(parameters: Mapping[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


# ---- shares that change in every step


@contextmanager
def changing_shares(speeds: Sequence[Sequence[float]]) -> Iterator[None]:
    """Fixed shares become these, by turns, one for every step."""

    class Scripted(planner.FixedPlanner):
        def __init__(self, step_size: int, _: Sequence[float]) -> None:
            self._step_size, self._rest = step_size, cycle(speeds)
            self._now = next(self._rest)

        def plan(self, num_left: int) -> Plan:
            return ranges(shares(min(num_left, self._step_size), self._now))

        def observe(self, *_: Any) -> None:
            self._now = next(self._rest)

    with patch.object(planner, "FixedPlanner", Scripted):
        yield
