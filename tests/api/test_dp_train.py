"""`dp_train`, row by row of its table of features (A1 to A7, A9, A10)."""

from __future__ import annotations

import inspect
import io
import itertools
import math
import os
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.core import world

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 3, generator=GENERATOR)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3
PAIRS = list(zip(X, Y, strict=True))


def linear() -> nn.Module:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    return model


def train(make_model: Callable[[], Any] = linear, data: Any = PAIRS, **settings: Any) -> pl.compat.ggmlr.DpResult:
    defaults = {
        "loss_fn": functional.mse_loss,
        "forward_fn": lambda model, sample: model(sample[0]),
        "target_fn": lambda sample: sample[1],
        "n_gpu": 2,
        "n_iter": 7,
        "lr": 0.05,
        "verbose": False,
    }
    return pl.dp_train(make_model, data, **grouped(**{**defaults, **settings}))


def train_by_hand(
    batch_size: int, num_steps: int, optimizer: Callable[[Any], Any], max_norm: float = math.inf
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One model in plain PyTorch with batches of `batch_size`: its parameters, and the losses before each update."""
    model = linear()
    stepper, losses = optimizer(model.parameters()), []
    for step in range(num_steps):
        rows = [(step * batch_size + i) % len(PAIRS) for i in range(batch_size)]
        stepper.zero_grad()
        loss = functional.mse_loss(model(X[rows]), Y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)


# A1: the call


def test_a1_the_signature_is_that_of_the_table() -> None:
    parameters = list(inspect.signature(pl.dp_train).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    assert [p.name for p in parameters[:2]] == ["make_model", "data"]
    assert positional == [
        ("loss_fn", None),
        ("forward_fn", None),
        ("target_fn", None),
        ("n_gpu", None),
        ("n_iter", 10),
        ("lr", 1e-3),
        ("max_norm", math.inf),
        ("verbose", 10),
    ]


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a1_by_default_there_is_one_replica_per_device(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "devices", lambda: [torch.device("cpu")] * num_devices)
    seen: list[int] = []
    train(data=range(100), forward_fn=recorder(seen), target_fn=no_target, n_gpu=None, n_iter=4, workers=1)
    assert seen[1:] == list(range(4 * num_devices))


def replicas_in_this_world(**settings: Any) -> pl.compat.ggmlr.DpResult:
    """Every worker builds a model of its own with other weights."""

    def make_model() -> nn.Module:
        model = linear()
        nn.init.constant_(model.bias, float(os.environ.get("RANK", 0)))
        return model

    return train(make_model, **settings)


def test_a1_replica_0_gives_its_weights_to_the_others(pool: WorkerPool) -> None:
    expected = digest(replicas_in_this_world(exact=True).params)
    for result in pool.run(lambda: replicas_in_this_world(exact=True), 2):
        assert digest(result.params) == expected


def test_a1_in_a_world_that_exists_its_workers_are_the_devices(pool: WorkerPool) -> None:
    alone = train(n_gpu=3, n_iter=4, exact=True)
    for result in pool.run(lambda: train(n_gpu=None, n_iter=4, exact=True), 3):
        assert result.loss_history == alone.loss_history
        assert digest(result.params) == digest(alone.params)


# A2: who gets which sample


def no_target(_: Any) -> torch.Tensor:
    return torch.zeros(1)


def recorder(seen: list[Any]) -> Callable[[nn.Module, Any], torch.Tensor]:
    def forward(model: nn.Module, sample: Any) -> torch.Tensor:
        seen.append(sample)
        return model(torch.full((3,), float(sample)))

    return forward


@pytest.mark.parametrize(
    ("n_gpu", "num_samples", "n_iter", "placement"),
    [
        (1, 3, 4, [[0], [1], [2], [0]]),
        (2, 4, 3, [[0, 1], [2, 3], [0, 1]]),
        (2, 3, 4, [[0, 1], [2, 0], [1, 2], [0, 1]]),
        (3, 2, 2, [[0, 1, 0], [1, 0, 1]]),
        (4, 10, 3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]),
    ],
)
def test_a2_replica_i_takes_its_sample_of_each_iteration(
    n_gpu: int, num_samples: int, n_iter: int, placement: list[list[int]]
) -> None:
    seen: list[int] = []
    train(data=range(num_samples), forward_fn=recorder(seen), target_fn=no_target, n_gpu=n_gpu, n_iter=n_iter)
    trial, *used = seen
    assert trial == 0  # the one that checks the loss, before anything starts
    assert used == [index for iteration in placement for index in iteration]
    assert placement == [[(t * n_gpu + i) % num_samples for i in range(n_gpu)] for t in range(n_iter)]


def placed_here(n_gpu: int, num_samples: int, n_iter: int) -> list[int]:
    seen: list[int] = []
    train(data=range(num_samples), forward_fn=recorder(seen), target_fn=no_target, n_gpu=n_gpu, n_iter=n_iter)
    return seen[1:]


def test_a2_workers_share_the_replicas(pool: WorkerPool) -> None:
    """Who takes which follows their speed; together they take every sample that one worker would, as often."""
    for size, n_gpu, num_samples, n_iter in ((2, 3, 5, 3), (3, 2, 4, 2)):  # the latter: some worker has no replica
        taken = pool.run(placed_here, size, n_gpu, num_samples, n_iter)
        assert sorted(itertools.chain(*taken)) == sorted(t % num_samples for t in range(n_iter * n_gpu))


class WithDropout(nn.Module):
    """Random numbers and statistics: what could depend on where a replica runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Jittered:
    """Batches of four with random noise: a data set that draws from three generators."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(4 * index, 4 * index + 4)
        return X[rows] + 0.1 * torch.randn(4, 3) + 0.1 * random.random(), Y[rows]


def train_exactly(workers: int | None = None, verbose: int = 0) -> tuple[str, list[float]]:
    result = train(WithDropout, Jittered(), n_gpu=4, n_iter=6, exact=True, workers=workers, verbose=verbose)
    return digest(result.model.state_dict()), result.loss_history


def test_a2_the_same_bits_on_one_worker_and_on_many(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    expected = train_exactly()
    assert len(set(expected[1])) == 6
    for size in (2, 3, 4):
        assert pool.run(train_exactly, size) == [expected] * size
    capfd.readouterr()
    assert train_exactly(workers=2, verbose=3) == expected
    lines = [f"iteration {t}/6  loss {expected[1][t - 1]:.6g}" for t in (1, 3, 6)]
    assert capfd.readouterr().out.splitlines() == lines  # A7: one worker prints


class WithProcess(nn.Linear):
    """A part of its state is not a tensor."""

    process: int | None = None

    def get_extra_state(self) -> Any:
        return {"process": os.getpid()}

    def set_extra_state(self, state: Any) -> None:
        self.process = state["process"]


def test_a2_any_state_comes_back_from_the_workers() -> None:
    assert train(lambda: WithProcess(3, 1), n_iter=3, workers=2).model.process not in (None, os.getpid())


# A3: n_iter counts optimizer steps


@pytest.mark.parametrize(("n_gpu", "n_iter"), [(1, 5), (4, 5), (3, 20)])
def test_a3_n_iter_counts_optimizer_steps(n_gpu: int, n_iter: int) -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(params))
        return made[-1]

    train(n_gpu=n_gpu, n_iter=n_iter, optimizer=optimizer, lr=1e-3)
    assert [int(state["step"]) for state in made[0].state.values()] == [n_iter, n_iter]
    assert len(made) == 1


def test_a3_no_iteration_leaves_the_model_as_it_was_built() -> None:
    result = train(n_iter=0)
    assert_close(result.params, dict(linear().named_parameters()), 0.0)
    assert result.loss_history == []
    assert math.isnan(result.loss)


# A4: models and defaults


class Matrix:
    """Not an nn.Module: what it knows of torch are two tensors."""

    def __init__(self, give: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        self._give = give
        self.tensors = {"weight": torch.full((1, 3), 0.1), "bias": torch.zeros(1)}
        for tensor in self.tensors.values():
            tensor.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.tensors["weight"], self.tensors["bias"])

    def parameters(self) -> Any:
        return self._give(self.tensors)


@pytest.mark.parametrize(
    ("give", "names"),
    [
        (dict, ["weight", "bias"]),
        (lambda tensors: list(tensors.values()), ["0", "1"]),
        (lambda tensors: tuple(tensors.values()), ["0", "1"]),
        (lambda tensors: iter(tensors.values()), ["0", "1"]),
        (lambda tensors: [*tensors.values(), tensors["weight"]], ["0", "1"]),  # tied: once, under its first name
    ],
    ids=["dict", "list", "tuple", "iterator", "tied"],
)
def test_a4_any_object_with_forward_and_parameters(give: Callable[..., Any], names: list[str]) -> None:
    module = train()
    plain = train(lambda: Matrix(give), forward_fn=lambda model, sample: model.forward(sample[0]))
    assert list(plain.params) == names
    assert plain.loss_history == module.loss_history
    for actual, expected in zip(plain.params.values(), module.params.values(), strict=True):
        assert torch.equal(actual, expected)
    assert plain.params[names[0]] is plain.model.tensors["weight"]


@pytest.mark.parametrize("exact", [False, True])
def test_a4_objects_work_on_several_workers(exact: bool, pool: WorkerPool) -> None:
    def train_matrix() -> pl.compat.ggmlr.DpResult:
        return train(lambda: Matrix(dict), forward_fn=lambda model, sample: model.forward(sample[0]), exact=exact)

    expected = train_matrix()
    for result in pool.run(train_matrix, 2):
        assert_close(result.params, expected.params, 0.0 if exact else 1e-6)


class Loss(nn.Module):
    """Its result on a tensor is a loss: how far the tensor is from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.weight).square().mean()


