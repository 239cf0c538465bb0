from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.steps import Position, Steps


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (Steps(8, 4, 2), [[range(0, 2), range(2, 4)], [range(4, 6), range(6, 8)]]),
        (Steps(9, 4, 2), [[range(0, 2), range(2, 4)], [range(4, 6), range(6, 8)], [range(8, 9)]]),
        (Steps(11, 4, 2), [[range(0, 2), range(2, 4)], [range(4, 6), range(6, 8)], [range(8, 10), range(10, 11)]]),
        (Steps(11, 4, 2, drop_last=True), [[range(0, 2), range(2, 4)], [range(4, 6), range(6, 8)]]),
        (Steps(3, 8, 4), [[range(0, 3)]]),
        (Steps(5, 8, 4), [[range(0, 4), range(4, 5)]]),
        (Steps(1, 1, 1), [[range(0, 1)]]),
        (Steps(4, 4, 4, drop_last=True), [[range(0, 4)]]),
    ],
)
def test_cut(steps: Steps, expected: list[list[range]]) -> None:
    cut = [[steps.sample_range(s, k) for k in range(steps.num_micro_batches(s))] for s in range(steps.num_steps)]
    assert cut == expected
    assert [steps.samples_in_step(s) for s in range(steps.num_steps)] == [sum(map(len, step)) for step in expected]


def test_max_micro_batches_is_of_a_full_step() -> None:
    assert Steps(3, 8, 2).max_micro_batches == 4
    assert Steps(3, 8, 8).max_micro_batches == 1


@st.composite
def any_steps(draw: st.DrawFn) -> Steps:
    micro_batch = draw(st.integers(1, 6))
    global_batch = micro_batch * draw(st.integers(1, 6))
    drop_last = draw(st.booleans())
    return Steps(draw(st.integers(global_batch if drop_last else 1, 200)), global_batch, micro_batch, drop_last)


@given(any_steps())
def test_every_position_once_and_in_order(steps: Steps) -> None:
    positions: list[int] = []
    for step in range(steps.num_steps):
        micro_batches = [steps.sample_range(step, k) for k in range(steps.num_micro_batches(step))]
        assert 1 <= len(micro_batches) <= steps.max_micro_batches
        assert all(len(samples) == steps.micro_batch for samples in micro_batches[:-1])
        assert sum(map(len, micro_batches)) == steps.samples_in_step(step)
        assert steps.samples_in_step(step) == steps.global_batch or step == steps.num_steps - 1
        positions += [position for samples in micro_batches for position in samples]
    dropped = steps.num_samples % steps.global_batch if steps.drop_last else 0
    assert positions == list(range(steps.num_samples - dropped))


@given(any_steps(), st.integers(0, 40))
def test_walk_equals_arithmetic(steps: Steps, num_taken: int) -> None:
    position = Position()
    for _ in range(num_taken):
        position = position.after_step(steps)
    epoch, step_in_epoch = divmod(num_taken, steps.num_steps)
    assert position == Position(epoch, step_in_epoch, num_taken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 4), "the data is empty (num_samples=0): give at least one sample"),
        ((-3, 8, 4), "num_samples=-3 is not a positive integer: choose num_samples >= 1"),
        ((8, 0, 4), "global_batch=0 is not a positive integer: choose global_batch >= 1"),
        ((8, 8, -1), "micro_batch=-1 is not a positive integer: choose micro_batch >= 1"),
        ((8, 8, True), "micro_batch=True is not a positive integer: choose micro_batch >= 1"),
        ((False, 8, 4), "num_samples=False is not a positive integer: choose num_samples >= 1"),
        ((8, 8.0, 4), "global_batch=8.0 is not a positive integer: choose global_batch >= 1"),
        ((8, "8", 4), "global_batch='8' is not a positive integer: choose global_batch >= 1"),
        ((8, 8, 12), "micro_batch=12 does not fit global_batch=8: choose micro_batch <= 8"),
        (
            (100, 10, 4),
            "global_batch=10 is not a multiple of micro_batch=4: choose global_batch=8 or 12, or micro_batch=2 or 5",
        ),
        (
            (100, 64, 24),
            "global_batch=64 is not a multiple of micro_batch=24: "
            "choose global_batch=48 or 72, or micro_batch=16 or 32",
        ),
        (
            (100, 7, 5),
            "global_batch=7 is not a multiple of micro_batch=5: choose global_batch=5 or 10, or micro_batch=1 or 7",
        ),
        (
            (5, 8, 4, True),
            "drop_last=True leaves no step of num_samples=5 with global_batch=8: "
            "choose global_batch <= 5 or drop_last=False",
        ),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole text is compared)
        Steps(*arguments)
    assert str(caught.value) == message


