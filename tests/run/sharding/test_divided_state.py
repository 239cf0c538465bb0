"""The optimizer's state divided among the workers: the same bits as undivided, in exact mode."""

from __future__ import annotations

import itertools
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_runs import FakeGraphs, class_loss, use_graphs
from grouping import grouped
from models import digest, mlp, tokens, vectors
from scenarios import SCENARIOS
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.checkpoint.reader import checkpoint_at
from paceline.errors import MisuseError, WorkerError
from paceline.plan import sharding
from paceline.run.sharding.update import Phase

SEGMENT_NUMEL = 256  # small, so that the parameters of small models are cut too


def train(name: str, *, shard: str | None = None, **settings: Any) -> tuple[str, list[float]]:
    """A digest of the weights after one epoch, and the losses."""
    scenario = SCENARIOS[name]
    settings = {"exact": True, "global_batch": 32, "micro_batch": 4, **settings}
    before, sharding.SEGMENT_NUMEL = sharding.SEGMENT_NUMEL, SEGMENT_NUMEL
    try:
        with pl.Trainer.setup(
            scenario.build,
            scenario.optimizer,
            data=scenario.data,
            scheduler=scenario.scheduler,
            max_grad_norm=scenario.max_grad_norm,
            seed=7,
            **grouped(**{"shard": shard, **settings} if shard else settings),
        ) as trainer:
            losses: list[float] = []
            trainer.every(1, lambda record: losses.append(record.loss))
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    with trainer.autocast():
                        loss = scenario.loss(trainer.model, batch)
                    trainer.backward(loss)
                    trainer.step()
            return digest(trainer.model.state_dict()), losses
    finally:
        sharding.SEGMENT_NUMEL = before


@cache
def whole(name: str) -> tuple[str, list[float]]:
    return train(name)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_same_bits_on_any_number_of_workers(name: str, shard: str, pool: WorkerPool) -> None:
    reference = whole(name)
    for shares, shard_by in [([8], "equal"), ([4, 4], "equal"), ([1, 5, 2], (1, 3, 0)), ([2, 2, 2, 2], (4, 3, 2, 1))]:

        def divided(shares: Any = shares, shard_by: Any = shard_by) -> Any:
            return train(name, shard=shard, shard_by=shard_by, shares=shares)

        assert pool.run(divided, len(shares)) == [reference] * len(shares), shares


