"""Exact sums of steps in which no worker has more than one micro-batch.

Then a worker's part of the sum is one term: its gradient, which nobody has to weight and round before it travels. It
lies in the buffer that all workers see in its own precision, and whoever adds up a block of it weights, rounds and adds
the terms in a core's cache. The bits are those of workers that round first and exchange float64, of which there is
twice as much to write, to exchange and to convert back. Of two terms, the arithmetic is in float32 too, see `_add_two`.

PACELINE_TERMS=0, on all workers, turns it off.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence

import torch

from paceline.comm.base import Combining, Communicator, Pending
from paceline.plan.shares import Plan
from paceline.sync.buckets import CPU_BLOCK, Anchored, Bucket
from paceline.sync.grid import Grid

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_TERMS"


def are_possible(communicator: Communicator, parameters: Mapping[str, torch.Tensor], max_micro_batches: int) -> bool:
    """Whether the steps of a run, of up to so many micro-batches, can be of single terms; the log says why not."""
    reason = obstacle(communicator, parameters, max_micro_batches)
    if reason is not None and communicator.world.size > 1:
        logger.info("workers round their gradients before they exchange them: %s", reason)
    return reason is None


def obstacle(communicator: Communicator, parameters: Mapping[str, torch.Tensor], max_micro_batches: int) -> str | None:
    size = communicator.world.size
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if not 1 < max_micro_batches <= size:
        return f"a step has {max_micro_batches} micro-batches, not one for each of {size} workers"
    if communicator.world.device.type != "cpu" or not isinstance(communicator, Combining):
        return "they do not see each other's memory"
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            # A sum is rounded to the type that travels, float32 at least: for a smaller one it would be rounded twice.
            return f"parameter {name!r} is {parameter.dtype}"
    return None


class TermBucket(Bucket):
    """One term per worker, which `add` takes as it is. `weigh` is called before anybody waits for the exchange.

    `scratch`: what `scratch_memory` made; buckets may share it.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        communicator: Combining,
        grid: Grid,
        scratch: torch.Tensor,
    ) -> None:
        super().__init__(parameters, dtype, communicator, 0)
        self._combining = communicator
        self._grid = grid
        self._scratch = scratch
        self._weights: Sequence[float] = ()
        self._divisor: torch.Tensor | None = None
        self._counts: list[float] | None = None  # of grid steps in one of each term, where float32 is enough

    def add(self, index: int, gradient: torch.Tensor, weight: float, *, first: bool) -> None:
        if first:
            self.views[index].copy_(gradient)
        else:
            super().add(index, gradient, 1.0, first=first)

    def exchange(self) -> Pending:
        return self._combining.combine(self.flat, self._add_up)

    def weigh(self, weights: Sequence[float], divisor: torch.Tensor | None, peaks: Sequence[float]) -> None:
        """By what the terms are multiplied, by rank, and their sum is divided. `peaks`: their largest magnitudes then,
        in any order."""
        self._weights, self._divisor = weights, divisor
        is_plain = divisor is None and self.flat.dtype == torch.float32
        self._counts = steps_per_one(self._grid, weights, peaks) if is_plain else None

    def publish(self, used: Sequence[bool], divisor: torch.Tensor | None = None) -> None:
        super().publish(used)

    def _add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if self._counts is not None:
            self._add_two(terms, out, self._counts)
            return
        anchor = self._grid.anchor
        # Two terms with opposite anchors are rounded alike, and their sum is rid of the anchors.
        signs = [-1.0 if rank == 1 else 1.0 for rank in range(len(terms))]
        anchored = [Anchored(sign * anchor, w, out) for sign, w in zip(signs, self._weights, strict=True)]
        for start in range(0, out.numel(), CPU_BLOCK):
            stop = min(start + CPU_BLOCK, out.numel())
            total, term = self._scratch[:, : stop - start]
            anchored[0](total.copy_(terms[0][start:stop]))
            total.add_(anchored[1](term.copy_(terms[1][start:stop])))
            for rank in range(2, len(terms)):
                total.add_(anchored[rank](term.copy_(terms[rank][start:stop])).sub_(anchor))
            out[start:stop].copy_(total if self._divisor is None else total.div_(self._divisor))

    def _add_two(self, terms: Sequence[torch.Tensor], out: torch.Tensor, counts: Sequence[float]) -> None:
        """In float32, which is half as much to move. The bits are the same.

        Counted in steps of the grid, a term is exact, and rounding makes it a whole number. A sum of two numbers in
        float32 is rounded once, as it is in float64 when it is stored.
        """
        scratch = self._scratch.view(torch.float32)[0]
        for first, second, total in zip(*(x.split(len(scratch)) for x in (*terms, out)), strict=True):
            term = scratch[: len(total)]
            # Added to 0.0, which takes torch less time than a product, and makes 0.0 of -0.0.
            torch.add(_ZERO, first, alpha=counts[0], out=total).round_()
            torch.add(_ZERO, second, alpha=counts[1], out=term).round_()
            torch.add(_ZERO, total.add_(term), alpha=self._grid.step, out=total)


_ZERO = torch.tensor(0.0)


def steps_per_one(grid: Grid, weights: Sequence[float], peaks: Sequence[float]) -> list[float] | None:
    """What two terms are multiplied by to be counted in steps of the grid; None where float32 is not enough for that.

    It is enough for weights that are powers of two, which change no digits, and finite terms that fit the grid.
    """
    counts = [weight / grid.step for weight in weights]
    are_exact = all(_is_power_of_float32(number) for number in (*counts, grid.step))
    fit = all(map(math.isfinite, peaks)) and grid.fits(peaks)
    return counts if len(counts) == 2 and are_exact and fit else None


def _is_power_of_float32(number: float) -> bool:
    """Whether it is a power of two that float32 has all digits for."""
    mantissa, exponent = math.frexp(number)
    return mantissa == 0.5 and -125 <= exponent <= 128


def buckets(
    groups: Sequence[Mapping[str, torch.Tensor]], communicator: Communicator, grids: Sequence[Grid]
) -> list[TermBucket]:
    """One for each group of parameters. The communicator is one with which terms are possible."""
    assert isinstance(communicator, Combining)
    scratch = scratch_memory()
    return [
        TermBucket(group, next(iter(group.values())).dtype, communicator, grid, scratch)
        for group, grid in zip(groups, grids, strict=False)
    ]


def scratch_memory() -> torch.Tensor:
    """For a block of the sum and one of a term."""
    return torch.empty(2, CPU_BLOCK, dtype=torch.float64)


def weights_by_rank(plan: Plan, weights: Sequence[float]) -> list[float]:
    """Of each worker's one micro-batch; 0 where it has none."""
    return [weights[own.start] if own else 0.0 for own in plan]


def are_single(plan: Plan) -> bool:
    return all(len(own) <= 1 for own in plan)
