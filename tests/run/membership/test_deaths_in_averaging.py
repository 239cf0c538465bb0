"""Workers that die between two averages: the others go on with what they have done, and the event counts the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from elastic_runs import STEPS_PER_EPOCH, Case, Death, Points, digest, launch, loss_of, vectors, wait_for_members

import paceline as pl

NUM_EPOCHS = 4  # of 3 steps


def averaged(here: Points, trainer: pl.Trainer) -> Any:
    """Trains with an evaluation in the middle. What must be the same on all workers, and what this one knows."""
    evaluations: list[str] = []

    def evaluate(_: pl.StepRecord) -> None:
        evaluations.append(trainer.evaluate(vectors(40), loss_of).hex())

    trainer.every(8, evaluate)
    for epoch in trainer.epochs(NUM_EPOCHS):
        for batch in epoch:
            here("micro-batch", trainer.position.step)
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()
    return digest(trainer.model.state_dict()), evaluations


def settings(**changes: Any) -> dict[str, Any]:
    return {"exact": False, "strategy": pl.Averaging(**{"every": 2, **changes})}


FRAGMENTS = {"every": 3, "fragments": 3, "overlap": True, "compress": "sparse"}
CASES = [
    Case([Death(5, step=1)], settings(), train=averaged),  # in the first round
    Case([Death(0, step=4)], settings(every=3, overlap=True, compress="int4"), train=averaged),  # rank 0
    Case([Death(4, step=4)], settings(**FRAGMENTS), train=averaged),
    Case([Death(3, "hook", 8)], settings(), train=averaged),  # before the evaluation
    Case([Death(2, step=5)], settings(first_step=4), train=averaged),
]


def test_survivors_go_on() -> None:
    first, again = (launch(CASES, 6) for _ in range(2))
    for number, (case, outcomes) in enumerate(zip(CASES, first, strict=True)):
        assert len(outcomes) == 5 - number, case
        assert all(outcome["results"] == outcomes[0]["results"] for outcome in outcomes), case
        assert all(outcome["position"] == NUM_EPOCHS * STEPS_PER_EPOCH for outcome in outcomes), case
        assert len(outcomes[0]["results"][1]) == 1
        assert [len(outcome["events"]) for outcome in outcomes] == [1] * len(outcomes), outcomes[0]["events"]
    lost = [{outcome["events"][0]["lost_steps"] for outcome in outcomes} for outcomes in first]
    at_once = [0, 3, 4]
    assert [lost[number] for number in at_once] == [{2}, {0}, {2}]
    # An average under way is completed without a worker that has sent its part before it died, or is not.
    assert lost[1] <= {2, 3, 4}
    assert lost[2] <= {2, 3, 4}
    # Otherwise a death at the same point gives the same bits.
    assert [first[number][0]["results"] for number in at_once] == [again[number][0]["results"] for number in at_once]


def test_a_replacement_takes_over_the_common_weights() -> None:
    def train(here: Points, trainer: pl.Trainer) -> Any:
        trainer.every(1, lambda record: wait_for_members(2) if trainer.world.size == 1 and record.epoch == 1 else None)
        return averaged(here, trainer)

    case = Case([Death(1, step=1)], settings(every=2, compress="sparse"), train=train)
    [outcomes] = launch([case], 2, max_restarts=1)
    assert [outcome["member"][:2] for outcome in outcomes] == [(0, 0), (1, 1)]
    assert outcomes[0]["results"][0] == outcomes[1]["results"][0]
    lost, joined = outcomes[0]["events"]
    assert (lost["left"], joined["joined"]) == ([1], [1])
    assert lost["lost_steps"] > 0 == joined["lost_steps"]


@pytest.mark.parametrize("how", [{}, FRAGMENTS])
def test_the_only_survivor_trains_alone(how: dict[str, Any]) -> None:
    [[outcome]] = launch([Case([Death(1, step=4)], settings(**how), train=averaged)], 2)
    assert outcome["position"] == NUM_EPOCHS * STEPS_PER_EPOCH
    assert torch.tensor(float.fromhex(outcome["results"][1][0])).isfinite()
