"""Averaging: local steps, meetings by samples, nothing lost to overlap, a guard that acts."""

from __future__ import annotations

import logging
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import SmallResNet, digest, images, mlp, vectors
from torch import nn
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.api.builder_worker import WorkerTask, train
from paceline.sync.averaging.guard import DivergenceGuard

X, Y = vectors(64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def run(
    strategy: Any,
    *,
    build: Callable[[], nn.Module] = mlp,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
    epochs: int = 2,
    hook: Callable[[pl.Trainer, pl.StepRecord], None] = lambda *_: None,
    listener: Callable[[pl.reports.Event], None] = lambda _: None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    settings = {"data": (X, Y), "global_batch": 8, "micro_batch": 2, "optimizer": sgd, "shares": "equal", **settings}
    optimizer = settings.pop("optimizer")
    with pl.Trainer.setup(build, optimizer, strategy=strategy, **grouped(**settings)) as trainer:
        trainer.every(1, lambda record: hook(trainer, record))
        trainer.listen(listener)
        for epoch in trainer.epochs(epochs):
            for batch in epoch:
                trainer.backward(loss(trainer.model, batch))
                trainer.step()
        return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("shares", ["equal", [3, 1], [1, 2, 1]])
def test_averaging_every_step_of_plain_sgd_is_averaging_gradients(shares: Any, pool: WorkerPool) -> None:
    """SGD is linear in the gradient, so the mean of the steps by samples is the step of the mean."""
    size = 2 if shares == "equal" else len(shares)
    expected = run("gradients")
    for outcome in pool.run(lambda: run(pl.Averaging(every=1), shares=shares), size):
        assert_close(outcome, expected)


def test_replicas_are_equal_to_the_bit_after_a_meeting_and_differ_before(pool: WorkerPool) -> None:
    def digests() -> list[str]:
        found: list[str] = []
        run(pl.Averaging(every=4), epochs=1, hook=lambda t, _: found.append(digest(t.model.state_dict())))
        return found

    first, second = pool.run(digests, 2)
    # A hook runs after its step's meeting: the fourth step's and the eighth's.
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, False, False, True] * 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_no_step_is_lost_or_taken_twice(overlap: bool, size: int, pool: WorkerPool) -> None:
    """A gradient that is always 1 moves every replica by the learning rate in every step, wherever they meet."""

    def constant() -> nn.Module:
        return nn.Linear(12, 1, bias=False)

    def run_it() -> dict[str, torch.Tensor]:
        return run(
            pl.Averaging(every=3, overlap=overlap, divergence_threshold=None),
            build=constant,
            loss=lambda model, _: model.weight.sum(),
        )

    start = run("gradients", build=constant, loss=lambda model, _: model.weight.sum(), epochs=0)["weight"]
    for outcome in pool.run(run_it, size):
        torch.testing.assert_close(outcome["weight"], start - 16 * 0.1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_workers_end_with_the_same_weights(overlap: bool, pool: WorkerPool) -> None:
    outcomes = pool.run(lambda: run(pl.Averaging(every=5, overlap=overlap), shares=[3, 1]), 2)
    assert digest(outcomes[0]) == digest(outcomes[1])
    # And have learnt about as much as synchronous training.
    losses = [functional.cross_entropy(_loaded(w)(X), Y).item() for w in (outcomes[0], run("gradients"))]
    assert losses[0] < 1.1 * losses[1]


def _loaded(weights: dict[str, torch.Tensor]) -> nn.Module:
    model = mlp()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"fragments": 2}])
def test_weights_in_new_memory_are_averaged(settings: Any, pool: WorkerPool) -> None:
    """vector_to_parameters makes every parameter a view of the vector."""

    def move(trainer: pl.Trainer, record: pl.StepRecord) -> None:
        if record.step in (2, 7):
            parameters = [*trainer.model.parameters()]
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach().clone(), parameters)

    def both() -> list[dict[str, torch.Tensor]]:
        return [run(pl.Averaging(every=4, **settings), hook=hook) for hook in (move, lambda *_: None)]

    for moved, expected in pool.run(both, 2):
        assert digest(moved) == digest(expected)


def test_weights_may_not_get_another_layout(pool: WorkerPool) -> None:
    def transpose(trainer: pl.Trainer, _: pl.StepRecord) -> None:
        weight = max(trainer.model.parameters(), key=torch.numel)  # in several fragments
        weight.data = weight.detach().t().contiguous().t()

    def error() -> str:
        with pytest.raises(pl.errors.MisuseError) as caught:
            run(pl.Averaging(every=4, fragments=4), hook=transpose)
        return str(caught.value)

    for text in pool.run(error, 2):
        assert text.startswith("a parameter has another memory layout than at the set-up (such as channels_last)")


