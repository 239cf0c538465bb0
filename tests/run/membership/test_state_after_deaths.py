"""Schedules, averages, scales and other interfaces: after deaths they are as they would have been."""

from __future__ import annotations

from typing import Any

import capture_runs
import pytest
import torch
from capture_runs import FakeGraphs
from elastic_runs import (
    NUM_SAMPLES,
    Case,
    Death,
    Points,
    check,
    digest,
    expected,
    launch,
    loss_of,
    model,
    vectors,
    wait_for_members,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline as pl


def with_step(here: Points, trainer: pl.Trainer) -> Any:
    """`step_with`, and a hook on the gradients; the averaged weights, and what the schedulers came to."""
    norms: list[str] = []
    trainer.on_gradients(lambda parameters: norms.append(parameters["0.weight"].grad.norm().item().hex()))
    step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
    for epoch in trainer.epochs(2):
        for batch in epoch:
            here("micro-batch", trainer.position.step)
            step(batch)
    with trainer.ema_weights():
        return digest(trainer.model.state_dict()), trainer.scheduler.state_dict(), norms[-1]


def with_fp16(here: Points, trainer: pl.Trainer) -> Any:
    step = trainer.step_with(lambda batch: loss_of(trainer.model, batch))
    for epoch in trainer.epochs(2):
        for batch in epoch:
            here("micro-batch", trainer.position.step)
            step(batch)
    return trainer.run.loop.loss_scale.state_dict()


def with_cadence(here: Points, trainer: pl.Trainer) -> Any:
    """Steps follow measured times: their number differs from run to run, but not what they consist of."""
    num_samples = [0, 0, 0]

    def count(record: pl.StepRecord) -> None:
        num_samples[record.epoch] += record.num_samples

    trainer.every(1, count)
    for epoch in trainer.epochs(3):
        for batch in epoch:
            if epoch.number == 1:
                here("micro-batch", 1)
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()
    return num_samples


def of_builder(here: Points) -> Any:
    def train_fn(net: Any, batch: Any) -> Any:
        number[0] += 1
        here("train_fn", number[0])
        return loss_of(net, batch), {"two": 2.0}

    number, metrics = [0], []
    handle = (
        pl.Trainer.builder(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), train_fn)
        .dataset(vectors(NUM_SAMPLES))
        .batch_size(40)
        .num_epochs(2)
        .metrics_fn(lambda each: metrics.append(each))
        .settings(exact=True, micro_batch=4, balancing=pl.Balancing(shares="equal"))
        .run()
    )
    state = handle.join()
    return digest(state.model), [(each.epoch, each.loss.hex(), each.scalars) for each in metrics]


def of_graphs(here: Points) -> Any:
    """Graphs that were recorded before a death are replaced after it: the memory of the gradients is another."""
    graphs = FakeGraphs()
    replayed: list[int] = []

    def during(_: pl.Trainer, step: int) -> None:
        here("graphs", step)
        replayed.append(graphs.num_replayed)

    settings = {"global_batch": 40, "micro_batch": 4, "exact": True, "shares": "equal", "max_grad_norm": 1.0}
    outcome = capture_runs.Case(settings=settings, data=vectors(400), during=during).run(graphs)
    assert 0 < replayed[4] < replayed[-1], replayed
    return outcome.digest


def of_dp_train(here: Points) -> Any:
    x, y = vectors(24)
    number = [0]

    def forward(net: Any, sample: Any) -> Any:
        number[0] += 1
        here("forward", number[0])
        return net(sample[0][None])

    result = pl.dp_train(
        lambda: torch.nn.Linear(12, 4),
        [*zip(x, y, strict=True)],
        loss_fn=torch.nn.functional.cross_entropy,
        forward_fn=forward,
        target_fn=lambda sample: sample[1][None],
        n_gpu=20,
        n_iter=5,
        verbose=0,
        exact=True,
    )
    return digest(result.model.state_dict()), [loss.hex() for loss in result.loss_history]


@pytest.mark.soak
def test_a_replacement_joins_a_cadence() -> None:
    def train(here: Points, trainer: pl.Trainer) -> Any:
        # Entered after the first of the following steps.
        trainer.every(1, lambda record: wait_for_members(2) if trainer.world.size == 1 and record.epoch == 1 else None)
        return with_cadence(here, trainer)

    cadence = {
        "exact": False,
        "strategy": pl.Cadence(anchor=2, max_anchor=2),
        "global_batch": None,
        "shares": "measured",
    }
    [outcomes] = launch([Case([Death(1, step=1)], cadence, train=train)], 2, max_restarts=1)
    assert [outcome["member"][:2] for outcome in outcomes] == [(0, 0), (1, 1)]
    assert outcomes[0]["results"] == [NUM_SAMPLES] * 3
    assert len({outcome["digest"] for outcome in outcomes}) == 1


def test_state_is_as_it_would_have_been() -> None:
    plateau = {"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)}
    steps = {"scheduler": lambda optimizer: StepLR(optimizer, 2), "ema": 0.9, "max_grad_norm": 1.0}
    cadence = {"exact": False, "strategy": pl.Cadence(anchor=2, max_anchor=4), "global_batch": None}
    cases = [
        Case([Death(9, step=1), Death(8, step=1)], steps, train=with_step),  # two at once
        Case([Death(0, step=4)], {**plateau, "ema": 0.9}, train=with_step),
        Case([Death(7, step=3)], {"precision": "fp16"}, train=with_fp16),
        Case([Death(1, "train_fn", 3)], whole=of_builder),  # rank 0, in the second step
        Case([Death(5, "forward", 3)], whole=of_dp_train),
        Case([Death(6, "graphs", 5)], whole=of_graphs),
        Case([Death(4, step=1)], {**cadence, "shares": "measured"}, train=with_cadence),
    ]
    found = launch(cases, 10)
    *exact, of_cadence = found
    for case, outcomes, num_left in zip(cases[:-1], exact, (8, 7, 6, 5, 4, 3), strict=True):
        if case.whole is None:
            check(outcomes, expected(case), num_left)
        else:
            assert outcomes == [expected(case)]
    assert [outcome["results"] for outcome in of_cadence] == [[NUM_SAMPLES] * 3] * 2
    assert len({outcome["digest"] for outcome in of_cadence}) == 1
