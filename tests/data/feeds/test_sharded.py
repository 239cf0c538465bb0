"""A worker's own reading: the right samples, their weight, on the right device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from thread_workers import thread_workers

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.data.epochs import epochs_of
from paceline.data.feeds.base import DataSettings
from paceline.data.feeds.sharded import ShardedFeed, weight_of
from paceline.data.sources.base import Columns, as_source
from paceline.plan.epoch import Position, Steps
from paceline.plan.shares import Plan

CPU, META = torch.device("cpu"), torch.device("meta")


def feed(
    num_samples: int, global_batch: int, micro_batch: int, *, drop_last: bool = False, shuffle: bool = True, **rest: Any
) -> tuple[ShardedFeed, Steps]:
    steps = Steps(num_samples, global_batch, micro_batch, drop_last)
    source = as_source(torch.arange(num_samples))
    return make(source, steps, CPU, shuffle=shuffle, **rest), steps


def make(source: Any, steps: Steps, device: torch.device, **settings: Any) -> ShardedFeed:
    """One worker takes everything that is left in one step, unless a plan is given."""
    order = {"seed": settings.pop("seed", 0), "shuffle": settings.pop("shuffle", True)}
    plan_step = settings.pop("plan_step", lambda left: (range(left),))
    rank = settings.pop("rank", 0)
    communicator = thread_workers(2)[rank] if rank else SingleCommunicator(World(device=device))
    epochs = epochs_of(source, steps, communicator, **order)
    return ShardedFeed(source, epochs, DataSettings(**order, **settings), plan_step, communicator)


def read(feed: ShardedFeed, epoch: int, number: int, count: int = 1) -> tuple[Any, int]:
    feed.begin_step(Position(epoch, number))
    return feed.micro_batch(range(count))


def epoch_of(shards: tuple[ShardedFeed, Steps], epoch: int) -> list[list[int]]:
    reader, steps = shards
    return [read(reader, epoch, number)[0].tolist() for number in range(steps.num_micro_batches)]


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "micro_batch", "drop_last", "sizes"),
    [
        (12, 4, 2, False, [2] * 6),
        (13, 6, 2, False, [2] * 6 + [1]),
        (13, 6, 2, True, [2] * 6),
        (5, 8, 4, False, [4, 1]),
        (1, 1, 1, False, [1]),
    ],
)
def test_every_sample_exactly_once_per_epoch(
    num_samples: int, global_batch: int, micro_batch: int, drop_last: bool, sizes: list[int]
) -> None:
    shards = feed(num_samples, global_batch, micro_batch, drop_last=drop_last)
    for epoch in range(3):
        batches = epoch_of(shards, epoch)
        assert [len(batch) for batch in batches] == sizes
        seen = Counter(index for batch in batches for index in batch)
        assert set(seen.values()) == {1}
        assert len(seen) == sum(sizes)
        assert set(seen) <= set(range(num_samples))


def test_epochs_differ_and_can_be_read_in_any_order() -> None:
    shards = feed(50, 10, 5)
    first, second = epoch_of(shards, 0), epoch_of(shards, 1)
    assert first != second
    assert epoch_of(shards, 0) == first
    assert epoch_of(feed(50, 10, 5), 1) == second
    assert epoch_of(feed(50, 10, 5, seed=1), 0) != first
    # The order belongs to the epoch, not to how it is cut.
    assert [i for batch in epoch_of(feed(50, 25, 25), 0) for i in batch] == [i for batch in first for i in batch]


def test_a_changing_plan_is_followed() -> None:
    steps = Steps(16 * 4 * 8, 8 * 4, 4)
    plans = [(range(n), range(n, 8)) for n in (4, 4, 4, 5, 5, 3, 0, 8, 8, 1, 1, 1, 1, 4, 4, 4)]
    samples: list[int] = []
    for rank in range(2):
        upcoming = iter(plans)
        source = Columns(torch.arange(steps.num_samples))
        own = make(source, steps, CPU, rank=rank, plan_step=lambda _, upcoming=upcoming: next(upcoming))
        position = Position()
        for plan in plans:
            step = own.begin_step(position)
            for number in plan[rank]:
                samples += own.micro_batch(range(number, number + 1))[0].tolist()
            position = step.after
    assert sorted(samples) == [*range(steps.num_samples)]


def test_a_step_that_is_begun_again_gets_its_samples_again_after_an_in_place_change() -> None:
    shards, _ = feed(64, 4, 4)
    first, _ = read(shards, 0, 0)
    before = first.clone()
    first.zero_()
    assert torch.equal(read(shards, 0, 0)[0], before)


@pytest.mark.parametrize("plan", [None, (range(1), range(1, 3)), (range(2), range(2, 2))])
@pytest.mark.parametrize("num_samples", [64, 67, 60])
def test_steps_of_an_epoch_in_order_equal_those_of_a_fresh_feed(plan: Plan | None, num_samples: int) -> None:
    steps = Steps(num_samples, 12, 4)

    def planned(left: int) -> Plan:
        return plan if plan is not None and left >= plan[-1].stop else (range(0), range(min(left, 3)))

    def fresh() -> ShardedFeed:
        return make(Columns(torch.arange(num_samples)), steps, CPU, plan_step=planned)

    going_on, position, num_seen = fresh(), Position(), 0
    while position.epoch < 3:
        step = going_on.begin_step(position)
        assert step == fresh().begin_step(position)
        assert step.num_samples == step.total_weight
        num_seen += step.num_samples
        position = step.after
    assert num_seen == 3 * num_samples


def test_without_shuffling_the_data_keeps_its_order() -> None:
    shards = feed(7, 4, 2, shuffle=False)
    for epoch in range(2):
        assert epoch_of(shards, epoch) == [[0, 1], [2, 3], [4, 5], [6]]


def test_weights_count_samples_unless_the_user_counts() -> None:
    shards, _ = feed(5, 4, 2, shuffle=False)
    assert [read(shards, 0, number)[1] for number in range(3)] == [2, 2, 1]
    shards, _ = feed(5, 4, 2, shuffle=False, weight_fn=lambda batch: (batch > 1).sum())
    weights = [read(shards, 0, number)[1] for number in range(3)]
    assert weights == [0, 2, 1]
    assert all(type(weight) is int for weight in weights)


def test_several_micro_batches_are_read_as_one() -> None:
    shards, steps = feed(7, 4, 2)
    parts = epoch_of((shards, steps), 0)
    batch, weight = read(shards, 0, 1, 3)
    assert batch.tolist() == parts[1] + parts[2] + parts[3]
    assert weight == shards.begin_step(Position(0, 1)).total_weight == 5


def test_the_user_weighs_on_the_host() -> None:
    asked = []
    steps = Steps(4, 2, 2)
    shards = make(
        as_source(torch.arange(4)), steps, META, shuffle=True, weight_fn=lambda b: asked.append(b.device) or 1
    )
    assert read(shards, 0, 0)[0].device == META
    assert asked == [CPU]


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([3.0])])
def test_whole_numbers_are_weights(value: Any) -> None:
    assert weight_of(None, lambda _: value) == 3
    assert type(weight_of(None, lambda _: value)) is int
    assert weight_of(None, lambda _: 0 * value) == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (2.5, "2.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "None"),
        ("3", "'3'"),
        (torch.tensor(0.5), "tensor(0.5000)"),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        ([3], "[3]"),
    ],
)
def test_anything_else_is_no_weight(value: Any, shown: str) -> None:
    shards, _ = feed(4, 2, 2, weight_fn=lambda _: value)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole text follows
        read(shards, 0, 0)
    assert str(caught.value) == (
        f"weight_fn returned {shown}: it must be an integer >= 0, such as the number of valid tokens"
    )
