"""`Ddp`: replicas in the user's hands, in one process or in several. Row B7, and row D5 for its part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import SmallResNet, digest
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(31, 3, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, 5, (31,), generator=GENERATOR)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(216, 5))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))


MODELS = {f.__name__: f for f in (linear, convolution, normalised, SmallResNet)}


def build(name: str = "linear") -> nn.Module:
    """In eval mode, where BatchNorm treats every sample by itself. Its statistics are not those it was born with."""
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for _ in range(3):
            model(IMAGES)
    return model.eval()


def replicas(count: int, name: str = "linear") -> list[nn.Module]:
    return [build(name) for _ in range(count)]


def loss_of(model: nn.Module, rows: range) -> torch.Tensor:
    part = torch.tensor(rows)  # a copy: aligned like the trainer's micro-batches
    return functional.cross_entropy(model(IMAGES[part]), LABELS[part])


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def own_share(sizes: Sequence[int]) -> tuple[int, int]:
    """How many replicas this process has, and the number of the first, where process i has sizes[i]."""
    rank = pl.World.from_environment("cpu").rank
    return sizes[rank], sum(sizes[:rank])


def in_processes(pool: WorkerPool, sizes: Sequence[int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(sizes, *args)` in as many processes as there are sizes; one is this process."""
    return [fn(sizes, *args)] if len(sizes) == 1 else pool.run(fn, len(sizes), sizes, *args)


SPLITS = [[3], [2, 1], [1, 1, 1]]
PARTS = [range(0, 6), range(6, 10), range(10, 12)]
EQUAL_PARTS = [range(0, 4), range(4, 8), range(8, 12)]


def averaged(sizes: Sequence[int], name: str, parts: list[range], exact: bool) -> list[dict[str, Any]]:
    """The gradients of this process's replicas after the exchange; replica i takes part i."""
    count, first = own_share(sizes)
    mine = parts[first : first + count]
    models = replicas(count, name)
    with pl.Ddp.wrap(models, exact=exact, timeout_s=20) as ddp:
        assert ddp.world_size == 3
        assert ddp.ranks == range(first, first + count)
        for model, part in zip(models, mine, strict=True):
            loss_of(model, part).backward()
        if parts == EQUAL_PARTS:
            ddp.all_reduce_gradients()
        else:
            ddp.weighted_all_reduce_gradients([len(part) for part in mine])
    return [gradients(model) for model in models]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_replicas_is_the_gradient_of_the_whole_batch(
    name: str, split: list[int], pool: WorkerPool
) -> None:
    whole = build(name)
    loss_of(whole, range(12)).backward()
    for parts in (PARTS, EQUAL_PARTS):
        for exact in (False, True):
            outcomes = [g for own in in_processes(pool, split, averaged, name, parts, exact) for g in own]
            assert len(outcomes) == 3
            for key, expected in gradients(whole).items():
                torch.testing.assert_close(outcomes[0][key], expected, rtol=0, atol=1e-6)
            assert len({digest(outcome) for outcome in outcomes}) == 1


@pytest.mark.parametrize("name", MODELS)
def test_an_exact_mean_does_not_depend_on_where_the_replicas_are(name: str, pool: WorkerPool) -> None:
    outcomes = [own[0] for split in SPLITS for own in in_processes(pool, split, averaged, name, PARTS, True)]
    assert len({digest(outcome) for outcome in outcomes}) == 1


# --- the same course as Trainer.setup(exact=True) -------------------------------------------------------------------

SCALES = [1.0, 1e9, 1.0, 1e-9]  # of the loss, by step: too much and too little for the grid, so that steps are repeated
STEPS = [
    [range(0, 3), range(3, 6), range(6, 9), range(9, 12)],
    [range(12, 15), range(15, 18), range(18, 21), range(21, 24)],
    [range(24, 27), range(27, 30), range(30, 31), range(31, 31)],  # the epoch's tail: one replica has nothing to do
]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)  # as the trainer has them