def test_an_outer_optimizer_of_rate_1_takes_the_mean_and_momentum_does_more(pool: WorkerPool) -> None:
    def both() -> list[dict[str, torch.Tensor]]:
        return [
            run(pl.Averaging(every=4)),
            run(pl.Averaging(every=4, outer=lambda p: torch.optim.SGD(p, lr=1.0))),
            run(pl.Averaging(every=4, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))),
        ]

    for plain, outer, nesterov in pool.run(both, 2):
        assert_close(outer, plain)
        assert not torch.allclose(nesterov["0.weight"], plain["0.weight"], atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"compress": "int8"}, {"compress": "sparse"}])
def test_weights_in_double_precision_are_not_rounded_to_single(settings: Any, pool: WorkerPool) -> None:
    """A step that float32 cannot add to the weights: 1 + 16 * 1e-9. Every encoding sends the same number exactly."""

    def ones() -> nn.Module:
        model = nn.Linear(12, 1, bias=False).double()
        nn.init.ones_(model.weight)
        return model

    def ends() -> torch.Tensor:
        weights = run(
            pl.Averaging(every=4, divergence_threshold=None, **settings),
            build=ones,
            loss=lambda model, _: 1e-8 * model.weight.sum(),
        )
        return weights["weight"]

    for outcome in pool.run(ends, 2):
        torch.testing.assert_close(outcome, torch.full_like(outcome, 1.0 - 16e-9), rtol=0, atol=1e-13)


@pytest.mark.parametrize("transfer", ["bf16", "fp16"])
def test_changes_may_travel_in_half_precision(transfer: Any, pool: WorkerPool) -> None:
    def both() -> list[dict[str, torch.Tensor]]:
        return [run(pl.Averaging(every=4)), run(pl.Averaging(every=4, compress=transfer))]

    for full, half in pool.run(both, 2):
        assert_close(half, full, 2e-2)
        assert digest(half) != digest(full)


def test_batch_norm_statistics_are_averaged_too(pool: WorkerPool) -> None:
    data = images(64)
    outcomes = pool.run(lambda: run(pl.Averaging(every=4), build=SmallResNet, data=data), 2)
    assert digest(outcomes[0]) == digest(outcomes[1])
    expected = run("gradients", build=SmallResNet, data=data)
    name = "blocks.0.norm1.running_mean"
    torch.testing.assert_close(outcomes[0][name], expected[name], rtol=0.3, atol=0.05)
    assert int(outcomes[0]["blocks.0.norm1.num_batches_tracked"]) == 32  # each worker ran half of the 64 micro-batches


def test_post_local_sgd_exchanges_gradients_first(pool: WorkerPool) -> None:
    def curves() -> list[list[str]]:
        found: list[list[str]] = []
        for strategy in ("gradients", pl.Averaging(every=4, first_step=5)):
            seen: list[str] = []
            run(strategy, epochs=2, hook=lambda t, _, seen=seen: seen.append(digest(t.model.state_dict())))
            found.append(seen)
        return found

    for gradients, post_local in pool.run(curves, 2):
        assert post_local[:5] == gradients[:5]
        assert all(a != b for a, b in zip(post_local[5:], gradients[5:], strict=True))


def test_a_worker_without_a_share_takes_part(pool: WorkerPool) -> None:
    outcomes = pool.run(lambda: run(pl.Averaging(every=2), global_batch=4), 3)
    assert len({digest(outcome) for outcome in outcomes}) == 1


def test_evaluation_averages_first(pool: WorkerPool) -> None:
    def evaluations() -> list[float]:
        found: list[float] = []

        def evaluate(trainer: pl.Trainer, record: pl.StepRecord) -> None:
            if record.step % 3 == 0:
                found.append(trainer.evaluate((X, Y), loss_of))

        run(pl.Averaging(every=100), hook=evaluate)
        return found

    first, second = pool.run(evaluations, 2)
    assert first == second
    assert first[-1] < first[0]


