"""Workers that die between two averages: the others go on with what they have done, and the event counts the rest.

And what is lost of compressed values that were not sent yet, with averages and with gradients.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import STEPS_PER_EPOCH, Case, Death, Points, digest, launch, loss_of, vectors, wait_for_members
from torch import nn

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


COMPRESSED = [
    Case([Death(3, step=4)], {"exact": False, "strategy": pl.Gradients(compress="sparse")}, train=averaged),
    Case([Death(0, step=4)], {"exact": False, "strategy": pl.Gradients(compress="int8")}, train=averaged),
]


def test_a_step_with_compressed_gradients_is_begun_again() -> None:
    first, again = (launch(COMPRESSED, 4) for _ in range(2))
    for outcomes in first:
        assert all(outcome["results"] == outcomes[0]["results"] for outcome in outcomes)
        assert all(outcome["position"] == NUM_EPOCHS * STEPS_PER_EPOCH for outcome in outcomes)
    assert [[each["results"] for each in outcomes] for outcomes in first] == [
        [each["results"] for each in outcomes] for outcomes in again
    ]


FACTORS = torch.linspace(0.01, 1.0, 9000)


def unsent(trainer: pl.Trainer) -> torch.Tensor:
    """The residuals of this worker, zeros if it has none."""
    exchange: Any = trainer.run.loop.exchange
    found = exchange.residuals() if exchange.averages is None else exchange._average.residuals()
    if found is None:
        return torch.zeros_like(FACTORS)
    return found[0][: len(FACTORS)] if isinstance(found, list) else found


def constant_gradients(
    here: Points, *, strategy: Any, num_steps: int = 8, num_wanted: int = 0, folder: Path | None = None
) -> Any:
    """A gradient that is always the same: the change, and what was not sent before each step and in the end; by rank.

    After a death the others wait until there are `num_wanted` workers again.
    """
    with pl.Trainer.setup(
        lambda: nn.Linear(len(FACTORS), 1, bias=False),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=torch.zeros(num_steps * 12),
        global_batch=12,
        micro_batch=2,
        strategy=strategy,
        balancing=pl.Balancing(shares="equal"),
        seed=5,
        checkpoints=None if folder is None else pl.Checkpoints(folder),
    ) as trainer:
        before = trainer.model.weight.detach().clone()
        trainer.every(1, lambda _: wait_for_members(num_wanted) if trainer.world.size < num_wanted else None)
        history = []
        for _ in next(trainer.epochs(1)):
            here("micro-batch", trainer.position.step)
            history.append(unsent(trainer))
            trainer.backward((trainer.model.weight * FACTORS).sum())
            trainer.step()
        return trainer.gather(((trainer.model.weight.detach() - before).view(-1), *history, unsent(trainer)))


SPARSE = pl.Averaging(every=2, compress="sparse", divergence_threshold=None)


def test_survivors_keep_what_they_have_not_sent() -> None:
    cases = [
        Case([Death(2, step=5)], whole=partial(constant_gradients, strategy=SPARSE)),
        Case([Death(1, step=5)], whole=partial(constant_gradients, strategy=pl.Gradients(compress="sparse"))),
    ]
    [[averages], [gradients]] = launch(cases, 3)
    everything = -0.1 * 8 * FACTORS
    assert len(averages["results"]) == 2
    for change, *_, residual in averages["results"]:
        assert residual.count_nonzero() > 4000
        # All workers do the same, so that the steps of the one that was lost are those of the others too.
        torch.testing.assert_close(change + residual, everything, rtol=1e-4, atol=1e-4)
    [(change, *_, residual)] = gradients["results"]
    assert residual.count_nonzero() > 4000
    # Of the lost worker, half of five steps is missing as far as it was not sent, and of the survivor nothing. What was
    # sent is rounded to a level, so that the missing part may be up to half a level off.
    missing = everything - (change - 0.1 * residual)
    half_level = 0.1 * 5 / 2 / 7 / 2
    assert (missing <= half_level).all()
    assert (missing >= -0.1 * 5 * FACTORS / 2 - half_level).all()
    assert missing.min() < -0.1


@pytest.mark.parametrize("strategy", [SPARSE, pl.Gradients(compress="sparse")])
def test_a_newcomer_has_left_nothing_unsent(strategy: Any, tmp_path: Path) -> None:
    """It takes over the state of another worker, but not what that one has not sent, which would count twice."""
    whole = partial(constant_gradients, strategy=strategy, num_steps=12, num_wanted=3, folder=tmp_path)
    [[outcome]] = launch([Case([Death(2, step=5)], whole=whole)], 3, max_restarts=1)
    *survivors, (_, *newcomer) = outcome["results"]
    assert len(survivors) == 2
    assert 1 < len(newcomer) < 13
    assert not newcomer[0].any()
    for _, *residuals in survivors:
        assert residuals[-len(newcomer)].count_nonzero() > 4000  # at the same step
    assert newcomer[-1].count_nonzero() > 4000


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


def train_until_killed(folder: Path, strategy: Any, killed_at: int | None) -> str:
    """Rank 1 is killed once, in step `killed_at`."""
    mark = folder / "killed"
    with pl.Trainer.setup(
        lambda: nn.Linear(12, 4),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        data=vectors(256),
        global_batch=16,
        micro_batch=4,
        strategy=strategy,
        balancing=pl.Balancing(shares="equal"),
        checkpoints=pl.Checkpoints(folder, every_steps=5),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                if trainer.world.rank == 1 and trainer.position.step == killed_at and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.backward(loss_of(trainer.model, batch))
                trainer.step()
        return digest(trainer.model.state_dict())


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    "strategy",
    # Killed one step after a fragment was sent, whose mean is applied a step later.
    [
        pl.Averaging(every=6, fragments=3, overlap=True, compress="sparse", outer=nesterov),
        pl.Averaging(every=6, fragments=3, overlap=True, compress="int4", outer=nesterov),
        pl.Gradients(compress="sparse"),
    ],
)
def test_a_killed_run_goes_on_from_its_checkpoint_with_the_same_bits(strategy: Any, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    disturbed.mkdir()
    expected = pl.launch(train_until_killed, 2, args=(undisturbed, strategy, None))
    assert pl.launch(train_until_killed, 2, args=(disturbed, strategy, 8), max_restarts=1) == expected
    assert (disturbed / "killed").exists()
