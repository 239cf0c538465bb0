"""A step's numbers: what each worker writes into its tail, all of them read from the sum."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.core.timing import Timing
from paceline.sync.numbers import Layout, StepNumbers
from paceline.sync.tail import Tail

LAYOUT = Layout(num_micro_batches=3, num_grids=2, num_workers=2, num_parameters=4, num_buffers=2)
TIMINGS = [Timing(0.5, 0.25, 0.125), Timing(1.5, 1.25, 1.125)]
NOTHING = Timing()


def tails(dtype: torch.dtype = torch.float64) -> list[Tail]:
    found = [Tail(LAYOUT, torch.full((LAYOUT.total,), math.nan, dtype=dtype), rank) for rank in range(2)]
    for tail in found:
        tail.clear()
    return found


def exchanged(workers: list[Tail]) -> StepNumbers:
    total = torch.stack([tail._space for tail in workers]).sum(0)
    for tail in workers:
        tail._space.copy_(total)
    first, second = (tail.numbers() for tail in workers)
    assert first._source == second._source
    return first


def write(tail: Tail, used: list[bool] | None = None, changed: tuple[bool, bool] = (False, False)) -> None:
    tail.write(NOTHING, 0.0, used or [True] * LAYOUT.num_parameters, changed, parts=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everybody_reads_what_each_has_written(dtype: torch.dtype) -> None:
    workers = tails(dtype)
    for rank, tail in enumerate(workers):
        tail.set_weight(rank, 8 + rank)
        tail.set_loss(rank, torch.tensor(0.5 + rank))
        tail.write(TIMINGS[rank], 2.0 * rank, [rank == 0, True, False, rank == 1], (rank == 1, False), parts=rank == 1)
    numbers = exchanged(workers)
    assert numbers.weights == [8, 9, 0]
    assert numbers.losses == [0.5, 1.5, 0]
    assert numbers.timings == TIMINGS
    assert numbers.wishes == [0, 2]
    assert numbers.used == [1, 2, 0, 1]
    assert numbers.changed_buffers == [1, 0]
    assert numbers.num_in_parts == 1
    assert workers[0].total_weight() == 17
    assert numbers.loss == pytest.approx((8 * 0.5 + 9 * 1.5) / 17)


def test_where_every_parameter_has_a_gradient_all_are_marked() -> None:
    workers = tails()
    for tail in workers:
        write(tail)
    assert exchanged(workers).used == [2, 2, 2, 2]


def test_nothing_is_left_of_the_step_before() -> None:
    workers = tails()
    for tail in workers:
        tail.set_weight(1, 5)
        tail.set_loss(1, torch.tensor(3.0))
        tail.note_peak(1, 1, torch.tensor([7.0]), is_again=False)
        tail.write(TIMINGS[0], 1.0, [True] * 4, (True, True), parts=True)
        tail.clear()
        write(tail, used=[False] * 4)
    assert exchanged(workers)._source == [0.0] * LAYOUT.total


def test_a_peak_is_the_largest_magnitude_and_two_parts_of_a_term_add_up() -> None:
    own = tails()[0]
    own.note_peak(0, 2, torch.tensor([1.0, -3.0]), is_again=False)
    own.note_peak(0, 2, torch.tensor([2.0]), is_again=False)
    own.note_peak(1, 0, torch.tensor([-4.0]), is_again=False)
    own.note_peak(1, 0, torch.tensor([5.0]), is_again=True)
    own.note_peak(1, 1, torch.tensor([math.nan]), is_again=False)
    own.note_peak(1, 1, torch.tensor([6.0]), is_again=False)
    numbers = own.numbers()
    assert numbers.peaks(0) == [0, 0, 3]
    assert numbers.peaks(1)[0] == 9
    assert math.isnan(numbers.peaks(1)[1])
    assert own.peaks[0][2] == 3