def test_suggested_batches_are_the_nearest() -> None:
    for global_batch in range(1, 41):
        for micro_batch in range(1, global_batch):
            if global_batch % micro_batch == 0:
                continue
            below = max(g for g in range(1, global_batch) if g % micro_batch == 0)
            above = min(g for g in range(global_batch, 81) if g % micro_batch == 0)
            smaller = max(m for m in range(1, micro_batch) if global_batch % m == 0)
            larger = min(m for m in range(micro_batch, 41) if global_batch % m == 0)
            remedy = f"choose global_batch={below} or {above}, or micro_batch={smaller} or {larger}$"
            with pytest.raises(ValueError, match=remedy):
                Steps(1, global_batch, micro_batch)


@pytest.mark.parametrize("step", [-1, 3])
def test_step_outside_of_the_epoch(step: int) -> None:
    steps = Steps(9, 4, 2)
    message = rf"step={step} is not in an epoch of 3 steps: choose 0 <= step < 3"
    with pytest.raises(ValueError, match=message):
        steps.num_micro_batches(step)
    with pytest.raises(ValueError, match=message):
        steps.sample_range(step, 0)


@pytest.mark.parametrize(("step", "micro_batch", "count"), [(0, -1, 2), (0, 2, 2), (2, 1, 1), (1, 2, 2)])
def test_micro_batch_outside_of_the_step(step: int, micro_batch: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"micro-batch {micro_batch} is not in step {step} of {count} micro-batches"):
        Steps(9, 4, 2).sample_range(step, micro_batch)


def test_dropped_samples_are_in_no_step() -> None:
    with pytest.raises(ValueError, match="step=2 is not in an epoch of 2 steps"):
        Steps(9, 4, 2, drop_last=True).sample_range(2, 0)


def test_after_step() -> None:
    steps = Steps(9, 4, 2)
    assert Position(0, 1, 1).after_step(steps) == Position(0, 2, 2)
    assert Position(0, 2, 2).after_step(steps) == Position(1, 0, 3)
    with pytest.raises(ValueError, match="step_in_epoch=3 is not in an epoch of 3 steps: resume with the data"):
        Position(0, 3, 3).after_step(steps)


def test_position_round_trip() -> None:
    position = Position(epoch=2, step_in_epoch=5, step=19)
    assert position.to_dict() == {"epoch": 2, "step_in_epoch": 5, "step": 19}
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": None}, "position's epoch=None is not a count"),
        ({"step": -1}, "position's step=-1 is not a count: it must be an integer >= 0"),
        ({"step": True}, "position's step=True is not a count"),
        ({"step_in_epoch": 1.0}, "position's step_in_epoch=1.0 is not a count"),
        ({"rank": 0}, "position has unknown rank: it takes only epoch, step_in_epoch, step"),
    ],
)
def test_bad_position(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Position.from_dict(Position().to_dict() | changes)


@pytest.mark.parametrize("name", ["epoch", "step_in_epoch", "step"])
def test_incomplete_position(name: str) -> None:
    values = Position().to_dict()
    del values[name]
    with pytest.raises(ValueError, match=f"position lacks {name}: it needs epoch, step_in_epoch, step"):
        Position.from_dict(values)
