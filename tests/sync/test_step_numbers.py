"""A step's numbers: what each worker writes into its tail, all of them read from the sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.timing import Timing
from paceline.sync.numbers import WorkerMessage
from paceline.sync.step_numbers import Layout, StepNumbers, StepNumbersWriter

LAYOUT = Layout(num_micro_batches=3, is_exact=True, num_grids=2, num_workers=2, num_parameters=4, num_buffers=2)
MESSAGES = [
    WorkerMessage(Timing(0.5, 0.25, 0.125, 0.0625), 0.0, (1 << 48) - 1, (0.1, -1)),
    WorkerMessage(Timing(1.5, 1.25, 1.125, 1.0625), 2.0, 12345678901, None),
]


def tails(dtype: torch.dtype = torch.float64) -> list[StepNumbersWriter]:
    found = [StepNumbersWriter(LAYOUT, torch.full((LAYOUT.total,), math.nan, dtype=dtype), rank) for rank in range(2)]
    for tail in found:
        tail.clear()
    return found


def exchanged(workers: list[StepNumbersWriter]) -> StepNumbers:
    total = torch.stack([tail._space for tail in workers]).sum(0)
    for tail in workers:
        tail._space.copy_(total)
    return workers[0].numbers()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everybody_reads_what_each_has_written(dtype: torch.dtype) -> None:
    workers = tails(dtype)
    for rank, tail in enumerate(workers):
        tail.set_weight(rank, 8 + rank)
        tail.set_loss(rank, torch.tensor(0.5 + rank))
        tail.write(MESSAGES[rank], [rank == 0, True, False, rank == 1], (rank == 1, False))
    numbers = exchanged(workers)
    assert numbers.weights == [8, 9, 0]
    assert numbers.losses == [0.5, 1.5, 0]
    assert numbers.timings == [message.timing for message in MESSAGES]
    assert numbers.requests == [0, 2]
    assert numbers.digests == [message.digest for message in MESSAGES]
    assert numbers.learning_rates == [(0.1, -1), None]
    assert numbers.used == [1, 2, 0, 1]
    assert numbers.changed_buffers == [1, 0]
    assert workers[0].total_weight() == 17
    assert numbers.loss == pytest.approx((8 * 0.5 + 9 * 1.5) / 17)


@pytest.mark.parametrize(
    ("message", "is_ordinary"),
    [
        (WorkerMessage(digest=7), True),
        (WorkerMessage(digest=8), False),
        (WorkerMessage(digest=7, request=1.0), False),
        (WorkerMessage(digest=7, learning_rate=(0.0, 0)), False),
    ],
)
def test_a_step_is_ordinary_if_all_agree_and_nobody_requests_anything(
    message: WorkerMessage, is_ordinary: bool
) -> None:
    first, second = tails()
    first.write(WorkerMessage(Timing(0.5), digest=7), [True] * 4, ())
    second.write(message, [True] * 4, ())
    assert exchanged([first, second]).is_ordinary is is_ordinary


@pytest.mark.parametrize("message", [WorkerMessage(request=1.0), WorkerMessage(learning_rate=(0.0, 0))])
def test_a_request_that_all_workers_make_is_not_ordinary_either(message: WorkerMessage) -> None:
    workers = tails()
    for tail in workers:
        tail.write(message, [True] * 4, ())
    assert not exchanged(workers).is_ordinary


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_with_a_number_that_is_not_finite_is_not_ordinary(number: float, what: str) -> None:
    first, second = tails()
    if what == "loss":
        second.set_loss(1, torch.tensor(number))
    else:
        second.note_largest(1, torch.tensor(abs(number), dtype=torch.float64))
    assert not exchanged([first, second]).is_ordinary


@given(rate=st.floats(1e-20, 1e20), group=st.integers(-1, 1000))
def test_a_learning_rate_keeps_all_its_digits_in_float32(rate: float, group: int) -> None:
    workers = tails(torch.float32)
    workers[1].write(WorkerMessage(learning_rate=(rate, group)), [True] * 4, ())
    assert exchanged(workers).learning_rates == [None, (rate, group)]


def test_where_every_parameter_has_a_gradient_all_are_marked() -> None:
    workers = tails()
    for tail in workers:
        tail.write(WorkerMessage(), [True] * 4, ())
    assert exchanged(workers).used == [2, 2, 2, 2]


def test_nothing_is_left_of_the_step_before() -> None:
    workers = tails()
    for tail in workers:
        tail.set_weight(1, 5)
        tail.set_loss(1, torch.tensor(3.0))
        tail.note_peaks([1], 0, torch.tensor([[7.0, 8.0]], dtype=torch.float64))
        tail.write(MESSAGES[0], [True] * 4, (True, True))
        tail.clear()
        tail.write(WorkerMessage(), [False] * 4, (False, False))
    exchanged(workers)
    assert not workers[0]._space.any()


def test_peaks_are_the_largest_of_any_micro_batch_and_worker() -> None:
    first, second = tails()
    first.note_peaks([0], 0, torch.tensor([[1.0, 5.0]], dtype=torch.float64))
    first.note_peaks([2], 0, torch.tensor([[3.0]], dtype=torch.float64))
    second.note_peaks([1], 1, torch.tensor([[6.0]], dtype=torch.float64))
    numbers = exchanged([first, second])
    assert numbers.peaks == [3, 6]
    assert numbers.non_finite() is None


def test_not_a_number_names_its_micro_batch() -> None:
    first, second = tails()
    second.note_peaks([1], 0, torch.tensor([[2.0, math.nan]], dtype=torch.float64))
    second.note_peaks([2], 0, torch.tensor([[2.0, 1.0]], dtype=torch.float64))
    numbers = exchanged([first, second])
    what, value, number = numbers.non_finite()
    assert (what, number) == ("gradient", 1)
    assert math.isnan(value)
    assert math.isnan(numbers.peaks[1])
