"""Micro-batches gathered several at once: the same samples as one by one, each with memory of its own."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.epochs import CutEpoch, SeededEpochs
from paceline.data.feeds.blocks import ALIGNMENT_BYTES, BLOCK_BYTES, MAX_AT_ONCE, SWITCH, blocks_of
from paceline.data.feeds.sharded import ShardedFeed
from paceline.data.sources.base import Columns, Samples
from paceline.plan.shares import Plan
from paceline.plan.steps import Position, Steps

CPU = torch.device("cpu")
WIDTH = 16  # floats: a cache line


class CountedColumns(Columns):
    """Counts its gathers."""

    def __init__(self, columns: Any) -> None:
        super().__init__(columns)
        self.num_read = 0

    def _rows(self, indices: Any) -> list[torch.Tensor]:
        self.num_read += 1
        return super()._rows(indices)


def numbered(num_samples: int, width: int = WIDTH) -> torch.Tensor:
    """Every row holds its own number."""
    return torch.arange(float(num_samples))[:, None].expand(-1, width).contiguous()


def epoch_of(num_samples: int, micro_batch: int, **cut: Any) -> CutEpoch:
    steps = Steps(num_samples, cut.pop("global_batch", micro_batch), micro_batch, **cut)
    epoch = SeededEpochs(steps, num_samples, seed=3, shuffle=True).begin(0)
    assert isinstance(epoch, CutEpoch)
    return epoch


def all_from(first: int) -> list[range]:
    """What will be asked for: everything."""
    return [range(first, 1000)]


def feed(source: Any, steps: Steps, plan: Plan | None = None, rank: int = 0, **settings: Any) -> ShardedFeed:
    epochs = SeededEpochs(steps, len(source), seed=3, shuffle=True)
    return ShardedFeed(
        source, epochs, lambda left: plan or (range(min(left, steps.max_micro_batches)),), rank, CPU, **settings
    )


def visited(feed: ShardedFeed, rank: int = 0) -> list[list[int]]:
    position, found = Position(), []
    while position.epoch < 2:
        step = feed.begin_step(position)
        for number in step.plan[rank]:
            batch, weight = feed.micro_batch(range(number, number + 1))
            assert weight == len(batch)
            found.append(batch[:, 0].int().tolist())
        position = feed.after_step(position)
    return found


@pytest.mark.parametrize("num_samples", [64, 67, 300])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_they_are_those_that_are_read_one_by_one(num_samples: int, micro_batches: int) -> None:
    steps = Steps(num_samples, 4 * micro_batches, 4)
    source = CountedColumns(numbered(num_samples))
    one_by_one = Samples(list(source.read(np.arange(num_samples), 0, 0)), None, seed=0)
    assert visited(feed(source, steps)) == visited(feed(one_by_one, steps))
    num_micro_batches = 2 * steps.num_micro_batches
    assert source.num_read <= num_micro_batches / MAX_AT_ONCE + 5


@pytest.mark.parametrize("plan", [(range(3), range(3, 8)), (range(1), range(1, 2)), (range(2), range(2, 2))])
def test_of_two_workers_each_gathers_its_own_of_several_steps(plan: Plan) -> None:
    num_samples = 32 * plan[-1].stop
    steps = Steps(num_samples, 4 * plan[-1].stop, 4)
    sources = [CountedColumns(numbered(num_samples)) for _ in plan]
    parts = [visited(feed(source, steps, plan, rank), rank) for rank, source in enumerate(sources)]
    num_own = [2 * 8 * len(own) for own in plan]
    assert [len(own) for own in parts] == num_own
    assert all(source.num_read <= num / MAX_AT_ONCE + 2 for source, num in zip(sources, num_own, strict=True))
    assert sorted(chain(*parts[0], *parts[1])) == sorted([*range(num_samples)] * 2)


def test_a_plan_that_changes_is_followed() -> None:
    steps = Steps(16 * 4 * 8, 8 * 4, 4)
    plans = [(range(n), range(n, 8)) for n in (4, 4, 4, 5, 5, 3, 0, 8, 8, 1, 1, 1, 1, 4, 4, 4)]
    samples: list[int] = []
    for rank in range(2):
        upcoming = iter(plans)
        own = ShardedFeed(
            Columns(numbered(steps.num_samples)),
            SeededEpochs(steps, steps.num_samples, seed=3, shuffle=True),
            lambda _, upcoming=upcoming: next(upcoming),
            rank,
            CPU,
        )
        position = Position()
        for plan in plans:
            own.begin_step(position)
            for number in plan[rank]:
                samples += own.micro_batch(range(number, number + 1))[0][:, 0].int().tolist()
            position = own.after_step(position)
    assert sorted(samples) == [*range(steps.num_samples)]


def test_a_step_that_is_begun_again_gets_its_samples_again_whatever_was_done_to_them() -> None:
    source = feed(Columns(numbered(64)), Steps(64, 4, 4))
    source.begin_step(Position())
    first, _ = source.micro_batch(range(1))
    before = first.clone()
    first.zero_()
    source.begin_step(Position())
    again, _ = source.micro_batch(range(1))
    assert torch.equal(again, before)


def test_a_position_in_mid_epoch_is_found() -> None:
    whole = visited(feed(Columns(numbered(64)), Steps(64, 4, 4)))
    jumping = feed(Columns(numbered(64)), Steps(64, 4, 4))
    for number in (5, 6, 2, 15, 3):
        jumping.begin_step(Position(0, number, number))
        assert jumping.micro_batch(range(1))[0][:, 0].int().tolist() == whole[number]


@pytest.mark.parametrize("plan", [None, (range(1), range(1, 3)), (range(2), range(2, 2))])
@pytest.mark.parametrize("num_samples", [64, 67, 60])
def test_steps_that_are_alike_are_told_as_each_by_itself(plan: Plan | None, num_samples: int) -> None:
    steps = Steps(num_samples, 12, 4)

    def planned(left: int) -> Plan:
        return plan if plan is not None and left >= plan[-1].stop else (range(0), range(min(left, 3)))

    def fresh() -> ShardedFeed:
        source = Columns(numbered(num_samples))
        return ShardedFeed(source, SeededEpochs(steps, num_samples, seed=3, shuffle=True), planned, 0, CPU)

    going_on, position, num_seen = fresh(), Position(), 0
    while position.epoch < 3:
        step, alone = going_on.begin_step(position), fresh()
        assert step == alone.begin_step(position)
        assert step.num_samples == step.total_weight
        num_seen += step.num_samples
        position = going_on.after_step(position)
    assert num_seen == 3 * num_samples


@pytest.mark.parametrize("weigh", [None, len])
def test_a_block_goes_to_the_device_at_once(weigh: Any) -> None:
    steps = Steps(64, 4, 4)
    own = feed(Columns((numbered(64), numbered(64))), steps, weight_fn=None if weigh is None else lambda b: weigh(b.x))
    moved: list[Any] = []

    def move(tensors: Any) -> Any:
        moved.append(tensors)
        return type(tensors)(*[t + 1000 for t in tensors]) if hasattr(tensors, "_make") else [t + 1000 for t in tensors]

    own._to_device = move  # type: ignore[assignment]
    plain = visited(feed(Columns(numbered(64)), steps))
    for number in range(16):
        own.begin_step(Position(0, number, number))
        batch, weight = own.micro_batch(range(1))
        assert weight == 4
        assert (batch.x[:, 0].int() - 1000).tolist() == (batch.y[:, 0].int() - 1000).tolist() == plain[number]
    # What is weighed is weighed on the host, one by one.
    assert len(moved) == (1 if weigh is None else 16)


def test_changing_one_in_place_spoils_no_other() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    blocks = blocks_of(Columns(numbered(64)), epoch_of(64, 4))
    assert blocks is not None
    first, second = blocks.take(0, all_from), blocks.take(1, all_from)
    before = second.clone()
    loss = (first * weight).sum()
    second.mul_(weight)  # as a user may who scales its input in place
    (loss + second.sum()).backward()
    assert torch.equal(weight.grad, numbered(64)[first[:, 0].long()].sum(0) + before.sum(0))


def test_every_one_starts_on_a_cache_line() -> None:
    blocks = blocks_of(Columns((numbered(64), torch.arange(64))), epoch_of(64, 8))
    assert blocks is not None
    for number in range(8):
        assert all(column.data_ptr() % ALIGNMENT_BYTES == 0 for column in blocks.take(number, all_from))


@pytest.mark.parametrize(
    ("columns", "micro_batch"),
    [
        ((numbered(64), torch.arange(64)), 4),  # 32 bytes of numbers
        (numbered(64, 15), 4),
        (numbered(64, BLOCK_BYTES // 16), 4),  # one is as large as a block
    ],
    ids=["narrow", "odd", "large"],
)
def test_what_does_not_fit_is_read_one_by_one(columns: Any, micro_batch: int) -> None:
    assert blocks_of(Columns(columns), epoch_of(64, micro_batch)) is None


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with caplog.at_level(logging.DEBUG, "paceline"):
        assert blocks_of(Columns(numbered(64)), epoch_of(64, 4)) is None
    assert "gathered one by one: PACELINE_BLOCKS=0" in caplog.text


def test_larger_micro_batches_come_in_smaller_blocks() -> None:
    width = BLOCK_BYTES // (2 * 4 * 4)
    source = CountedColumns(numbered(64, width))
    blocks = blocks_of(source, epoch_of(64, 4))
    assert blocks is not None
    for number in range(6):
        blocks.take(number, all_from)
    assert source.num_read == 3


def test_readers_read_one_by_one() -> None:
    source = CountedColumns(numbered(64))
    reading = feed(source, Steps(64, 4, 4), readers=1)
    try:
        assert len(visited(reading)) == 32
    finally:
        reading.close()
    assert source.num_read == 0  # here: its readers did
