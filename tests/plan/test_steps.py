from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.epoch import Position, Steps


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
    assert steps.num_steps == len(expected)
    assert [steps.sample_range(k) for k in range(steps.num_micro_batches)] == [r for step in expected for r in step]


def test_max_micro_batches_is_of_a_full_step() -> None:
    assert Steps(3, 8, 2).max_micro_batches == 4
    assert Steps(3, 8, 8).max_micro_batches == 1


@st.composite
def any_steps(draw: st.DrawFn) -> Steps:
    micro_batch = draw(st.integers(1, 6))
    global_batch = micro_batch * draw(st.integers(1, 6))
    drop_last = draw(st.booleans())
    return Steps(draw(st.integers(global_batch if drop_last else 1, 200)), global_batch, micro_batch, drop_last)


@given(any_steps(), st.data())
def test_every_position_once_and_in_order_however_steps_are_cut(steps: Steps, data: st.DataObject) -> None:
    positions: list[int] = []
    first = 0
    while first < steps.num_micro_batches:
        count = data.draw(st.integers(1, steps.num_micro_batches - first))
        positions += steps.sample_range(first, count)
        first += count
    dropped = steps.num_samples % steps.global_batch if steps.drop_last else 0
    assert positions == list(range(steps.num_samples - dropped))


@given(any_steps(), st.lists(st.integers(1, 8), max_size=40))
def test_walk_equals_arithmetic(steps: Steps, sizes: list[int]) -> None:
    position = Position()
    total = 0
    for size in sizes:
        size = min(size, steps.num_micro_batches - position.micro_batch)
        position = position.after_step(size, steps)
        total += size
    assert position == Position(*divmod(total, steps.num_micro_batches), len(sizes))


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


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (5, 1), (4, 2), (0, 6), (0, 0)])
def test_micro_batch_outside_of_the_epoch(first: int, count: int) -> None:
    message = f"micro-batches {first} to {first + count - 1} are not in an epoch of 5: choose 0 <= micro-batch < 5"
    with pytest.raises(ValueError, match=message):
        Steps(9, 4, 2).sample_range(first, count)


def test_dropped_samples_are_in_no_micro_batch() -> None:
    with pytest.raises(ValueError, match="micro-batches 4 to 4 are not in an epoch of 4"):
        Steps(9, 4, 2, drop_last=True).sample_range(4)


def test_after_step() -> None:
    steps = Steps(9, 4, 2)
    assert Position(0, 2, 1).after_step(2, steps) == Position(0, 4, 2)
    assert Position(0, 4, 2).after_step(1, steps) == Position(1, 0, 3)
    with pytest.raises(ValueError, match="micro_batch=4 and 2 more are not in an epoch of 5: resume with the data"):
        Position(0, 4, 2).after_step(2, steps)


def test_position_round_trip() -> None:
    position = Position(epoch=2, micro_batch=5, step=19)
    assert position.to_dict() == {"epoch": 2, "micro_batch": 5, "step": 19}
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": None}, "position's epoch=None is not a count"),
        ({"step": -1}, "position's step=-1 is not a count: it must be an integer >= 0"),
        ({"step": True}, "position's step=True is not a count"),
        ({"micro_batch": 1.0}, "position's micro_batch=1.0 is not a count"),
        ({"rank": 0}, "position has unknown rank: it takes only epoch, micro_batch, step"),
    ],
)
def test_bad_position(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Position.from_dict(Position().to_dict() | changes)


@pytest.mark.parametrize("name", ["epoch", "micro_batch", "step"])
def test_incomplete_position(name: str) -> None:
    values = Position().to_dict()
    del values[name]
    with pytest.raises(ValueError, match=f"position lacks {name}: it needs epoch, micro_batch, step"):
        Position.from_dict(values)