def with_trainer(name: str) -> str:
    with pl.Trainer.setup(
        build(name), adam, data=(IMAGES, LABELS), global_batch=12, micro_batch=3, shuffle=False, exact=True,
        optimization=pl.Optimization(train_mode=False),
    ) as trainer:  # fmt: skip
        for epoch in trainer.epochs(2):
            for batch in epoch:
                scale = SCALES[trainer.position.step % len(SCALES)]
                trainer.backward(scale * functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict())


def with_ddp(sizes: Sequence[int], name: str) -> list[str]:
    count, first = own_share(sizes)
    models = replicas(count, name)
    optimizers = [adam(model.parameters()) for model in models]
    ddp = pl.Ddp.wrap(models, exact=True, timeout_s=20)
    for number, parts in enumerate(STEPS * 2):
        mine = parts[first : first + count]
        for model, part in zip(models, mine, strict=True):
            model.zero_grad()
            if part:
                (SCALES[number % len(SCALES)] * loss_of(model, part)).backward()
        if len({len(part) for part in parts}) == 1:
            ddp.all_reduce_gradients()
        else:
            ddp.weighted_all_reduce_gradients([len(part) for part in mine])
        for optimizer in optimizers:
            optimizer.step()
    ddp.close()
    return [digest(model.state_dict()) for model in models]


@pytest.mark.parametrize("name", ["convolution", "normalised"])
def test_an_exact_loop_ends_with_the_trainers_weights(name: str, pool: WorkerPool) -> None:
    expected = with_trainer(name)
    assert with_ddp([4], name) == [expected] * 4
    for split in ([2, 2], [1, 3]):
        assert [own for process in pool.run(with_ddp, 2, split, name) for own in process] == [expected] * 4


def exact_numbers() -> pl.Ddp:
    """Two replicas of one float64 parameter: in their mean the grid shows in the last bits."""
    return pl.Ddp.wrap([nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)], exact=True)


def mean_of(gradient: float, ddp: pl.Ddp, counts: Sequence[int] = (1, 1)) -> float:
    for model in ddp.models:
        model.weight.grad = torch.full_like(model.weight, gradient)
    ddp.weighted_all_reduce_gradients(counts)
    return ddp.models[0].weight.grad.item()


def test_an_exact_mean_goes_on_with_the_same_bits_from_its_state() -> None:
    with exact_numbers() as ddp:
        mean_of(6000.0, ddp)
        state = ddp.state_dict()
        expected = mean_of(100 / 3, ddp)
    with exact_numbers() as fresh, exact_numbers() as resumed:
        resumed.load_state_dict(state)
        assert mean_of(100 / 3, resumed) == expected
        assert mean_of(100 / 3, fresh) != expected


def test_a_replica_that_counts_nothing_is_no_micro_batch_for_the_grid() -> None:
    with exact_numbers() as fresh, exact_numbers() as idle:
        for ddp in (fresh, idle):
            mean_of(40.0, ddp)  # calibrates the grid
        mean_of(30000.0, idle, (5, 0))  # two micro-batches of this size would move it
        assert mean_of(100 / 3, idle) == mean_of(100 / 3, fresh)
        mean_of(60000.0, idle, (5, 5))
        assert mean_of(100 / 3, idle) != mean_of(100 / 3, fresh)


# --- what is averaged -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Which part is used is decided by the caller; `frozen` is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(2, 2) for _ in range(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        return self.frozen(self.get_submodule(side)(x)).square().mean()


X = torch.randn(4, 2, generator=GENERATOR)


def branches(count: int = 2) -> list[Branches]:
    torch.manual_seed(2)
    first = Branches()
    return [copy.deepcopy(first) for _ in range(count)]


def test_a_missing_gradient_counts_as_zero_and_one_that_nobody_has_stays_none() -> None:
    models = branches()
    with pl.Ddp.wrap(models) as ddp:
        models[0](X, "left").backward()
        models[1](X, "right").backward()
        left, right = models[0].left.weight.grad.clone(), models[1].right.weight.grad.clone()
        ddp.all_reduce_gradients()
    for model in models:
        torch.testing.assert_close(model.left.weight.grad, left / 2)
        torch.testing.assert_close(model.right.weight.grad, right / 2)
        assert model.never.weight.grad is None
        assert model.frozen.weight.grad is None


