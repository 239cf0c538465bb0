"""Finding the loss or gradient that is no number, without making the device wait."""

from __future__ import annotations

from collections import deque

from paceline.core.errors import NonFiniteError
from paceline.plan.shares import Plan, owner
from paceline.sync.step_numbers import Numbers


class FiniteWatch:
    """Raises `NonFiniteError` for a step whose loss is inf or NaN, in exact mode also for a gradient.

    On the CPU before the optimizer's step. On a GPU when the losses have arrived on the host, a step or so later,
    or some 32 steps where graphs replay whole ones; `flush` waits for the rest.
    """

    def __init__(self) -> None:
        self._unseen: deque[tuple[int, Plan, Numbers]] = deque()

    def check(self, step: int, plan: Plan, numbers: Numbers) -> None:
        if not self._unseen and numbers.has_arrived:
            _raise_if_not_finite(step, plan, numbers)
            return
        self._unseen.append((step, plan, numbers))
        while self._unseen and self._unseen[0][2].has_arrived:
            self._look_at_oldest()

    def flush(self) -> None:
        while self._unseen:
            self._look_at_oldest()

    def _look_at_oldest(self) -> None:
        _raise_if_not_finite(*self._unseen.popleft())


def _raise_if_not_finite(step: int, plan: Plan, numbers: Numbers) -> None:
    found = numbers.non_finite()
    if found is None:
        return
    what, value, number = found
    rank = owner(plan, number)
    raise NonFiniteError(
        f"{what} is {value} at step {step}, micro-batch {number}, rank {rank}: look at that micro-batch's data, lower "
        "the learning rate or clip gradients",
        step=step,
        micro_batch=number,
        rank=rank,
    )