def test_shares_follow_the_speeds_told_at_meetings(pool: WorkerPool) -> None:
    def shares() -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []

        def slow(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(0.012 if os.environ["RANK"] == "1" else 0.002)
            return loss_of(model, batch)

        run(
            pl.Averaging(every=2),
            loss=slow,
            global_batch=16,
            shares="measured",
            epochs=4,
            hook=lambda _, record: found.append(record.shares),
        )
        return found

    first, second = pool.run(shares, 2)
    assert first == second
    assert first[0] == (4, 4)
    fast, slow = statistics.mode(first[6:])  # a busy machine may disturb single steps
    assert fast > slow


def test_workers_meet_before_one_is_further_ahead_than_max_batch_diff(pool: WorkerPool) -> None:
    def digests() -> list[str]:
        found: list[str] = []
        every = pl.Cadence(anchor=100, max_batch_diff=5)
        run(pl.Averaging(every), shares=[3, 1], epochs=1, hook=lambda t, _: found.append(digest(t.model.state_dict())))
        return found

    first, second = pool.run(digests, 2)
    # After two steps the lead is 4 micro-batches.
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True] * 4


@pytest.mark.parametrize(
    ("seconds", "hints", "expected"),
    [
        pytest.param((0.01, 0.01), (10, 1), (1, 1), id="as fast as rank 0"),
        pytest.param((0.03, 0.005), (10, 1), (0, 2), id="faster"),
        pytest.param((0.005, 0.03), (1, 1), (2, 0), id="slower"),
    ],
)
def test_waiting_for_a_dispatched_feed_is_no_work(seconds: Any, hints: Any, expected: Any, pool: WorkerPool) -> None:
    """A worker without a share waits for the next step's data, which rank 0 reads. When its turn comes, its speed
    decides. Booked as a delay of each of its steps, the wait would leave it without a share for hundreds of steps.
    """

    def shares() -> tuple[list[tuple[int, ...]], list[float]]:
        found: list[tuple[int, ...]] = []

        def slow(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(seconds[int(os.environ["RANK"])])
            return loss_of(model, batch)

        with pl.Trainer.setup(
            mlp,
            sgd,
            strategy=pl.Averaging(every=100),  # at the end of each epoch of 16 steps
            **grouped(data=(X, Y), global_batch=4, micro_batch=2, feed="dispatched", speed_hints=hints),
        ) as trainer:
            trainer.every(1, lambda record: found.append(record.shares))
            for epoch in trainer.epochs(4):
                for batch in epoch:
                    trainer.backward(slow(trainer.model, batch))
                    trainer.step()
            return found, [worker.waiting_s for worker in trainer.report().workers]

    (found, waited_s), other = pool.run(shares, 2)
    assert (found, waited_s) == other
    assert found[0] == ((2, 0) if hints[0] > 1 else (1, 1))
    assert statistics.mode(found[32:]) == expected
    assert all(seconds > 0 for seconds in waited_s)


@pytest.mark.parametrize(
    ("drifts", "alarms"),
    [
        ([0.1, 0.2, 0.3], []),  # two rises
        ([0.1, 0.2, 0.3, 0.4], [3]),
        ([0.4, 0.3, 0.2, 0.1], []),
        ([0.1, 0.2, 0.15, 0.3, 0.4], []),
        ([0.01, 0.02, 0.03, 0.04], []),  # rising, but small
        ([0.01, 0.02, 0.03, 0.06], [3]),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [3, 7]),  # the count begins anew
    ],
)
def test_the_guard_wants_three_rises_that_end_above_the_threshold(drifts: list[float], alarms: list[int]) -> None:
    guard = DivergenceGuard(0.05)
    assert [i for i, drift in enumerate(drifts) if guard.is_alarmed_by(drift)] == alarms