def test_a_replica_that_counts_nothing_adds_nothing_not_even_nan() -> None:
    models = branches()
    with pl.Ddp.wrap(models) as ddp:
        models[0](X, "left").backward()
        (models[1](X, "left") * torch.nan + models[1](X, "right")).backward()
        expected = models[0].left.weight.grad.clone()
        ddp.weighted_all_reduce_gradients([4, 0])
    for model in models:
        assert torch.equal(model.left.weight.grad, expected)
        assert model.right.weight.grad is None


def test_a_parameter_frozen_later_neither_gives_nor_takes() -> None:
    models = branches()
    with pl.Ddp.wrap(models) as ddp:
        for model in models:
            model(X, "left").backward()
        models[0].left.bias.requires_grad_(False)
        models[0].left.bias.grad.fill_(7.0)
        other = models[1].left.bias.grad.clone()
        ddp.all_reduce_gradients()
        assert models[0].left.bias.grad.tolist() == [7.0, 7.0]
        torch.testing.assert_close(models[1].left.bias.grad, other / 2)


def test_a_parameter_unfrozen_later_is_an_error_that_says_to_wrap_again() -> None:
    models = branches()
    with pl.Ddp.wrap(models) as ddp:
        models[0].frozen.requires_grad_(True)
        with pytest.raises(
            pl.errors.MisuseError, match=r"'frozen\.weight' was frozen when .* wrap the replicas again after unfree"
        ):
            ddp.all_reduce_gradients()


def test_gradients_stay_the_users_own_and_go_on_adding_up() -> None:
    models = branches()
    with pl.Ddp.wrap(models) as ddp:
        models[0](X, "left").backward()
        once = gradients(models[0])["left.weight"]
        kept = models[0].left.weight.grad
        ddp.all_reduce_gradients()
        assert models[0].left.weight.grad is kept  # changed in place
        for model in models:
            model(X, "left").backward()
        ddp.all_reduce_gradients()
    for model in models:
        torch.testing.assert_close(model.left.weight.grad, 1.5 * once)
    assert models[0].left.weight.grad.data_ptr() != models[1].left.weight.grad.data_ptr()


def test_gradients_of_any_layout_and_type_are_averaged() -> None:
    layer = nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last)
    models = [layer, copy.deepcopy(layer)]
    models[0].weight.grad = torch.ones(4, 3, 1, 1, dtype=torch.bfloat16).expand(4, 3, 3, 3)  # nine share one number
    models[1].weight.grad = torch.full((4, 3, 3, 3), 3.0, dtype=torch.bfloat16)
    with pl.Ddp.wrap(models) as ddp:
        ddp.all_reduce_gradients()
    for model in models:
        assert torch.equal(model.weight.grad, torch.full_like(model.weight, 2.0))
        assert model.weight.grad.stride() == model.weight.stride()


def test_models_that_are_no_modules_are_taken_too() -> None:
    class Plain:
        def __init__(self) -> None:
            self.w = torch.zeros(3, requires_grad=True)

        def parameters(self) -> dict[str, torch.Tensor]:
            return {"w": self.w}

    models = [Plain(), Plain()]
    with pl.Ddp.wrap(models, ["cpu", "cpu"]) as ddp:
        for factor, model in enumerate(models, start=1):
            (factor * model.w).sum().backward()
        ddp.all_reduce_gradients()
        ddp.sync_params()
    assert [model.w.grad.tolist() for model in models] == [[1.5] * 3] * 2


# --- parameters and buffers -----------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), value).t())  # not contiguous
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("mask", torch.tensor([value > 0, True]))


