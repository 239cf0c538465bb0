"""The average of replicas that took local steps, optionally passed through an outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch

from paceline.comm.base import Communicator, Pending
from paceline.core.timing import Timing
from paceline.sync.numbers import RoundMean


@dataclass
class RoundTotals:
    """Totals since the last average: this worker's weight and losses, and the steps and micro-batches of all workers.

    `loss_sum` is weighted; its weights add up to `loss_weight`.
    """

    weight: float = 0.0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    steps: int = 0
    micro_batches: int = 0


class RoundResult(NamedTuple):
    """The result of an average.

    `round_s`: seconds that the slowest worker needed for the `steps` before it. `sync_s`: seconds that the previous
    average cost the worker that arrived last, which is the cost without waiting.
    """

    drift: float
    mean: RoundMean
    timings: tuple[Timing, ...]
    wishes: tuple[float, ...]
    steps: int
    round_s: float
    sync_s: float


class _Row(NamedTuple):
    """What each worker sends with its change."""

    weight: float
    weighted_square: float  # of its change's length
    round_s: float
    sync_s: float
    micro_batch_s: float
    rest_s: float
    wish: float
    loss_sum: float
    loss_weight: float


class ReplicaAverage:
    """Averages the replicas' weights.

    Each replica sends its change since the last average, which tolerates a coarse dtype better than the weights do.
    Changes are weighted by samples. The drift is computed from their lengths and the length of their mean.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        communicator: Communicator,
        transfer: torch.dtype,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None,
    ) -> None:
        self._tensors = [*(p.detach() for p in parameters), *statistics]
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self._communicator = communicator
        self._common = self._read()
        self._device = self._common.device
        self._travelling = communicator.empty(self._common.numel(), transfer, self._device)
        self._table = communicator.empty(communicator.world.size * len(_Row._fields), torch.float64, self._device)
        self._pending: list[Pending] = []
        # A view: the outer optimizer updates the common weights in place, and no statistics.
        self._trained = torch.nn.Parameter(self._common[: sum(p.numel() for p in parameters)])
        self._outer = None if outer is None else outer([self._trained])
        self._round_begun_s = perf_counter()
        self._sync_s = 0.0  # spent on averaging since then

    @property
    def is_under_way(self) -> bool:
        return bool(self._pending)

    @torch.no_grad()
    def start(self, own: RoundTotals, timing: Timing, wish: float) -> None:
        begun_s = self._now_s()
        round_s, sync_s = begun_s - self._round_begun_s - self._sync_s, self._sync_s
        self._round_begun_s = begun_s
        self._steps = own.steps
        self._change = self._read().sub_(self._common)
        # Scaled by a number that all workers know, so that the sum stays in the range of fp16.
        self._scale = 1.0 / max(own.micro_batches, 1)
        torch.mul(self._change, own.weight * self._scale, out=self._travelling)
        square = own.weight * self._change.norm(dtype=torch.float64).square().item()
        times = (round_s, sync_s, timing.micro_batch, timing.rest)
        row = _Row(own.weight, square, *times, wish, own.loss_sum, own.loss_weight)
        self._table.zero_()
        self._table.view(-1, len(row))[self._communicator.world.rank] = torch.tensor(row, dtype=torch.float64)
        self._pending = [self._communicator.all_reduce(tensor) for tensor in (self._table, self._travelling)]
        self._sync_s = self._now_s() - begun_s

    @torch.no_grad()
    def finish(self, *, has_moved_on: bool) -> RoundResult:
        """Set the replica to the common weights. If it took steps since `start`, add the difference instead."""
        begun_s = self._now_s()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        rows = [_Row(*row) for row in self._table.view(-1, len(_Row._fields)).tolist()]
        weight = sum(row.weight for row in rows)
        total = max(weight, 1.0)  # no worker saw a sample
        mean = self._travelling.to(torch.float32).div_(total * self._scale)
        before = self._common.clone() if has_moved_on else None
        self._advance(mean)
        if before is None:
            self._write(self._common)
        else:
            self._write(self._read().add_(self._common).sub_(before).sub_(self._change))
        length = mean.norm(dtype=torch.float64).item()
        square_distance = max(0.0, sum(row.weighted_square for row in rows) / total - length**2)
        drift = math.sqrt(square_distance) / max(self._common.norm(dtype=torch.float64).item(), 1e-12)
        self._sync_s += self._now_s() - begun_s
        loss_weight = sum(row.loss_weight for row in rows)
        loss = sum(row.loss_sum for row in rows) / loss_weight if loss_weight else math.nan
        return RoundResult(
            drift,
            RoundMean(loss, weight / max(self._steps, 1)),
            tuple(Timing(row.micro_batch_s, row.sync_s, row.rest_s) for row in rows),
            tuple(row.wish for row in rows),
            self._steps,
            max(row.round_s for row in rows),
            min(row.sync_s for row in rows),
        )

    def state_dict(self) -> dict[str, Any]:
        """Only valid while no average is under way and no worker has taken a step since the last one."""
        return {"common": self._common, "outer": None if self._outer is None else self._outer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._common.copy_(state["common"])
        if self._outer is not None and state["outer"] is not None:
            self._outer.load_state_dict(state["outer"])

    def _advance(self, mean: torch.Tensor) -> None:
        if self._outer is None:
            self._common.add_(mean)
            return
        num_trained = self._trained.numel()
        self._trained.grad = -mean[:num_trained]
        self._outer.step()
        self._common[num_trained:].add_(mean[num_trained:])

    def _read(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in self._tensors])

    def _write(self, values: torch.Tensor) -> None:
        for tensor, part in zip(self._tensors, torch.split(values, self._sizes), strict=True):
            part = part.view_as(tensor)
            tensor.copy_(part if tensor.is_floating_point() else part.round())

    def _now_s(self) -> float:
        if self._device.type == "cuda":  # otherwise work queued before the average would count as averaging
            torch.cuda.synchronize(self._device)
        return perf_counter()
