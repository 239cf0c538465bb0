"""Exact sums of steps in which no worker has more than one micro-batch.

Then a worker's part of the sum is one term: its gradient, which nobody has to weight and round before it travels. It
lies in the buffer that all workers see in its own precision, and whoever adds up a block of it weights, rounds and adds
the terms in a core's cache. The bits are those of workers that round first and exchange float64, of which there is
twice as much to write, to exchange and to convert back.

PACELINE_TERMS=0, on all workers, turns it off.
"""

from __future__ import annotations

import logging
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

    def add(self, index: int, gradient: torch.Tensor, weight: float, *, first: bool) -> None:
        super().add(index, gradient, 1.0, first=first)

    def exchange(self) -> Pending:
        return self._combining.combine(self.flat, self._add_up)

    def weigh(self, weights: Sequence[float], divisor: torch.Tensor | None) -> None:
        """By what the terms are multiplied, by rank, and their sum is divided."""
        self._weights, self._divisor = weights, divisor

    def publish(self, used: Sequence[bool], divisor: torch.Tensor | None = None) -> None:
        super().publish(used)

    def _add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
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