def synced(sizes: Sequence[int], only_buffers: bool) -> list[dict[str, Any]]:
    count, first = own_share(sizes)
    models = [Buffered(float(first + i)) for i in range(count)]
    with pl.Ddp.wrap(models, timeout_s=20) as ddp:
        (ddp.sync_buffers if only_buffers else ddp.sync_params)()
    return [{name: value.reshape(-1).tolist() for name, value in model.state_dict().items()} for model in models]


@pytest.mark.parametrize("split", [[3], [2, 1]], ids=str)
def test_all_replicas_get_what_replica_0_has(split: list[int], pool: WorkerPool) -> None:
    buffers = {"count": [0], "mask": [False, True]}
    outcomes = [own for process in in_processes(pool, split, synced, False) for own in process]
    assert outcomes == [{"weight": [0.0] * 6, "frozen": [0.0] * 2, **buffers}] * 3
    outcomes = [own for process in in_processes(pool, split, synced, True) for own in process]
    assert outcomes == [{"weight": [float(i)] * 6, "frozen": [float(i)] * 2, **buffers} for i in range(3)]


# --- errors ---------------------------------------------------------------------------------------------------------


def lines(*sizes: tuple[int, int], **options: Any) -> list[nn.Module]:
    return [nn.Linear(*size, **options) for size in sizes]


def shared() -> list[nn.Module]:
    model = nn.Linear(2, 2)
    return [nn.Linear(2, 2), model, model]


def frozen_in_one() -> list[nn.Module]:
    models = lines((2, 2), (2, 2))
    models[1].bias.requires_grad_(False)
    return models


def spread() -> list[nn.Module]:
    models = lines((2, 2), (2, 2))
    models[1].register_buffer("elsewhere", torch.zeros(1, device="meta"))
    models[0].register_buffer("elsewhere", torch.zeros(1))
    return models


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no model": (
        lambda: [],
        ValueError,
        r"models has 0 replicas: give at least 2, or at least 1 in each of",
    ),
    "one model": (lambda: lines((2, 2)), ValueError, r"models has 1 replicas: give at least 2, or"),
    "not a list": (lambda: nn.Sequential(*lines((2, 2))), TypeError, r"models is one Sequential: give a list of repli"),
    "count": (
        lambda: [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
        ValueError,
        r"replica 1 has 1 parameters and buffers, not 2 as in replica 0: replicas must be built alike",
    ),
    "shape": (
        lambda: lines((2, 2), (2, 3)),
        ValueError,
        r"replica 1 has parameter 'weight' of shape \(3, 2\) and type torch.float32, not parameter 'weight'",
    ),
    "type": (
        lambda: [nn.Linear(2, 2), nn.Linear(2, 2).double()],
        ValueError,
        r"and type torch.float64, not .*float32 as in",
    ),
    "name": (
        lambda: [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})],
        ValueError,
        r"replica 1 has parameter 'b.weight' .* not parameter 'a.weight'",
    ),
    "buffer": (
        lambda: [Buffered(0.0), nn.ParameterDict(dict(Buffered(0.0).named_parameters()))],
        ValueError,
        r"replica 1 has 2 parameters and buffers, not 4",
    ),
    "frozen in one": (
        frozen_in_one,
        ValueError,
        r"'bias' of shape \(2,\) and type torch.float32, frozen, not parameter",
    ),
    "shared": (shared, ValueError, r"replicas 1 and 2 share parameter 'weight': give each .* copy.deepcopy\(model\)"),
    "nothing to train": (
        lambda: [model.requires_grad_(False) for model in lines((2, 2), (2, 2))],
        ValueError,
        r"replica 0 has no parameter that requires a gradient: unfreeze",
    ),
    "complex": (
        lambda: lines((2, 2), (2, 2), dtype=torch.complex64),
        ValueError,
        r"'weight' of replica 0 is torch.complex64: only real floating point",
    ),
    "spread": (spread, ValueError, r"replica 1 is on cpu and meta: a replica must be on one device. Move it, or pass"),
    "no model at all": (lambda: [1, 2], TypeError, r"the model is a int without a parameters\(\) method"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_replicas_that_do_not_fit_are_refused_by_name(case: str) -> None:
    models, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        pl.Ddp.wrap(models())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": ["cpu"]}, r"devices=\['cpu'\] for 2 replicas: give a list of 2, one for each"),
        ({"devices": "cpu"}, r"devices='cpu' for 2 replicas"),
        ({"devices": ["cpu", "cuda:99"]}, r"device='cuda:99' is not available: torch sees .* Choose one of these"),
        ({"timeout_s": 0.0}, r"timeout_s=0.0 must be > 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pl.Ddp.wrap(lines((2, 2), (2, 2)), **settings)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([3], r"counts=\[3\]: give a number of samples, an int >= 0, for each of the 2 replicas in this process"),
        ([3, -1], r"counts=\[3, -1\]: give a number of samples, an int >= 0"),
        ([0.5, 0.5], r"counts=\[0.5, 0.5\]: give a number of samples, an int >= 0"),
        ([0, 0], r"the counts of all replicas are \[0, 0\], with sum 0: leave the step out"),
    ],
)
def test_counts_that_give_no_mean_are_refused_and_no_gradient_is_touched(counts: Any, message: str) -> None:
    models = branches()
    for model in models:
        model(X, "left").backward()
    before = digest(*map(gradients, models))
    with pl.Ddp.wrap(models) as ddp, pytest.raises(ValueError, match=message):
        ddp.weighted_all_reduce_gradients(counts)
    assert digest(*map(gradients, models)) == before


