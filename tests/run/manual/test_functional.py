"""Training step by step: prepare_training, train_step, sync_buffer, update, and train, which is made of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from grouping import grouped
from image_models import convolution, linear, pooling
from models import SmallResNet, SmallTransformer, digest, images, mlp, tokens, vectors
from step_by_step import IMAGES, LABELS, Stream, X, Y, adam, everything, one_step, prepare, sgd
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from worker_pool import WorkerPool

import paceline as pl
from paceline.run.manual.functional import topk_accuracy
from paceline.run.manual.training_state import _choose_devices
from paceline.run.manual.training_state import report_missing_peer_access as report

# Replicas equal one model.


def normalised() -> nn.Module:
    # Without a bias: before a BatchNorm its gradient is zero but for rounding, which Adam would blow up.
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))


MODELS = {f.__name__: f for f in (linear, convolution, pooling, normalised, SmallResNet)}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int]) -> dict[str, torch.Tensor]:
    """One step of plain PyTorch over all twelve images, in parts one after another; returns the mean gradient."""
    for x, y in zip(IMAGES.split(sizes), LABELS.split(sizes), strict=True):
        (functional.cross_entropy(model(x), y) * (len(x) / len(IMAGES))).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return gradients


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in MODELS), ("normalised", True), ("SmallResNet", True)]
)
def test_replicas_give_the_step_of_one_model(name: str, training: bool, exact: bool) -> None:
    for replicas, nsamples in ((1, 12), (2, 6), (3, 5)):
        with prepare(
            MODELS[name], (IMAGES, LABELS), replicas, adam, nsamples, shuffle=False, exact=exact, cycle=1
        ) as state:
            for model in state.models:
                model.train(training)
            alone = copy.deepcopy(state.models[0])
            optimizer = adam(alone.parameters())
            sizes = [nsamples] * (12 // nsamples) + ([12 % nsamples] if 12 % nsamples else [])
            expected = by_hand(alone, optimizer, sizes if training else [12])
            (batches,) = state.loader
            for replica, batch in enumerate(batches):
                pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch, replica)
            pl.compat.resnetimagenet.sync_buffer(state)
            for model in state.models:
                for key, parameter in model.named_parameters():
                    torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-6)
            pl.compat.resnetimagenet.update(state)
            for model in state.models:
                for key, value in alone.state_dict().items():
                    torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-4)
            for key, value in optimizer.state_dict()["state"].items():
                for part, number in value.items():
                    actual = state.optimizers[0].state_dict()["state"][key][part]
                    torch.testing.assert_close(actual, number, rtol=1e-4, atol=1e-6)
            assert len(set(everything(state))) == 1


def next_token(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()


def pair(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch.x), batch.y


RUNS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (mlp, vectors(26), pair),
    "batch norm": (SmallResNet, images(26), pair),
    "dropout": (SmallTransformer, tokens(26), next_token),
}


def trainer_digest(name: str, replicas: int, shuffle: bool) -> str:
    build, data, forward = RUNS[name]
    batches = {"global_batch": 4 * replicas, "micro_batch": 4}
    with pl.Trainer.setup(build, adam, data=data, shuffle=shuffle, exact=True, seed=3, **grouped(**batches)) as trainer:
        for epoch in trainer.epochs(2):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(*forward(trainer.model, batch)))
                trainer.step()
        return digest(trainer.model.state_dict(), trainer.optimizer.state_dict())


def functional_digests(name: str, replicas: int, shuffle: bool = True) -> list[str]:
    build, data, forward = RUNS[name]
    with prepare(
        build, data, replicas, adam, forward_fn=forward, epochs=2, shuffle=shuffle, exact=True, seed=3
    ) as state:
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        return everything(state)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", list(RUNS))
def test_exact_mode_ends_with_the_bits_of_a_trainer(name: str, shuffle: bool) -> None:
    for replicas in (1, 3):
        assert set(functional_digests(name, replicas, shuffle)) == {trainer_digest(name, replicas, shuffle)}


def in_a_world(name: str, by_rank: list[int]) -> list[str]:
    from paceline.core.world import World

    return functional_digests(name, by_rank[World.from_environment().rank])


@pytest.mark.parametrize("name", ["batch norm", "dropout"])
def test_exact_mode_ends_with_the_same_bits_in_several_processes(name: str, pool: WorkerPool) -> None:
    expected = set(functional_digests(name, 4))
    for by_rank in ([2, 2], [1, 3]):
        assert {d for own in pool.run(in_a_world, 2, name, by_rank) for d in own} == expected


def test_train_is_the_loop_by_hand() -> None:
    with prepare(epochs=2) as state:
        history = pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        trained = everything(state)
    losses = []
    with prepare(epochs=2) as state:
        for batches in state.loader:
            for replica, batch in enumerate(batches):
                pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, batch, replica)
            pl.compat.resnetimagenet.syncgrads(state)
            pl.compat.resnetimagenet.update(state)
            losses.append(state.loss)
        assert everything(state) == trained
    assert history.losses == losses
    assert len(losses) == 14
    assert losses[-1] < losses[0]


def test_a_model_that_exists_becomes_the_first_replica_and_the_others_are_copies() -> None:
    model = mlp()
    with prepare(model, replicas=3) as state:
        assert state.models[0] is model
        assert len({id(p) for m in state.models for p in m.parameters()}) == 3 * len(list(model.parameters()))
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        assert len(set(everything(state))) == 1
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_optimizers_are_the_users_again_once_the_state_is_closed() -> None:
    with prepare() as state:
        with pytest.raises(pl.errors.MisuseError, match="was called on an optimizer that belongs to the trainer"):
            state.optimizers[0].step()
        one_step(state, ((X[:4], Y[:4]), None))
    state.optimizers[0].step()
    for act in (lambda: one_step(state, ((X[:4], Y[:4]), None)), lambda: pl.compat.resnetimagenet.sync_buffer(state)):
        with pytest.raises(pl.errors.MisuseError, match="this training state is closed: call prepare_training again"):
            act()


def test_the_first_replica_may_go_without_a_batch() -> None:
    with prepare() as state:
        alone = copy.deepcopy(state.models[0])
        one_step(state, (None, (X[:4], Y[:4])))
        functional.cross_entropy(alone(X[:4]), Y[:4]).backward()
        sgd(alone.parameters()).step()
        for model in state.models:
            torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_gradients_of_another_backward_do_not_count() -> None:
    results = []
    for is_disturbed in (False, True):
        with prepare(shuffle=False) as state:
            for batches in state.loader:
                if is_disturbed:
                    state.models[1](X).sum().backward()
                one_step(state, batches)
                assert all(p.grad is None for model in state.models for p in model.parameters())
            results.append(everything(state))
    assert results[0] == results[1]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.sometimes, self.never = (nn.Linear(12, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + (self.sometimes(x) if x[0, 0] > 0 else 0)

    first, second = X[X[:, 0] > 0][:4], X[X[:, 0] < 0][:4]
    for reduce in (None, lambda gradients, _: torch.stack(gradients).mean(0)):
        with prepare(TwoHeads()) as state:
            for replica, x in enumerate((first, second)):
                pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, (x, Y[:4]), replica)
            own = state.models[0].sometimes.weight.grad.clone()
            pl.compat.resnetimagenet.sync_buffer(state, reduce=reduce)
            for model in state.models:
                torch.testing.assert_close(model.sometimes.weight.grad, own / 2)
                assert model.never.weight.grad is None


def test_buffers_that_no_rule_knows_hold_what_the_last_replica_left() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("largest", torch.zeros(()))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest.copy_(x.max())
            return self.layer(x) * self.scale

    batches = ((X[:4], Y[:4]), (X[4:8], Y[4:8]))
    with prepare(Counting()) as state:
        with pytest.warns(UserWarning, match="buffer 'largest' changes during forward") as told:
            one_step(state, batches)
        assert len(told) == 1
        one_step(state, batches)
        assert [m.largest.item() for m in state.models] == [X[4:8].max().item()] * 2


# What is read.


class Samples:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


def sizes_of(state: pl.compat.resnetimagenet.TrainingState) -> list[list[int]]:
    return [[0 if batch is None else len(batch.x) for batch in step] for step in state.loader]


def test_the_remainder_is_a_smaller_step_with_right_weights() -> None:
    with prepare(data=(X[:10], Y[:10]), replicas=3, nsamples=2, shuffle=False) as state:
        alone = copy.deepcopy(state.models[0])
        assert len(state.loader) == 2
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        optimizer = sgd(alone.parameters())
        for rows in (slice(0, 6), slice(6, 10)):
            optimizer.zero_grad()
            functional.cross_entropy(alone(X[rows]), Y[rows]).backward()
            optimizer.step()
        torch.testing.assert_close(state.models[2].state_dict(), alone.state_dict())
    with prepare(data=(X[:9], Y[:9]), replicas=3, nsamples=2) as state:
        assert sizes_of(state) == [[2, 2, 2], [2, 1, 0]]


def test_data_smaller_than_a_step_is_one_smaller_step() -> None:
    with prepare(data=(X[:3], Y[:3]), epochs=2) as state:
        assert sizes_of(state) == [[3, 0], [3, 0]]


def test_cycle_counts_steps_and_begins_the_data_again() -> None:
    with prepare(data=(X[:10], Y[:10]), nsamples=2, cycle=7) as state:
        assert sizes_of(state) == [[2, 2], [2, 2], [2, 0]] * 2 + [[2, 2]]
        assert len(state.loader) == 7
        assert state.epoch == 2


def test_a_loop_that_was_left_goes_on_with_the_next_step() -> None:
    with prepare(data=(torch.arange(10.0), Y[:10]), nsamples=2, shuffle=False) as state:
        assert [batch.x.tolist() for batch in next(iter(state.loader))] == [[0, 1], [2, 3]]
        rest = [[None if batch is None else batch.x.tolist() for batch in step] for step in state.loader]
        assert rest == [[[4, 5], [6, 7]], [[8, 9], None]]


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Samples(), {"shuffle": False, "buffersize": 3, "readers": 1}),
        (Samples(), {"shuffle": False, "readers": 0}),
        (DataLoader(Samples(), batch_size=4), {"nsamples": None}),
        (Stream(), {"readers": 0}),
        (pl.PerWorker([[(X[:4], Y[:4]), (X[8:10], Y[8:10])], [(X[4:8], Y[4:8])]]), {"nsamples": None}),
    ],
)
def test_any_data_that_a_trainer_takes(data: Any, settings: dict[str, Any]) -> None:
    with prepare(data=(X[:10], Y[:10]), epochs=2, shuffle=False, exact=True) as state:
        expected = pl.compat.resnetimagenet.train(functional.cross_entropy, state).losses
    with prepare(data=data, epochs=2, exact=True, **settings) as state:
        assert pl.compat.resnetimagenet.train(functional.cross_entropy, state).losses == expected


def test_the_steps_of_a_stream_are_counted_as_they_come() -> None:
    with prepare(data=Stream(), readers=0, epochs=2) as state:
        with pytest.raises(TypeError, match="the number of steps of a stream is not known in advance: give cycle"):
            len(state.loader)
        history = pl.compat.resnetimagenet.train(functional.cross_entropy, state, validation=(X, Y))
        assert len(history.losses) == 4
        assert [(v.step, v.epoch) for v in history.validations] == [(2, 0), (4, 1)]


# Custom reductions.


def median(gradients: list[torch.Tensor], _: list[int]) -> torch.Tensor:
    return torch.stack(gradients).median(0).values


def test_a_reduction_of_ones_own() -> None:
    seen = []

    def spy(gradients: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
        seen.append((len(gradients), weights))
        return median(gradients, weights)

    with prepare(nn.Linear(12, 4), replicas=4) as state:
        batches = [(X[i : i + n], Y[i : i + n]) for i, n in ((0, 4), (4, 4), (8, 2))]
        before = copy.deepcopy(state.models[0])
        one_step(state, (*batches, None), reduce=spy)
        gradients = []
        for x, y in batches:
            before.zero_grad()
            functional.cross_entropy(before(x), y).backward()
            gradients.append(before.weight.grad.clone())
        for model in state.models:
            torch.testing.assert_close(model.weight, before.weight - 0.1 * torch.stack(gradients).median(0).values)
    assert seen == [(3, [4, 4, 2])] * 2


def test_a_weighted_mean_of_ones_own_is_the_mean() -> None:
    def mean(gradients: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
        return sum(g * w for g, w in zip(gradients, weights, strict=True)) / sum(weights)

    weights = []
    for reduce in (None, mean):
        with prepare(replicas=3) as state:
            pl.compat.resnetimagenet.train(functional.cross_entropy, state, reduce=reduce)
            weights.append(state.models[0].state_dict())
    torch.testing.assert_close(*weights)


def reduced(by_rank: list[int]) -> dict[str, torch.Tensor]:
    from paceline.core.world import World

    with prepare(replicas=by_rank[World.from_environment().rank]) as state:
        history = pl.compat.resnetimagenet.train(
            functional.cross_entropy, state, reduce=median, validation=(X, Y), validate_every=2
        )
        assert len(history.validations) == 2
        return {**state.models[-1].state_dict(), "validation": torch.tensor(history.validations[-1].loss)}


def test_reduction_and_validation_go_over_all_processes(pool: WorkerPool) -> None:
    expected = reduced([3])
    for own in pool.run(reduced, 2, [1, 2]):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize(
    ("reduce", "text"),
    [
        (lambda gradients, _: gradients, "reduce returned list for parameter 'weight': .* of shape \\(4, 12\\)"),
        (lambda gradients, _: gradients[0].sum(), "reduce returned shape \\(\\) for parameter 'weight'"),
    ],
)
def test_a_reduction_must_return_a_gradient(reduce: Any, text: str) -> None:
    with prepare(nn.Linear(12, 4)) as state, pytest.raises(ValueError, match=text):
        pl.compat.resnetimagenet.train(functional.cross_entropy, state, reduce=reduce)


# Validation.


@pytest.mark.parametrize(
    ("topk", "expected"),
    [
        ((1,), {1: 0.25}),
        ((1, 2, 3), {1: 0.25, 2: 0.5, 3: 0.75}),
        ((1, 5, 10), {1: 0.25}),  # there are four classes
        ((4,), {4: 0.75}),  # -100 is no class
    ],
)
def test_accuracy_counts_the_labels_among_the_highest_scores(topk: tuple[int, ...], expected: dict[int, float]) -> None:
    scores = torch.tensor([[4.0, 3, 2, 1], [4.0, 3, 2, 1], [4.0, 3, 2, 1], [4.0, 3, 2, 1]])
    labels = torch.tensor([0, 1, 2, -100])
    assert {k: part.item() for k, part in topk_accuracy(scores, labels, topk).items()} == expected


def test_a_model_that_does_not_tell_classes_apart_gets_no_credit() -> None:
    scores = torch.tensor([[1.0, 1, 1], [math.nan, 2, 1], [0, math.nan, 3]])
    assert topk_accuracy(scores, torch.tensor([0, 0, 2]), (1, 2)) == {1: 0.0, 2: pytest.approx(1 / 3)}


def test_validation_after_every_epoch_or_every_few_steps() -> None:
    with prepare(epochs=2) as state:
        history = pl.compat.resnetimagenet.train(functional.cross_entropy, state, validation=(X[:21], Y[:21]))
        assert [(v.step, v.epoch) for v in history.validations] == [(7, 0), (14, 1)]
        with torch.no_grad():
            scores = state.models[0](X[:21])
        last = history.validations[-1]
        assert last.loss == pytest.approx(functional.cross_entropy(scores, Y[:21]).item(), rel=1e-6)
        assert last.accuracy == {1: pytest.approx((scores.argmax(1) == Y[:21]).double().mean().item())}
        trained = everything(state)
    with prepare(epochs=2) as state:
        history = pl.compat.resnetimagenet.train(
            functional.cross_entropy, state, validation=(X, Y), validate_every=5, topk=(1, 2)
        )
        assert [(v.step, v.epoch) for v in history.validations] == [(5, 0), (10, 1)]
        assert set(history.validations[0].accuracy) == {1, 2}
        assert everything(state) == trained, "validation must not change the training"


def test_validation_of_what_is_no_classifier_is_the_loss_alone() -> None:
    with prepare(nn.Linear(12, 1), data=(X, X.sum(1, keepdim=True))) as state:
        history = pl.compat.resnetimagenet.train(functional.mse_loss, state, validation=(X, X.sum(1, keepdim=True)))
    assert history.validations[0].accuracy == {}
    assert history.validations[0].loss < history.losses[0]


# Learning rates.


def test_a_schedule_gives_the_learning_rate_of_every_step() -> None:
    asked = []

    def schedule(step: int, epoch: int) -> float:
        asked.append((step, epoch))
        return 0.1 * 0.5**step

    with prepare(nn.Linear(12, 4), data=(X[:10], Y[:10]), nsamples=3, epochs=2) as state:
        before = copy.deepcopy(state.models[0].state_dict())
        pl.compat.resnetimagenet.train(functional.cross_entropy, state, schedule=schedule)
        assert [o.param_groups[0]["lr"] for o in state.optimizers] == [0.1 * 0.5**3] * 2
        assert not torch.equal(before["weight"], state.models[0].weight)
    assert asked == [(0, 0), (1, 0), (2, 1), (3, 1)]
    with prepare(nn.Linear(12, 4)) as state:
        before = copy.deepcopy(state.models[0].state_dict())
        pl.compat.resnetimagenet.train(functional.cross_entropy, state, schedule=lambda *_: 0.0)
        torch.testing.assert_close(state.models[1].state_dict(), before, rtol=0, atol=0)


def test_a_torch_scheduler_is_stepped_by_every_update() -> None:
    with prepare(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), cycle=3) as state:
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
        assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)
        assert len(set(everything(state))) == 1
        with pytest.raises(ValueError, match="schedule and prepare_training's scheduler both set the learning rate"):
            pl.compat.resnetimagenet.train(functional.cross_entropy, state, schedule=lambda *_: 0.1)
        for replica in range(2):
            pl.compat.resnetimagenet.train_step(functional.cross_entropy, state, (X[:4], Y[:4]), replica)
        pl.compat.resnetimagenet.sync_buffer(state)
        with pytest.raises(pl.errors.MisuseError, match=r"lr=0.5 contradicts the scheduler"):
            pl.compat.resnetimagenet.update(state, lr=0.5)


def test_lines_tell_how_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with prepare(cycle=4) as state:
        history = pl.compat.resnetimagenet.train(functional.cross_entropy, state, verbose=2, validation=(X, Y))
    assert capsys.readouterr().out.splitlines() == [
        *(f"step {step}/4  loss {history.losses[step - 1]:.6g}" for step in (1, 2, 4)),
        str(history.validations[0]),
    ]
    assert "step 4  validation loss" in str(history.validations[0])
    assert "top-1 " in str(history.validations[0])


def test_cuda_without_a_number_is_the_next_gpu_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr("paceline.core.world.devices", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _choose_devices(["cuda", "cuda", "cpu", "cuda:1"])[1] == (*gpus, torch.device("cpu"), gpus[1])


def test_devices_without_direct_access_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (torch.device("cuda", i) for i in range(3))
    reachable = {(first, second), (second, first)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reachable)
    report([first, second, third, first, torch.device("cpu")])
    told = capsys.readouterr().err
    assert "no direct access between cuda:0 and cuda:2, cuda:1 and cuda:2: gradients go through the host" in told
    report([first, second])
    with prepare() as state:
        pl.compat.resnetimagenet.train(functional.cross_entropy, state)
    assert "access" not in capsys.readouterr().err