@pytest.mark.parametrize("size", [2, 3])
def test_the_guard_shortens_the_rounds_of_a_diverging_world(size: int, pool: WorkerPool) -> None:
    """Each worker sees one direction only and overshoots there by 15% a step: alone it diverges, and with it the mean
    of rounds of 8, 4 or 2 steps. Averaged in every step the overshoots are divided by the workers, and it converges."""
    num_steps = 120
    x = torch.eye(size).repeat(num_steps, 1)

    def nearly_right() -> nn.Module:
        model = nn.Linear(size, 1, bias=False)
        nn.init.constant_(model.weight, 1.02)
        return model

    def final_loss(threshold: float | None) -> tuple[float, list[str], list[pl.reports.Event]]:
        messages: list[str] = []
        events: list[pl.reports.Event] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        try:
            weights = run(
                pl.Averaging(every=8, divergence_threshold=threshold),
                build=nearly_right,
                data=(x, torch.ones(len(x), 1)),
                loss=lambda model, batch: functional.mse_loss(model(batch.x), batch.y),
                optimizer=lambda p: torch.optim.SGD(p, lr=1.075),
                micro_batch=1,
                global_batch=size,
                shuffle=False,
                epochs=1,
                listener=events.append,
            )
        finally:
            logging.getLogger("paceline").removeHandler(handler)
        return float((weights["weight"] - 1).square().mean()), messages, [e for e in events if e.name == "drift"]

    guarded = pool.run(final_loss, size, 0.03)
    unguarded = pool.run(final_loss, size, None)
    loss, messages, events = guarded[0]
    # Drift rises from meeting to meeting: the first alarm is at the fourth, after its third rise.
    assert [(event.step, event.details["every"]) for event in events] == [(32, 4), (48, 2), (56, 1)]
    assert "averaging every 4 steps from now on" in messages[0]
    assert all(outcome == guarded[0] for outcome in guarded)
    assert unguarded[0][1] == unguarded[0][2] == []
    assert loss < 1e-3 < 1.0 < unguarded[0][0]