def test_a_sparse_gradient_is_refused_and_no_gradient_is_touched() -> None:
    torch.manual_seed(3)
    models = [nn.Sequential(nn.Embedding(4, 3, sparse=i == 1), nn.Linear(3, 3)) for i in range(2)]
    for i, model in enumerate(models, start=1):
        (i * model(torch.tensor([1, 2]))).sum().backward()
    before = digest(gradients(models[0]))
    with (
        pl.Ddp.wrap(models) as ddp,
        pytest.raises(pl.errors.GradientError, match=r"'0.weight' of replica 1 has a sparse gradient.* sparse=False"),
    ):
        ddp.all_reduce_gradients()
    assert digest(gradients(models[0])) == before
    assert models[1][0].weight.grad.is_sparse


def test_nothing_can_be_exchanged_after_close() -> None:
    ddp = pl.Ddp.wrap(lines((2, 2), (2, 2)))
    ddp.close()
    ddp.close()
    for use in (
        ddp.sync_params,
        ddp.sync_buffers,
        ddp.all_reduce_gradients,
        lambda: ddp.weighted_all_reduce_gradients([1, 1]),
    ):
        with pytest.raises(pl.errors.MisuseError, match="this Ddp is closed: wrap the models again"):
            use()


def test_processes_that_disagree_are_told_on_all_sides(pool: WorkerPool) -> None:
    def shapes() -> None:
        rank = pl.World.from_environment("cpu").rank
        pl.Ddp.wrap([nn.Linear(2, 2 + rank)], timeout_s=20)

    def modes() -> None:
        rank = pl.World.from_environment("cpu").rank
        pl.Ddp.wrap([nn.Linear(2, 2)], exact=rank == 1, timeout_s=20)

    def nothing() -> None:
        with pl.Ddp.wrap([nn.Linear(2, 2)], timeout_s=20) as ddp:
            ddp.weighted_all_reduce_gradients([0])

    for fn, message in (
        (shapes, "rank 1's model has parameter 'weight' of shape (3, 2)"),
        (modes, "rank 1 passed exact=True, rank 0 exact=False"),
        (nothing, "the counts of all replicas are [0, 0], with sum 0"),
    ):
        with pytest.raises(WorkersFailed) as failed:
            pool.run(fn, 2)
        assert [message in str(error) for error in failed.value.errors.values()] == [True, True]


# --- side by side ---------------------------------------------------------------------------------------------------


