"""The average of replicas that took local steps, optionally passed through an outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from time import perf_counter
from typing import Any

import torch

from paceline.comm.base import Communicator, Pending


@dataclass
class WorkerRound:
    """What each worker sends in an average: a summary of its steps since the last one."""

    weight: float = 0.0
    loss_sum: float = 0.0  # weighted; the weights add up to loss_weight
    loss_weight: float = 0.0
    num_steps: float = 0.0
    num_micro_batches: float = 0.0  # of all workers
    micro_batch_s: float = 0.0  # mean, of this worker
    rest_s: float = 0.0  # per step
    data_s: float = 0.0  # per micro-batch
    feed_s: float = 0.0
    request: float = 0.0
    # Set by `ReplicaAverage`:
    weighted_square: float = 0.0  # of its change's length
    round_s: float = 0.0  # spent on the steps
    sync_s: float = 0.0  # spent on the previous average, including the wait for others


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
        self._sent = communicator.empty(self._common.numel(), transfer, self._device)
        size, width = communicator.world.size, len(fields(WorkerRound))
        self._table = communicator.empty(size * width, torch.float64, self._device).view(size, width)
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
    def start(self, own: WorkerRound) -> None:
        begun_s = self._now_s()
        own.round_s, own.sync_s = begun_s - self._round_begun_s - self._sync_s, self._sync_s
        self._round_begun_s = begun_s
        self._change = self._read().sub_(self._common)
        # Scaled by a number that all workers know, so that the sum stays in the range of fp16.
        self._scale = 1.0 / max(own.num_micro_batches, 1.0)
        torch.mul(self._change, own.weight * self._scale, out=self._sent)
        own.weighted_square = own.weight * self._change.norm(dtype=torch.float64).square().item()
        self._table.zero_()
        self._table[self._communicator.world.rank] = torch.tensor(astuple(own), dtype=torch.float64)
        self._pending = [self._communicator.all_reduce(tensor) for tensor in (self._table, self._sent)]
        self._sync_s = self._now_s() - begun_s

    @torch.no_grad()
    def finish(self, *, has_moved_on: bool) -> tuple[list[WorkerRound], float]:
        """Set the replica to the common weights. If it took steps since `start`, add the difference instead.

        Returns what the workers report, by rank, and the drift.
        """
        begun_s = self._now_s()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        rounds = [WorkerRound(*row) for row in self._table.tolist()]
        total = max(sum(each.weight for each in rounds), 1.0)  # no worker saw a sample
        mean = self._sent.to(torch.float32).div_(total * self._scale)
        before = self._common.clone() if has_moved_on else None
        self._advance(mean)
        if before is None:
            self._write(self._common)
        else:
            self._write(self._read().add_(self._common).sub_(before).sub_(self._change))
        length = mean.norm(dtype=torch.float64).item()
        square_distance = max(0.0, sum(each.weighted_square for each in rounds) / total - length**2)
        drift = math.sqrt(square_distance) / max(self._common.norm(dtype=torch.float64).item(), 1e-12)
        self._sync_s += self._now_s() - begun_s
        return rounds, drift

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