def test_a_cadence_finds_how_often_to_meet(pool: WorkerPool) -> None:
    """The cheaper a step against the meeting, the rarer the meetings."""

    def digests(step_s: float, target: float) -> list[str]:
        equal: list[str] = []

        def hook(trainer: pl.Trainer, _: pl.StepRecord) -> None:
            time.sleep(step_s)
            equal.append(digest(trainer.model.state_dict()))

        cadence = pl.Cadence(anchor=1, overhead_target=target, max_anchor=12)
        run(pl.Averaging(every=cadence), epochs=6, hook=hook)
        return equal

    def meetings(step_s: float, target: float) -> int:
        first, second = pool.run(digests, 2, step_s, target)
        return sum(a == b for a, b in zip(first, second, strict=True))

    often, rarely = meetings(0.02, 0.5), meetings(0.0, 0.01)
    assert rarely <= 24  # of 48 steps
    assert often > rarely  # 48 on an idle machine, where an average costs far less than half of 20 ms


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: pl.Averaging(every=pl.Cadence(speed_hint=(0, 2.0))),
            r"Averaging ignores Cadence\(speed_hint=\)",
        ),
        (lambda: pl.Averaging(every=0), "every=0: choose the number of steps"),
        (lambda: pl.Averaging(first_step=-1), "first_step=-1: choose a number of steps >= 0"),
        (lambda: pl.Averaging(compress="int3"), "compress='int3' is unknown: choose one of fp32, bf16, fp16"),
        (lambda: pl.Averaging(fragments=0), "fragments=0: choose a number of parts >= 1"),
        (lambda: pl.Averaging(every=4, fragments=5), "fragments=5 is larger than every=4: .* choose fragments <= 4"),
        (lambda: pl.Averaging(divergence_threshold=0), "divergence_threshold=0: choose a relative drift > 0"),
        (lambda: run("averaging"), "strategy='averaging' is unknown: choose 'gradients', 'slow link', Gradients"),
        (lambda: run(pl.Averaging(), exact=True), "exact=True needs strategy='gradients'"),
    ],
)
def test_bad_settings(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_alone_there_is_nothing_to_average() -> None:
    assert digest(run(pl.Averaging(every=3))) == digest(run("gradients"))


# What records say.


@pytest.mark.parametrize("shares", [[3, 1], [1, 0], [1, 2, 1], [1, 1, 0]], ids=str)
def test_the_loss_of_a_step_is_that_of_all_workers_where_they_meet_in_every_step(
    shares: list[int], pool: WorkerPool
) -> None:
    def records(strategy: Any, **settings: Any) -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []
        run(strategy, hook=lambda _, record: seen.append((record.loss, record.weight)), **settings)
        return seen

    expected = records("gradients")
    first, *others = pool.run(lambda: records(pl.Averaging(every=1), shares=shares), len(shares))
    assert all(other == first for other in others)
    for (loss, weight), (expected_loss, expected_weight) in zip(first, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert weight == expected_weight == 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shares", [[3, 1], [1, 0], [1, 0, 2]], ids=str)
def test_between_meetings_every_worker_has_the_loss_of_the_last(
    shares: list[int], overlap: bool, pool: WorkerPool
) -> None:
    """`every=3` over 8 steps an epoch: meetings after steps 3 and 6, and at the epoch's end."""

    def outcomes() -> tuple[list[str], list[list[tuple[float, float]]], str]:
        own: list[list[tuple[float, float]]] = [[] for _ in range(8)]
        seen: list[str] = []
        with pl.Trainer.setup(
            mlp, sgd, data=(X, Y), global_batch=8, micro_batch=2, strategy=pl.Averaging(every=3, overlap=overlap),
            balancing=pl.Balancing(shares=shares),
        ) as trainer:  # fmt: skip
            trainer.every(1, lambda record: seen.append(f"{record.loss:.6f} {record.weight}"))
            for batch in next(trainer.epochs(1)):
                loss = loss_of(trainer.model, batch)
                own[trainer.position.step].append((loss.item(), len(batch.x)))
                trainer.backward(loss)
                trainer.step()
            assert trainer.last_record is not None
            last = f"{trainer.last_record.loss:.6f} {trainer.last_record.weight}"
        return seen, own, last

    results = pool.run(outcomes, len(shares))
    seen, _, last = results[0]
    assert [result[0] for result in results] == [seen] * len(shares)
    assert {result[2] for result in results} == {last}

    def mean(steps: range) -> str:
        terms = [term for _, own, _ in results for step in steps for term in own[step]]
        weight = sum(count for _, count in terms)
        return f"{sum(loss * count for loss, count in terms) / weight:.6f} {weight / len(steps)}"

    first, second = mean(range(3)), mean(range(3, 6))
    if overlap:
        assert seen == ["nan nan"] * 5 + [first] * 3
    else:
        assert seen == ["nan nan"] * 2 + [first] * 3 + [second] * 3
    assert last == mean(range(6, 8))


def test_a_scheduler_that_follows_the_loss_does_so_alike_on_all_workers(pool: WorkerPool) -> None:
    def rates() -> list[float]:
        seen: list[float] = []

        def plateau(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.2)

        run(
            pl.Averaging(every=2),
            shares=[2, 1, 0],
            scheduler=plateau,
            hook=lambda _, record: seen.append(record.lr),
            epochs=1,
        )
        return seen

    first, *others = pool.run(rates, 3)
    assert all(other == first for other in others)
    assert first[:3] == [0.1] * 3  # before the first meeting nobody knows a loss
    assert first[-1] < 0.1


def test_a_loss_that_a_worker_was_not_told_is_unknown_to_all(pool: WorkerPool) -> None:
    def losses() -> list[float]:
        seen: list[float] = []
        with pl.Trainer.setup(
            mlp,
            sgd,
            data=(X, Y),
            global_batch=8,
            micro_batch=2,
            strategy=pl.Averaging(every=2),
            balancing=pl.Balancing(shares=[1, 1, 0]),
        ) as trainer:
            trainer.every(1, lambda record: seen.append(record.loss))
            for batch in next(trainer.epochs(1)):
                loss = loss_of(trainer.model, batch)
                is_told = trainer.world.rank != 1 or trainer.position.step > 1
                trainer.backward(loss) if is_told else loss.backward()
                trainer.step()
        return seen

    results = pool.run(losses, 3)
    assert len({str(result) for result in results}) == 1
    assert [loss == loss for loss in results[0]] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("first_step", [0, 3])
def test_the_epochs_loss_counts_every_sample_once(first_step: int, pool: WorkerPool) -> None:
    """With first_step=3 the first three of eight steps are exchanged: every worker knows all of them."""

    def metrics() -> tuple[float, float]:
        def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            value = loss_of(model, batch)
            return value, {"own": value.detach()}

        class FakeChannel:
            def send(self, value: dict[str, Any]) -> None:
                found.append(value)

            def is_stop_requested(self) -> bool:
                return False

        found: list[dict[str, Any]] = []
        settings = {
            "global_batch": 8,
            "micro_batch": 2,
            "shares": [3, 1],
            "strategy": pl.Averaging(every=2, first_step=first_step),
        }
        train(WorkerTask(mlp, sgd, loss, (X, Y), 1, (torch.device("cpu"),) * 2, grouped(**settings)), FakeChannel())  # type: ignore[arg-type]
        return found[0]["loss"], found[0]["scalars"]["own"]

    for loss, own in pool.run(metrics, 2):
        assert loss == pytest.approx(own, rel=1e-6)


# Compression and fragments.

ENCODINGS = ("int8", "int4", "sparse")


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    """As "slow link" has it."""
    return torch.optim.SGD(parameters, lr=0.6, momentum=0.7, nesterov=True, fused=True)


@pytest.mark.parametrize("compress", ENCODINGS)
@pytest.mark.parametrize(("overlap", "fragments", "size"), [(False, 1, 2), (True, 3, 3)])
def test_compressed_replicas_agree_and_repeat_to_the_bit(
    compress: Any, overlap: bool, fragments: int, size: int, pool: WorkerPool
) -> None:
    def twice() -> list[str]:
        averaging = pl.Averaging(every=4, compress=compress, fragments=fragments, overlap=overlap, outer=nesterov)
        return [digest(run(averaging, seed=seed)) for seed in (0, 0, 1)]

    outcomes = pool.run(twice, size)
    first, again, other_seed = outcomes[0]
    assert outcomes == [outcomes[0]] * size
    assert first == again != other_seed


@pytest.mark.parametrize(("compress", "tolerance"), [("int8", 5e-3), ("int4", 5e-2)])
def test_changes_may_travel_as_integers(compress: Any, tolerance: float, pool: WorkerPool) -> None:
    def both() -> list[dict[str, torch.Tensor]]:
        return [run(pl.Averaging(every=4)), run(pl.Averaging(every=4, compress=compress))]

    for full, integers in pool.run(both, 2):
        assert_close(integers, full, tolerance)
        assert digest(integers) != digest(full)


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_fragments_no_step_is_lost_or_taken_twice(fragments: int, overlap: bool, pool: WorkerPool) -> None:
    def constant() -> nn.Module:
        return nn.Linear(12, 1, bias=False)

    def run_it() -> dict[str, torch.Tensor]:
        return run(
            pl.Averaging(every=5, overlap=overlap, fragments=fragments, divergence_threshold=None),
            build=constant,
            loss=lambda model, _: model.weight.sum(),
        )

    start = run("gradients", build=constant, loss=lambda model, _: model.weight.sum(), epochs=0)["weight"]
    for outcome in pool.run(run_it, 2):
        torch.testing.assert_close(outcome["weight"], start - 16 * 0.1, rtol=1e-5, atol=1e-5)


def test_what_sparse_averages_have_not_sent_is_in_the_residuals(pool: WorkerPool) -> None:
    """A gradient that is always the same: the common change and the mean of the residuals are all steps' changes."""
    factors = torch.linspace(0.01, 1.0, 9000)

    def run_it() -> tuple[torch.Tensor, torch.Tensor]:
        with pl.Trainer.setup(
            lambda: nn.Linear(9000, 1, bias=False), sgd, data=X, global_batch=4, micro_batch=2,
            strategy=pl.Averaging(every=2, compress="sparse", fragments=2, divergence_threshold=None),
            balancing=pl.Balancing(shares="equal"),
        ) as trainer:  # fmt: skip
            before = trainer.model.weight.detach().clone()
            for epoch in trainer.epochs(1):
                for _ in epoch:
                    trainer.backward((trainer.model.weight * factors).sum())
                    trainer.step()
            residuals = trainer.run.loop.exchange._average.residuals()  # type: ignore[attr-defined]
            return (trainer.model.weight.detach() - before).view(-1), residuals

    for change, residual in pool.run(run_it, 2):
        assert residual.count_nonzero() > 4000  # most of the values
        torch.testing.assert_close(change + residual, -0.1 * 16 * factors, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [({}, 32), ({"compress": "bf16"}, 16), ({"compress": "int8"}, 8.125), ({"compress": "int4", "fragments": 4}, 4.125),
     ({"compress": "sparse"}, 0.508)],
)  # fmt: skip
def test_packed_bytes_travel(settings: dict[str, Any], bits: float, pool: WorkerPool) -> None:
    """Every worker hands so many bits per weight and average to the communicator, for all it sends."""

    def num_bytes() -> list[int]:
        from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator

        sent = [0]
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "broadcast"):
                original = getattr(SharedMemoryCommunicator, name)

                def counted(self: Any, tensor: torch.Tensor, source: Any = None, *, call: Any = original) -> Any:
                    if source in (None, self.world.rank):
                        sent[0] += tensor.nbytes
                    return call(self, tensor) if source is None else call(self, tensor, source)

                patch.setattr(SharedMemoryCommunicator, name, counted)
            with pl.Trainer.setup(
                lambda: nn.Linear(512, 512, bias=False), sgd, data=torch.randn(64, 512), global_batch=4, micro_batch=2,
                strategy=pl.Averaging(every=4, **settings),
            ) as trainer:  # fmt: skip
                sent[0] = 0
                for epoch in trainer.epochs(1):
                    for batch in epoch:
                        trainer.backward(trainer.model(batch).square().mean())
                        trainer.step()
                return sent

    # At the end of the epoch all fragments are averaged that have changed since their turn: all but the last one.
    num_averages = 4 + 1 - 1 / settings.get("fragments", 1)
    for (total,) in pool.run(num_bytes, 2):
        assert total == pytest.approx(num_averages * 512 * 512 * bits / 8, rel=0.02)


def test_a_slow_link_is_measured_and_the_choice_is_the_same_on_all_workers(
    pool: WorkerPool,
) -> None:
    def chosen() -> tuple[list[dict[str, Any]], str]:
        events: list[pl.reports.Event] = []
        weights = run("slow link", epochs=6, listener=events.append)
        return [{**event.details} for event in events if event.name == "averaging"], digest(weights)

    first, second = pool.run(chosen, 2)
    assert first == second
    [choice] = first[0]
    assert (choice["every"], choice["compress"], choice["fragments"]) == (32, "int4", 8)  # nothing is slow here
    assert re.match("averaging every 32 steps in int4, in 8 parts: a step takes .* Mbit/s per worker", choice["reason"])


def test_a_slow_links_run_that_is_resumed_measures_steps_of_its_own(tmp_path: Path, pool: WorkerPool) -> None:
    """It stopped after the first of the steps that are measured."""

    def reasons(max_steps: int) -> list[str]:
        events: list[pl.reports.Event] = []
        settings = {"global_batch": 8, "micro_batch": 2, "strategy": "slow link"}
        with pl.Trainer.setup(mlp, sgd, data=(X, Y), checkpoints=pl.Checkpoints(tmp_path), **settings) as trainer:
            trainer.listen(events.append)
            for epoch in trainer.epochs(2, max_steps=max_steps):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
        return [event.details["reason"] for event in events if event.name == "averaging"]

    assert pool.run(reasons, 2, 2) == [[], []]
    for (reason,) in pool.run(reasons, 2, 8):
        (step_ms,) = map(float, re.findall("a step takes (.*) ms", reason))
        assert step_ms > 0.01


@pytest.mark.parametrize(
    ("before", "after", "equal_after"),
    [
        ({"every": 4}, {"every": 2}, [6, 8]),
        ({"every": 2}, {"every": 4}, [8]),
        ({"every": 4}, {"every": 4, "fragments": 2}, []),
        ({"every": 2, "fragments": 2, "outer": sgd}, {"every": 4, "outer": sgd}, [8]),
        ({"every": pl.Cadence(4, max_anchor=4)}, {"every": pl.Cadence(2, max_anchor=2)}, [6, 8]),
    ],
)
def test_a_resumed_run_averages_as_its_new_settings_say(
    before: Any, after: Any, equal_after: list[int], tmp_path: Path, pool: WorkerPool
) -> None:
    def digests(strategy: Any, max_steps: int) -> dict[int, str]:
        found: dict[int, str] = {}
        settings: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "strategy": pl.Averaging(**strategy)}
        settings |= {"balancing": pl.Balancing(shares="equal")}
        checkpoints = pl.Checkpoints(tmp_path, allow=["strategy"])
        with pl.Trainer.setup(mlp, sgd, data=(X, Y), checkpoints=checkpoints, **settings) as trainer:
            trainer.every(1, lambda record: found.update({record.step: digest(trainer.model.state_dict())}))
            for epoch in trainer.epochs(1, max_steps=max_steps):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
            trainer.save()
        return found

    pool.run(digests, 2, before, 4)
    first, second = pool.run(digests, 2, after, 8)
    assert [step for step in first if first[step] == second[step]] == equal_after