class Odd(nn.Module):
    """Tied, frozen, empty, scalar, unused and channels-last parameters, in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.first = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(300))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        picture = self.conv(x[:, :3, :].unflatten(2, (4, 6)))
        x = self.frozen(torch.tanh(self.first(x))) * self.scale + picture.mean() + self.empty.sum()
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_groups(optimizer: Any) -> Any:
    """Vectors without weight decay, and a rate of their own."""

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        return optimizer([{"params": matrices}, {"params": vectors, "lr": 3e-3}])

    return make


def muon_and_adam(parameters: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.ndim == 2 and p.numel()]
    others = [p for p in parameters if p.ndim != 2 or not p.numel()]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]


OPTIMIZERS = {
    "SGD": in_groups(lambda groups: torch.optim.SGD(groups, lr=1e-2)),
    "momentum": in_groups(lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)),
    "Adam": in_groups(lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True)),
    "AdamW": in_groups(lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)),
    "RMSprop": in_groups(lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True)),
    "Adagrad": in_groups(lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1)),
    "Adadelta": in_groups(lambda groups: torch.optim.Adadelta(groups, lr=0.5)),
    "Adamax": in_groups(lambda groups: torch.optim.Adamax(groups, lr=1e-2)),
    "NAdam": in_groups(lambda groups: torch.optim.NAdam(groups, lr=1e-2)),
    "RAdam": in_groups(lambda groups: torch.optim.RAdam(groups, lr=1e-2)),
    "ASGD": in_groups(lambda groups: torch.optim.ASGD(groups, lr=1e-2)),
    "Rprop": in_groups(lambda groups: torch.optim.Rprop(groups, lr=1e-3)),
    "Muon": muon_and_adam,
}


def train_odd(optimizer: Any, steps: int = 6, folder: Any = None, **settings: Any) -> str:
    """A digest of the weights and of the averaged weights."""
    before, sharding.SEGMENT_NUMEL = sharding.SEGMENT_NUMEL, SEGMENT_NUMEL
    settings = {"max_grad_norm": 0.5, "exact": True, "ema": 0.9, **settings}
    if folder is not None:
        settings["checkpoints"] = pl.Checkpoints(folder, every_steps=3)
    try:
        with pl.Trainer.setup(
            Odd, optimizer, data=tokens(64, vocabulary=40), global_batch=8, micro_batch=2, **grouped(**settings)
        ) as trainer:
            for epoch in trainer.epochs(max_steps=steps):
                for batch in epoch:
                    trainer.backward(trainer.model(batch))
                    trainer.step()
            with trainer.ema_weights():
                averages = digest(trainer.model.state_dict())
            return digest(trainer.model.state_dict()) + averages
    finally:
        sharding.SEGMENT_NUMEL = before


def test_every_optimizer_has_the_bits_of_the_whole_one(pool: WorkerPool) -> None:
    def all_of_them(**settings: Any) -> dict[str, str]:
        return {name: train_odd(optimizer, **settings) for name, optimizer in OPTIMIZERS.items()}

    reference = all_of_them()
    assert len(set(reference.values())) == len(reference)
    for size, other in ((2, {}), (3, {"shard_by": (2, 0, 1)}), (3, {"redundancy": 2})):

        def divided(other: Any = other) -> dict[str, str]:
            return all_of_them(shard="optimizer", **other)

        for found in pool.run(divided, size):
            assert found == reference


def test_one_term_sums_and_token_weights_have_the_same_bits(pool: WorkerPool) -> None:
    def both(**settings: Any) -> list[str]:
        make = OPTIMIZERS["AdamW"]
        weighted = train_odd(make, weight_fn=lambda batch: int((batch > 20).sum()), **settings)
        return [train_odd(make, micro_batch=8, **settings), weighted]

    def train_odd(make: Any, micro_batch: int = 2, **settings: Any) -> str:
        before, sharding.SEGMENT_NUMEL = sharding.SEGMENT_NUMEL, SEGMENT_NUMEL
        try:
            with pl.Trainer.setup(
                Odd,
                make,
                data=tokens(40, vocabulary=40),
                global_batch=8,
                micro_batch=micro_batch,
                exact=True,
                **grouped(**settings),
            ) as trainer:
                for epoch in trainer.epochs(1):
                    for batch in epoch:
                        trainer.backward(trainer.model(batch))
                        trainer.step()
                return digest(trainer.model.state_dict())
        finally:
            sharding.SEGMENT_NUMEL = before

    reference = both()
    for shard in ("optimizer", "gradients"):
        assert pool.run(lambda shard=shard: both(shard=shard), 2) == [reference] * 2


@pytest.mark.parametrize("exact", [False, True])
def test_an_empty_parameter_may_be_alone_in_its_bucket(exact: bool, pool: WorkerPool) -> None:
    class WithEmpty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 1)
            self.empty = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))  # a bucket has one dtype

    def weights(**settings: Any) -> torch.Tensor:
        with pl.Trainer.setup(
            WithEmpty, lambda p: torch.optim.AdamW(p), data=torch.ones(8, 6), global_batch=8, micro_batch=2,
            exact=exact, **settings,
        ) as trainer:  # fmt: skip
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(trainer.model(batch).square().mean() + trainer.model.empty.sum())
                    trainer.step()
            return trainer.model.weight.detach().clone()

    expected = weights()
    for shard in ("optimizer", "gradients"):
        for found in pool.run(lambda shard=shard: weights(shard=shard), 2):
            torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


def test_saved_and_resumed_on_other_numbers_of_workers_divided_and_whole(pool: WorkerPool, tmp_path: Path) -> None:
    for name in ("AdamW", "Muon", "Adagrad"):
        make, folder = OPTIMIZERS[name], str(tmp_path / name)

        def go_on(steps: int, make: Any = make, folder: str = folder, **settings: Any) -> str:
            return train_odd(make, steps, folder, **settings)

        reference = train_odd(make, 15)
        pool.run(lambda go_on=go_on: go_on(3, shard="optimizer", shard_by=(1, 3)), 2)
        pool.run(lambda go_on=go_on: go_on(6, shard="gradients"), 3)
        go_on(9)
        pool.run(lambda go_on=go_on: go_on(12, shard="optimizer"), 2)
        assert pool.run(lambda go_on=go_on: go_on(15), 2) == [reference] * 2, name


def test_the_files_of_a_divided_state_are_those_of_a_whole_one(pool: WorkerPool, tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    train_odd(make, 3, str(tmp_path / "whole"))
    pool.run(lambda: train_odd(make, 3, str(tmp_path / "divided"), shard="optimizer"), 2)
    for component in ("optimizer", "ema"):
        saved = [checkpoint_at(tmp_path / name).load(component) for name in ("whole", "divided")]
        assert digest(saved[0]) == digest(saved[1])
        # Each worker has written what it holds.
        files = checkpoint_at(tmp_path / "divided").manifest.contents.components[component].parts["whole"]
        assert [f"{component}-0000{number}-of-00002.safetensors" in files for number in (1, 2)] == [True, True]


def grow(**settings: Any) -> str:
    """Unfreezes, freezes and adds parameters between steps."""
    before, sharding.SEGMENT_NUMEL = sharding.SEGMENT_NUMEL, SEGMENT_NUMEL
    try:
        with pl.Trainer.setup(
            Odd,
            lambda p: torch.optim.AdamW([each for each in p if each.shape != (300,)], lr=1e-2),
            data=tokens(64, vocabulary=40),
            global_batch=8,
            micro_batch=2,
            exact=True,
            **grouped(**settings),
        ) as trainer:

            def change(record: Any) -> None:
                model: Any = trainer.model
                if record.step == 2:
                    model.frozen.requires_grad_(True)
                    trainer.optimizer.add_param_group({"params": list(model.frozen.parameters())})
                if record.step == 4:
                    model.first.requires_grad_(False)
                if record.step == 6:
                    model.first.requires_grad_(True)

            trainer.every(1, change)
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(trainer.model(batch))
                    trainer.step()
            return digest(trainer.model.state_dict())
    finally:
        sharding.SEGMENT_NUMEL = before


def test_parameters_that_are_added_frozen_and_unfrozen(pool: WorkerPool) -> None:
    reference = grow()
    assert pool.run(lambda: grow(shard="optimizer"), 3) == [reference] * 3


def test_the_average_of_a_parameter_that_was_unfrozen_is_resumed(tmp_path: Path, pool: WorkerPool) -> None:
    """SGD without momentum has no state of it, by which it would be divided before."""

    def averages(max_steps: int, folder: Path, **settings: Any) -> str:
        def build() -> nn.Module:
            model = mlp()
            model[0].requires_grad_(False)
            return model

        optimization = pl.Optimization(ema=0.9, **settings)
        settings = {"global_batch": 16, "micro_batch": 4, "exact": True, "checkpoints": pl.Checkpoints(folder)}
        with pl.Trainer.setup(
            build,
            lambda p: torch.optim.SGD(p, lr=0.1),
            data=vectors(64),
            optimization=optimization,
            **settings,
        ) as trainer:
            trainer.every(1, lambda _: trainer.model[0].requires_grad_(True))
            for epoch in trainer.epochs(2, max_steps=max_steps):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            with trainer.ema_weights():
                return digest(trainer.model.state_dict())

    expected = averages(8, tmp_path / "whole")
    pool.run(lambda: averages(4, tmp_path / "divided", shard="optimizer"), 2)
    assert pool.run(lambda: averages(8, tmp_path / "divided", shard="optimizer"), 2) == [expected] * 2


def test_fp16_and_plain_mode(pool: WorkerPool) -> None:
    """To rounding: plain sums depend on who adds them up."""

    def plain(**settings: Any) -> list[float]:
        losses: list[float] = []
        with pl.Trainer.setup(
            mlp,
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            data=vectors(64),
            global_batch=16,
            micro_batch=2,
            max_grad_norm=1.0,
            **grouped(**settings),
        ) as trainer:
            trainer.every(1, lambda record: losses.append(record.loss))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    with trainer.autocast():
                        loss = functional.cross_entropy(trainer.model(batch.x).float(), batch.y)
                    trainer.backward(loss)
                    trainer.step()
        return losses

    for precision in ("fp32", "fp16"):
        reference = plain(precision=precision)
        for shard in ("optimizer", "gradients"):
            for losses in pool.run(lambda shard=shard, p=precision: plain(shard=shard, precision=p), 2):
                assert losses == pytest.approx(reference, rel=1e-3), (precision, shard)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_replayed_micro_batches_have_the_same_bits(shard: str, pool: WorkerPool) -> None:
    """CUDA graphs, which are imitated here, have forward and backward; each worker updates its pieces without one."""

    def replayed(**settings: Any) -> tuple[str, int]:
        graphs = FakeGraphs()
        with pl.Trainer.setup(
            mlp,
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            data=vectors(16 * 20),
            global_batch=16,
            micro_batch=4,
            max_grad_norm=0.3,
            exact=True,
            **grouped(**settings),
        ) as trainer:
            if settings:
                use_graphs(trainer, graphs)
            step = trainer.step_with(lambda batch: class_loss(trainer.model, batch))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    step(batch)
            return digest(trainer.model.state_dict()), graphs.num_replayed

    reference, _ = replayed()
    for found, num_replayed in pool.run(lambda: replayed(shard=shard, shares="equal"), 2):
        assert found == reference
        assert num_replayed > 40


def test_pieces_by_memory_and_speed(pool: WorkerPool) -> None:
    """How much each of three workers holds, in parts of the whole."""

    def held(by: str, memory: tuple[float, ...], speed: tuple[float, ...] = (1, 1, 1)) -> list[float]:
        from paceline.run.sharding import divide

        def own(numbers: tuple[float, ...]) -> Any:
            return lambda _: numbers[int(os.environ["RANK"])] * 1e9

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(divide, "_memory_bytes", own(memory))
            patch.setattr(divide, "_update_speed", own(speed))
            patch.setattr(sharding, "SEGMENT_NUMEL", SEGMENT_NUMEL)
            with pl.Trainer.setup(
                lambda: nn.Linear(512, 512),
                torch.optim.AdamW,
                data=vectors(16),
                global_batch=8,
                optimization=pl.Optimization(shard="optimizer", shard_by=by),
            ) as trainer:
                pieces: Any = trainer.run.loop.replica.pieces
                loads = pieces.shards.division.loads
                return [load / sum(loads) for load in loads]

    for by, memory, speed, expected in (
        ("auto", (8, 24, 8), (1, 1, 1), (0.2, 0.6, 0.2)),
        ("auto", (24, 24, 23), (1, 5, 1), (1 / 3, 1 / 3, 1 / 3)),
        ("memory", (8, 24, 8), (1, 1, 1), (0.2, 0.6, 0.2)),
        ("speed", (8, 24, 8), (2, 1, 1), (0.5, 0.25, 0.25)),
        ("equal", (8, 24, 8), (2, 1, 1), (1 / 3, 1 / 3, 1 / 3)),
    ):
        for found in pool.run(held, 3, by, memory, speed):
            assert found == pytest.approx(expected, abs=0.03), by


def test_the_speed_of_an_update_includes_the_time_in_which_a_quota_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.run.sharding import divide

    ticks = itertools.accumulate(itertools.cycle([0.1, 0.01, 0.01, 0.01]))
    monkeypatch.setattr(divide, "perf_counter", lambda: next(ticks))
    per_update_s = divide._TRIAL_NUMEL / divide._update_speed(torch.device("cpu"))
    assert per_update_s == pytest.approx(0.13 / 4, rel=0.3)


def refusals() -> list[str]:
    """What a divided run does not do, by the messages that say so."""

    class Custom(torch.optim.SGD):
        pass

    def setup(optimizer: Any = torch.optim.AdamW, model: Any = mlp, **settings: Any) -> pl.Trainer:
        return pl.Trainer.setup(
            model, optimizer, data=vectors(16), global_batch=8, **grouped(**{"shard": "optimizer", **settings})
        )

    texts = []
    for attempt in (
        lambda: setup(lambda p: Custom(p, lr=0.1)),
        lambda: setup(lambda p: torch.optim.LBFGS(p)),
        lambda: setup(lambda p: torch.optim.Adafactor(p)),
        lambda: setup(shard_by=(1, 2, 3)),
        lambda: setup(strategy=pl.Averaging(every=2)),
        lambda: setup(model=lambda: nn.Sequential(Gapped(), mlp())),
    ):
        with pytest.raises((ValueError, TypeError, MisuseError)) as caught:
            attempt()
        texts.append(str(caught.value))
    with setup() as trainer:
        for call in (
            trainer.optimizer.state_dict,
            lambda: trainer.optimizer.load_state_dict({}),
            lambda: trainer.on_gradients(print),
        ):
            with pytest.raises(MisuseError) as refused:
                call()
            texts.append(str(refused.value))

    def replace_memory(model: Any) -> None:
        model[0].weight.data = model[0].weight.data.clone()

    for settings, change in (({}, replace_memory), ({"model": Counting, "redundancy": 2}, lambda _: None)):
        with pytest.raises(MisuseError) as refused, setup(**settings) as trainer:
            change(trainer.model)
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(class_loss(trainer.model, batch))
                    trainer.step()
        texts.append(str(refused.value))
    return texts


class Counting(nn.Module):
    """Its forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


class Gapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12, 2)[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_refusals_name_the_reason(pool: WorkerPool) -> None:
    for texts in pool.run(refusals, 2):
        expected = (
            "the state of Custom cannot be divided among the workers: it is not known whether",
            "closure",
            "the state of Adafactor cannot be divided",
            "shard_by=[1.0, 2.0, 3.0] names 3 workers, the world has 2",
            "shard='optimizer' needs strategy='gradients'",
            "parameter '0.weight' has gaps or overlaps in memory",
            "optimizer.state_dict() has no state: it is divided",
            "optimizer.load_state_dict() cannot be used while",
            "on_gradients() needs whole gradients",
            "the memory of parameter '0.weight' was replaced",
            "the model's forward changes a buffer that is not a statistic of BatchNorm",
        )
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_settings_without_effect_are_refused() -> None:
    def setup(**settings: Any) -> pl.Trainer:
        data = {"data": vectors(16), "global_batch": 8}
        return pl.Trainer.setup(lambda: nn.Linear(12, 4), torch.optim.AdamW, **data, **settings)

    for group, problem in (
        (pl.Optimization(shard_by="equal"), "shard_by='equal' would be ignored: give shard='optimizer' too"),
        (pl.Optimization(redundancy=2), "redundancy=2 would be ignored: give shard='optimizer' too"),
        (pl.Optimization(master_weights=True), "master_weights=True would be ignored: give shard='optimizer' too"),
    ):
        with pytest.raises(ValueError, match=problem):
            setup(optimization=group)
    setup(shard="optimizer", optimization=pl.Optimization(shard_by="equal", redundancy=2)).close()  # apart from shard
    with pytest.raises(ValueError, match=r"redundancy=2 needs shard_by=.*\[3.0, 1.0\] gives no division"):
        pl.Optimization(shard="optimizer", redundancy=2, shard_by=(3, 1))
    with pytest.raises(ValueError, match="at least one worker must get a part"):
        pl.Optimization(shard="optimizer", shard_by=(0, 0))


def test_the_report_is_what_a_worker_holds(pool: WorkerPool) -> None:
    """The optimizer's state, counted on both workers, is the reported one."""

    def held() -> tuple[int, int, int]:
        with pl.Trainer.setup(
            lambda: nn.Sequential(nn.Linear(12, 400), nn.Linear(400, 400), nn.Linear(400, 4)),
            torch.optim.AdamW,
            data=vectors(16),
            global_batch=8,
            micro_batch=4,
            optimization=pl.Optimization(shard="optimizer", shard_by=(3, 1)),
        ) as trainer:
            report = trainer.memory_report()
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
            pieces: Any = trainer.run.loop.replica.pieces
            state = [value for state in pieces._states for values in state.values() for value in values.values()]
            return report.optimizer, sum(value.nbytes for value in state if value.ndim), report.weights

    for reported, found, weights in pool.run(held, 2):
        assert reported == found
        assert weights == 4 * (13 * 400 + 401 * 400 + 401 * 4)


def train_bf16(steps: int = 6, folder: Any = None, **settings: Any) -> tuple[str, list[float]]:
    losses: list[float] = []
    if folder is not None:
        settings["checkpoints"] = pl.Checkpoints(folder, every_steps=3)
    with pl.Trainer.setup(
        lambda: mlp().bfloat16(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        data=vectors(64),
        global_batch=8,
        micro_batch=2,
        exact=True,
        max_grad_norm=1.0,
        **grouped(**{"shard": "optimizer", "master_weights": True, **settings}),
    ) as trainer:
        trainer.every(1, lambda record: losses.append(record.loss))
        for epoch in trainer.epochs(max_steps=steps):
            for batch in epoch:
                loss = functional.cross_entropy(trainer.model(batch.x.bfloat16()).float(), batch.y)
                trainer.backward(loss)
                trainer.step()
        return digest(trainer.model.state_dict()), losses


def test_master_weights_keep_what_bf16_rounds_away(pool: WorkerPool, tmp_path: Path) -> None:
    """A rate of 1e-4 changes no bf16 weight near 0.2 by itself: its spacing there is 1e-3."""
    reference, losses = train_bf16(24)
    _, without = train_bf16(24, shard=None, master_weights=False)
    assert losses[-1] != without[-1]
    for size in (2, 3):
        assert pool.run(lambda: train_bf16(24), size) == [(reference, losses)] * size
    folder = str(tmp_path)
    pool.run(lambda: train_bf16(12, folder), 2)
    assert train_bf16(24, folder)[0] == reference


def test_master_weights_need_weights_of_half_precision() -> None:
    with pytest.raises(ValueError, match="the model has none: build it in bf16"):
        pl.Trainer.setup(
            mlp,
            torch.optim.AdamW,
            data=vectors(8),
            global_batch=8,
            optimization=pl.Optimization(shard="optimizer", master_weights=True),
        )


def train_until_lost(folder: Path, lost_at: int | None, shard: str | None = "optimizer") -> str:
    """The last rank is killed once, before step `lost_at` is complete."""
    mark = folder / f"lost-{lost_at}"
    with pl.Trainer.setup(
        mlp,
        torch.optim.AdamW,
        data=vectors(64),
        global_batch=16,
        micro_batch=4,
        exact=True,
        shard=shard,
        balancing=pl.Balancing(shares="equal"),
        checkpoints=pl.Checkpoints(folder, every_steps=2),
    ) as trainer:
        is_dying = trainer.world.rank == trainer.world.size - 1
        for epoch in trainer.epochs(2):
            for batch in epoch:
                if is_dying and trainer.position.step == lost_at and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return digest(trainer.model.state_dict())


def test_a_lost_worker_restarts_all_from_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = pl.launch(train_until_lost, 2, args=(tmp_path / "undisturbed", None))
    disturbed = tmp_path / "disturbed"
    disturbed.mkdir()
    assert pl.launch(train_until_lost, 2, args=(disturbed, 5), min_workers=1, max_restarts=1) == expected
    assert "restart 1: rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_killed_and_resumed_on_other_numbers_of_workers_divided_and_whole(tmp_path: Path) -> None:
    expected = train_until_lost(tmp_path / "undisturbed", None, None)
    folder = tmp_path / "killed"
    folder.mkdir()
    for num_workers, lost_at, shard in ((3, 3, "optimizer"), (4, 4, None), (2, 6, "gradients")):
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            pl.launch(train_until_lost, num_workers, args=(folder, lost_at, shard))
    assert train_until_lost(folder, None, None) == expected


def test_leaving_an_epoch_is_an_error_on_all_workers(pool: WorkerPool) -> None:
    def leave(**settings: Any) -> str:
        with (
            pytest.raises(MisuseError) as caught,
            pl.Trainer.setup(
                mlp,
                torch.optim.AdamW,
                data=vectors(64),
                global_batch=8,
                micro_batch=2,
                **grouped(shard="optimizer", timeout_s=20, **settings),
            ) as trainer,
        ):
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
                    if trainer.world.rank == 1 and trainer.position.step == 1:
                        break
        return str(caught.value)

    for settings in ({}, {"max_grad_norm": 1.0, "exact": True}):
        for text in pool.run(lambda settings=settings: leave(**settings), 2):
            assert text.startswith("rank 1 left the loop of an epoch before its end")


def test_a_step_that_is_repeated_is_not_completed_after_a_loss(pool: WorkerPool) -> None:
    """Its update was agreed on before its sums turned out not to fit their grids."""

    def phases() -> list[Phase]:
        found = []
        with pl.Trainer.setup(
            mlp,
            torch.optim.AdamW,
            data=vectors(64),
            global_batch=8,
            micro_batch=2,
            **grouped(shard="optimizer", redundancy=2, exact=True, shares="equal"),
        ) as trainer:
            update: Any = trainer.run.loop.update
            update.resolver = object()  # workers agree, as where they may be lost
            for batch in next(trainer.epochs(1)):
                if trainer.is_repeating:
                    found.append(update.phase)
                factor = 1e9 if trainer.position.step == 3 else 1.0
                trainer.backward(factor * functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return found

    for found in pool.run(phases, 2):
        assert set(found) == {Phase.NONE}