class Copy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand_as(x)


@pytest.mark.parametrize(
    ("make_model", "functions"),
    [
        (Loss, {}),
        (Copy, {"loss_fn": functional.mse_loss}),
        (Copy, {"loss_fn": functional.mse_loss, "target_fn": lambda x: x}),
        (Copy, {"loss_fn": functional.mse_loss, "forward_fn": lambda model, x: model(x)}),
        (Loss, {"forward_fn": lambda model, x: model(x)}),
        (Copy, {"loss_fn": lambda out, target: (out - target).square().mean(), "target_fn": torch.clone}),
    ],
    ids=["no function", "loss", "loss and target", "loss and forward", "forward", "own loss"],
)
def test_a4_defaults(make_model: Callable[[], nn.Module], functions: dict[str, Any]) -> None:
    """No forward_fn: the model applied; no loss_fn: the result is the loss; no target_fn: the sample is its target."""
    expected = pl.dp_train(Loss, list(X), n_gpu=2, n_iter=5, lr=0.1, verbose=0)
    result = pl.dp_train(make_model, list(X), n_gpu=2, n_iter=5, lr=0.1, verbose=0, **grouped(**functions))
    assert result.loss_history == pytest.approx(expected.loss_history, rel=1e-6)
    assert_close(result.params, expected.params)
    assert expected.loss_history[0] == pytest.approx(X[:2].square().mean().item(), rel=1e-6)