def test_a_resumed_run_knows_the_loss_of_the_last_average(tmp_path: Path, pool: WorkerPool) -> None:
    """A scheduler that follows the loss needs it in every step."""

    def losses(root: Path, resume: Path | None = None) -> list[float]:
        seen: list[float] = []
        settings = {"global_batch": 8, "micro_batch": 2, "strategy": pl.Averaging(every=4)}
        settings |= {"balancing": pl.Balancing(shares="equal")}
        checkpoints = pl.Checkpoints(root, every_steps=4, keep_last=None, resume=resume or "auto")
        with pl.Trainer.setup(mlp, sgd, data=(X, Y), checkpoints=checkpoints, **settings) as trainer:
            trainer.every(1, lambda record: seen.append(record.loss))
            for epoch in trainer.epochs(2):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
        return seen

    undisturbed = pool.run(losses, 2, tmp_path / "a")
    resumed = pool.run(losses, 2, tmp_path / "b", tmp_path / "a" / "step-00000004")
    assert resumed == [seen[4:] for seen in undisturbed]


def test_the_loss_scale_is_each_workers_own(tmp_path: Path, pool: WorkerPool) -> None:
    """fp16 overflows on one worker, before a checkpoint."""

    def train(root: Path, resume: Path | None = None) -> tuple[str, float]:
        settings = {"global_batch": 8, "micro_batch": 2, "strategy": pl.Averaging(every=2), "precision": "fp16"}
        settings |= {"balancing": pl.Balancing(shares="equal")}
        checkpoints = pl.Checkpoints(
            root, every_steps=4, keep_last=None, check_replicas="full", resume=resume or "auto"
        )
        with pl.Trainer.setup(mlp, sgd, data=(X, Y), checkpoints=checkpoints, **settings) as trainer:
            for epoch in trainer.epochs(2, max_steps=10):
                for batch in epoch:
                    with trainer.autocast():
                        loss = loss_of(trainer.model, batch)
                    has_overflow = trainer.world.rank == 1 and trainer.position.step in (2, 3)
                    trainer.backward(loss * (1e6 if has_overflow else 1.0))
                    trainer.step()
            return digest(trainer.model.state_dict()), trainer.run.loop.loss_scale.value

    first, second = pool.run(train, 2, tmp_path / "a")
    assert first[1] > second[1]
    assert pool.run(train, 2, tmp_path / "b", tmp_path / "a" / "step-00000004") == [first, second]