def test_exact_settings_last_as_long_as_anybody_needs_them() -> None:
    torch.set_num_threads(2)
    try:
        first, second = (pl.Ddp.wrap(replicas(2), exact=True) for _ in range(2))
        first.close()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
        second.close()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_failed_wrap_leaves_no_settings_behind() -> None:
    with pytest.raises(ValueError, match="built alike"):
        pl.Ddp.wrap(lines((2, 2), (2, 3)), exact=True)
    assert not torch.are_deterministic_algorithms_enabled()


def interleaved(sizes: Sequence[int]) -> tuple[list[float], str]:
    """Two Ddps and a Trainer, made, used and closed in orders of their own."""
    count, _ = own_share(sizes)
    generators, critics = ([nn.Linear(2, 1) for _ in range(count)] for _ in range(2))
    of_generators = pl.Ddp.wrap(generators, timeout_s=20)
    trainer = pl.Trainer.setup(
        build(),
        adam,
        data=(IMAGES, LABELS),
        global_batch=12,
        micro_batch=3,
        runtime=pl.Runtime(timeout_s=20),
        exact=True,
    )
    of_critics = pl.Ddp.wrap(critics, timeout_s=20)
    for model, number in zip(generators, of_generators.ranks, strict=True):
        (number * model.bias).sum().backward()
    for model, number in zip(critics, of_critics.ranks, strict=True):
        (10 * number * model.bias).sum().backward()
    of_critics.all_reduce_gradients()
    of_generators.all_reduce_gradients()
    of_generators.close()
    for epoch in trainer.epochs(1):
        for batch in epoch:
            trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
            trainer.step()
    trainer.close()
    of_critics.all_reduce_gradients()
    of_critics.close()
    return [generators[0].bias.grad.item(), critics[0].bias.grad.item()], digest(trainer.model.state_dict())


def test_several_live_side_by_side_and_beside_a_trainer(pool: WorkerPool) -> None:
    alone = interleaved([2])
    assert alone[0] == [0.5, 5.0]
    assert pool.run(interleaved, 2, [1, 1]) == [alone, alone]


def used_after_another_has_closed() -> tuple[list[float], bool]:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    of_first, of_second = pl.Ddp.wrap([first], timeout_s=20), pl.Ddp.wrap([second], timeout_s=20)
    for model, number in ((first, of_first.ranks[0]), (second, 10 * of_second.ranks[0])):
        (number * model.bias).sum().backward()
    of_first.all_reduce_gradients()
    of_first.close()
    of_second.all_reduce_gradients()
    of_second.sync_params()
    of_second.close()
    return [first.bias.grad.item(), second.bias.grad.item()], torch.distributed.is_initialized()


def test_the_world_that_the_first_has_joined_lasts_until_the_last_has_left_it() -> None:
    assert pl.launch(used_after_another_has_closed, 2) == ([0.5, 5.0], False)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("devices", [["cuda", "cuda"], ["cuda", "cpu"], ["cpu", "cuda"]], ids=str)
def test_replicas_are_moved_to_their_devices_and_averaged_over_them(devices: list[str], exact: bool) -> None:
    whole = build("convolution")
    loss_of(whole, range(12)).backward()
    models = replicas(2, "convolution")
    optimizers = [adam(model.parameters()) for model in models]
    with pl.Ddp.wrap(models, devices, exact=exact) as ddp:
        assert [device.type for device in ddp.devices] == devices
        for model, device, part in zip(models, ddp.devices, (range(0, 8), range(8, 12)), strict=True):
            rows = torch.tensor(part)
            functional.cross_entropy(model(IMAGES[rows].to(device)), LABELS[rows].to(device)).backward()
        ddp.weighted_all_reduce_gradients([8, 4])
        for optimizer in optimizers:
            optimizer.step()
    for key, expected in gradients(whole).items():
        for model in models:
            torch.testing.assert_close(gradients(model)[key].cpu(), expected, rtol=0, atol=1e-5)
    adam(whole.parameters()).step()
    assert not torch.equal(models[0][0].weight.cpu(), build("convolution")[0].weight)  # the optimizer reached it
    assert digest(gradients(models[0])) == digest(gradients(models[1]))