def test_a4_a_loss_may_take_gradients_itself() -> None:
    """A gradient penalty needs autograd while the loss is computed, in the trial before the start too."""

    def penalised(model: nn.Module, sample: Any) -> torch.Tensor:
        x = sample[0].clone().requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - sample[1]).square().mean() + gradient.square().sum()

    history = train(forward_fn=penalised, loss_fn=None, target_fn=None, n_iter=60).loss_history
    assert sum(history[-6:]) < 0.8 * sum(history[:6])  # six iterations are one pass


# A5: the step


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n_gpu", [1, 2, 4])
def test_a5_n_replicas_equal_a_batch_of_n(n_gpu: int, exact: bool) -> None:
    params, losses = train_by_hand(n_gpu, 20, adam)
    result = train(n_gpu=n_gpu, n_iter=20, exact=exact)
    assert_close(result.params, params)
    assert result.loss_history == pytest.approx(losses, rel=1e-5)


def test_a5_clipping_bounds_the_norm_of_the_mean() -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    for max_norm in (0.25, 1e6):
        params, _ = train_by_hand(3, 10, sgd, max_norm)
        assert_close(train(n_gpu=3, n_iter=10, lr=1e-3, optimizer=sgd, max_norm=max_norm).params, params)
    one_step = train(n_gpu=3, n_iter=1, lr=1e-3, optimizer=sgd, max_norm=0.25)
    before = dict(linear().named_parameters())
    moved = [(after - before[name]).norm().item() for name, after in one_step.params.items()]
    assert math.hypot(*moved) == pytest.approx(0.1 * 0.25, rel=1e-4)
    assert_close(train(max_norm=0.0).params, dict(linear().named_parameters()), 0.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
        lambda params: torch.optim.RMSprop(params, lr=0.01),
    ],
    ids=["SGD", "AdamW", "RMSprop"],
)
def test_a5_other_optimizers(optimizer: Callable[[Any], Any]) -> None:
    params, _ = train_by_hand(2, 10, optimizer)
    assert_close(train(n_gpu=2, n_iter=10, lr=1e-3, optimizer=optimizer).params, params)