def test_gradients_are_exchanged_in_the_runs_first_steps_not_in_those_of_each_start(
    tmp_path: Path, pool: WorkerPool
) -> None:
    def exchanged(max_steps: int) -> list[bool]:
        seen: list[bool] = []
        settings = {"global_batch": 8, "micro_batch": 2, "strategy": pl.Averaging(every=4, first_step=3)}
        with pl.Trainer.setup(mlp, sgd, data=(X, Y), checkpoints=pl.Checkpoints(tmp_path), **settings) as trainer:
            trainer.every(1, lambda record: seen.append(record.is_exchanged))
            for epoch in trainer.epochs(3, max_steps=max_steps):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
        return seen

    assert exchanged(2) == [True] * 2  # a worker that is alone averages nothing
    assert pool.run(exchanged, 2, 4) == [[True, False]] * 2
    assert pool.run(exchanged, 2, 6) == [[False, False]] * 2


@pytest.mark.parametrize("num_samples", [64, 16])  # with 16, epochs end before the link is measured
def test_a_slow_links_run_is_the_one_with_its_settings_to_the_bit(num_samples: int, pool: WorkerPool) -> None:
    def both() -> tuple[str, str]:
        given = pl.Averaging(every=32, compress="int4", fragments=8, overlap=True, outer=nesterov)
        data = X[:num_samples], Y[:num_samples]
        return digest(run("slow link", epochs=3, data=data)), digest(run(given, epochs=3, data=data))

    (slow_link, given), other = pool.run(both, 2)
    assert slow_link == given
    assert other == (slow_link, given)


def test_the_guard_shortens_the_rounds_of_fragments_too(pool: WorkerPool) -> None:
    """As above, with two fragments: each half of the weights is averaged every 8, then 4, 2 and 2 steps."""

    def intervals() -> list[int]:
        events: list[pl.reports.Event] = []

        def nearly_right() -> nn.Module:
            model = nn.Linear(2, 1, bias=False)
            nn.init.constant_(model.weight, 1.02)
            return model

        run(
            pl.Averaging(every=8, fragments=2, compress="int8", divergence_threshold=0.03),
            build=nearly_right,
            data=(torch.eye(2).repeat(120, 1), torch.ones(240, 1)),
            loss=lambda model, batch: functional.mse_loss(model(batch.x), batch.y),
            optimizer=lambda p: torch.optim.SGD(p, lr=1.075),
            micro_batch=1,
            global_batch=2,
            shuffle=False,
            epochs=1,
            listener=events.append,
        )
        return [event.details["every"] for event in events if event.name == "drift"]

    first, second = pool.run(intervals, 2)
    assert first == second
    assert first[:2] == [4, 2]