class Branches(nn.Module):
    """Sample i goes through branch i; one branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(3)])
        self.unused = nn.Parameter(torch.tensor(1.0))

    def forward(self, sample: int) -> torch.Tensor:
        return (2.0 + sample) * self.branches[sample]


def train_branches(exact: bool) -> dict[str, float]:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0, weight_decay=0.5)

    # Samples 0, 1, 2, 0: branch 0 is used by two of four replicas, branches 1 and 2 by one.
    result = pl.dp_train(Branches, [0, 1, 2, 0], n_gpu=4, n_iter=1, optimizer=sgd, verbose=0, exact=exact)
    return {name: parameter.item() for name, parameter in result.params.items()}


@pytest.mark.parametrize("exact", [False, True])
def test_a5_a_parameter_that_some_replicas_use_gets_the_right_mean(exact: bool, pool: WorkerPool) -> None:
    # Weight decay tells a zero gradient from none: the unused parameter does not move at all.
    expected = {"unused": 1.0} | {f"branches.{i}": 1.0 - 0.5 - sum_ / 4 for i, sum_ in enumerate((2 + 2, 3, 4))}
    assert train_branches(exact) == pytest.approx(expected)
    for size in (2, 3, 4):
        for params in pool.run(train_branches, size, exact):
            assert params == pytest.approx(expected)


# A6: the result


def test_a6_the_result() -> None:
    result = train(n_gpu=3, n_iter=8)
    assert isinstance(result, pl.compat.ggmlr.DpResult)
    assert isinstance(result.model, nn.Linear)
    assert list(result.params) == ["weight", "bias"]
    assert result.params["weight"] is result.model.weight
    assert len(result.loss_history) == 8
    assert all(type(loss) is float for loss in result.loss_history)
    assert result.loss == result.loss_history[-1]


def test_a6_losses_are_means_over_the_replicas_before_the_update() -> None:
    model = linear()
    with torch.no_grad():
        first = [functional.mse_loss(model(x), y).item() for x, y in PAIRS[:3]]
    assert len(set(first)) == 3
    assert train(n_gpu=3, n_iter=1).loss_history == pytest.approx([sum(first) / 3], rel=1e-6)
    _, losses = train_by_hand(3, 12, adam)
    assert train(n_gpu=3, n_iter=12).loss_history == pytest.approx(losses, rel=1e-5)


def test_a6_long_histories_are_complete() -> None:
    """Losses are fetched in portions."""
    history = train(n_gpu=1, n_iter=600, lr=0.0).loss_history
    assert len(history) == 600
    assert history == [history[i % 12] for i in range(600)]


def train_on_one_bad_sample(value: float, n_gpu: int, verbose: int = 0) -> tuple[str, int, int | None, int | None]:
    data = [(x.clone(), y) for x, y in PAIRS]
    data[5][0][0] = value
    with pytest.raises(pl.errors.NonFiniteError) as caught:
        train(data=data, n_gpu=n_gpu, verbose=verbose)
    error = caught.value
    return str(error), error.step, error.micro_batch, error.rank


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a6_a_loss_that_is_no_number_is_reported_with_iteration_and_replica(value: float, pool: WorkerPool) -> None:
    text = "the loss of replica {} is not finite in iteration {} (computed by rank {}): lower lr, clip with max_norm"
    for n_gpu, iteration, replica in [(1, 6, 0), (2, 3, 1), (4, 2, 1)]:
        message, *numbers = train_on_one_bad_sample(value, n_gpu)
        assert message.startswith(text.format(replica, iteration, 0))
        assert numbers == [iteration, replica, 0]
    outcomes = pool.run(train_on_one_bad_sample, 2, value, 2)
    assert outcomes[0] == outcomes[1]
    message, iteration, replica, rank = outcomes[0]
    assert message.startswith(text.format(1, 3, rank))  # whoever took it, by measured speed
    assert (iteration, replica) == (3, 1)
    assert rank in (0, 1)


# A7: printing


@pytest.mark.parametrize(
    ("verbose", "printed"),
    [
        (10, [1, 10, 20]),
        (True, list(range(1, 26))),
        (1, list(range(1, 26))),
        (7, [1, 7, 14, 21]),
        (100, [1]),
        (False, []),
        (0, []),
    ],
)
def test_a7_lines(verbose: int | bool, printed: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    result = train(n_iter=25, verbose=verbose)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"iteration {t:>2}/25  loss {result.loss_history[t - 1]:.6g}" for t in printed]
    assert captured.err == ""


def test_a7_ten_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    pl.dp_train(Loss, list(X), n_gpu=1, n_iter=20)
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == [
        "iteration  1",
        "iteration 10",
        "iteration 20",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_a7_a_terminal_shows_a_bar_and_is_left_clean(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    if fails:
        train_on_one_bad_sample(math.nan, 2, verbose=10)
    else:
        train(n_iter=20, verbose=10)
    shown = terminal.getvalue()
    assert "loss" in shown
    assert re.search(r"━.* 1/\d+ ", shown)
    assert shown.endswith("\x1b[1A\x1b[2K")


def test_a7_a_terminal_shows_nothing_when_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    train(verbose=False)
    assert terminal.getvalue() == ""


# A9: schedulers


@pytest.mark.parametrize("minimum", [0.0, 1e-4])
def test_a9_a_cosine_reaches_its_minimum(minimum: float) -> None:
    rates: list[float] = []
    made: list[Any] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def cosine(optimizer: torch.optim.Optimizer) -> Any:
        made.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=minimum))
        return made[-1]

    train(n_iter=30, lr=1e-3, optimizer=lambda params: Watched(params, lr=0.1), scheduler=cosine)
    expected = [minimum + (0.1 - minimum) * (1 + math.cos(math.pi * t / 30)) / 2 for t in range(31)]
    assert rates == pytest.approx(expected[:30], abs=1e-9)
    assert made[0].get_last_lr()[0] == pytest.approx(minimum, abs=1e-9)


@pytest.mark.parametrize(
    ("scheduler", "last"),
    [
        (lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.1), 0.05 * 0.1**3),
        (lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)), 0.05 / 8),
        (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=8), None),
    ],
    ids=["StepLR", "LambdaLR", "OneCycleLR"],
)
def test_a9_any_scheduler_works(scheduler: Callable[[Any], Any], last: float | None) -> None:
    made: list[torch.optim.Optimizer] = []
    train(n_iter=7, scheduler=lambda optimizer: made.append(optimizer) or scheduler(optimizer))
    if last is not None:
        assert made[0].param_groups[0]["lr"] == pytest.approx(last, rel=1e-6)


def test_a9_a_scheduler_that_watches_the_loss_gets_it() -> None:
    watched: list[float] = []

    class Watching(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            watched.append(metrics)
            super().step(metrics, epoch)

    assert train(scheduler=Watching).loss_history == watched
    assert len(watched) == 7


# A10: bad input


def never(_: Any) -> torch.optim.Optimizer:
    pytest.fail("training began")


ONE_MODEL, ONE_PARAMETER = nn.Linear(3, 1), nn.Parameter(torch.zeros(1, 3))


def sharing() -> nn.Module:
    model = nn.Linear(3, 1)
    model.weight = ONE_PARAMETER
    return model


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"n_gpu": 0}, ValueError, "n_gpu=0 must be >= 1"),
        ({"n_gpu": -2}, ValueError, "n_gpu=-2 must be >= 1"),
        ({"n_gpu": 1.5}, ValueError, "n_gpu=1.5 must be an int"),
        ({"n_gpu": True}, ValueError, "n_gpu=True must be an int"),
        ({"workers": 0}, ValueError, "workers=0 cannot share 2 replicas: choose 1 <= workers <= 2"),
        ({"workers": 3}, ValueError, "workers=3 cannot share 2 replicas: choose 1 <= workers <= 2"),
        ({"data": []}, ValueError, "data is empty: there is nothing to train on"),
        ({"data": X[:0]}, ValueError, "data is empty: there is nothing to train on"),
        ({"data": {"x": X}}, TypeError, "data is a dict: pass a list of samples, or of batches"),
        ({"data": iter(PAIRS)}, TypeError, "data is a list_iterator: pass a list of samples, or of batches"),
        ({"data": None}, TypeError, "data is a NoneType: pass a list of samples, or of batches"),
        ({"n_iter": -1}, ValueError, "n_iter=-1 must be >= 0"),
        ({"n_iter": 2.5}, ValueError, "n_iter=2.5 must be an int"),
        ({"max_norm": -1.0}, ValueError, "max_norm=-1.0 must be >= 0"),
        ({"max_norm": math.nan}, ValueError, "max_norm=nan must be a finite number >= 0"),
        ({"lr": -0.1, "optimizer": None}, ValueError, "lr=-0.1 must be >= 0"),
        ({"lr": math.nan, "optimizer": None}, ValueError, "lr=nan must be a finite number >= 0"),
        ({"lr": 0.1}, ValueError, "lr=0.1 would be ignored, since optimizer is given: set the learning rate in opti"),
        ({"verbose": -1}, ValueError, "verbose=-1 must be >= 0"),
        ({"verbose": 2.5}, ValueError, "verbose=2.5 must be an int"),
        (
            {"loss_fn": lambda out, target: (out - target).expand(3)},
            ValueError,
            "the loss has shape (3,): it must be one number, such as loss.mean(). Without loss_fn, the output",
        ),
        ({"loss_fn": lambda out, _: out[:0]}, ValueError, "the loss has shape (0,): it must be one number"),
        ({"loss_fn": lambda out, _: out.item()}, TypeError, "the loss is a float: it must be a tensor with one number"),
        ({"loss_fn": lambda out, _: out.detach()}, ValueError, "the loss has no gradient: it must be computed from"),
        (
            {"make_model": lambda: ONE_MODEL},
            ValueError,
            "two models from make_model share the parameter 'weight': every call must build a new model",
        ),
        (
            {"make_model": sharing},
            ValueError,
            "two models from make_model share the parameter 'weight': every call must build a new model",
        ),
        ({"make_model": ONE_MODEL}, TypeError, "make_model is a Linear: pass a function that builds a new model on"),
        ({"make_model": 3}, TypeError, "make_model is a int: pass a function that builds a new model on every call"),
        ({"make_model": object}, TypeError, "the model is a object without a parameters() method: return an nn.Modu"),
        (
            {"make_model": lambda: Matrix(lambda _: {"w": 1.0})},
            TypeError,
            "parameters() gave float for 'w': it must give tensors",
        ),
        (
            {"make_model": lambda: linear().requires_grad_(False)},
            ValueError,
            "the loss has no gradient: it must be computed from the model's parameters",
        ),
    ],
)
def test_a10_bad_input_is_an_error_before_training(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        train(**{"optimizer": never, "lr": 1e-3, **settings})
    assert type(caught.value) is error
    assert str(caught.value).startswith(text)


def test_a10_the_checks_leave_the_users_random_streams_alone() -> None:
    def noisy(model: nn.Module, sample: Any) -> torch.Tensor:
        return model(sample[0] + random.random() + torch.rand(()))

    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(()).item(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    train(lambda: nn.Linear(3, 1), data=Jittered(), forward_fn=noisy, n_iter=0)
    assert (torch.rand(()).item(), random.random()) == expected
