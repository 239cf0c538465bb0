"""The average of replicas that took local steps, optionally passed through an outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from time import perf_counter
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.core.seeding import Purpose, derive_seed
from paceline.sync.averaging.fragments import Fragment, cut, parts_of
from paceline.sync.compression.exchange import WeightedSum, weighted_sum
from paceline.sync.compression.settings import Compression


@dataclass
class WorkerRound:
    """What each worker sends in an average: a summary of its steps since the last one."""

    weight: float = 0.0
    loss_sum: float = 0.0  # weighted; the weights add up to loss_weight
    loss_weight: float = 0.0
    num_steps: float = 0.0
    micro_batch_s: float = 0.0  # mean, of this worker
    rest_s: float = 0.0  # per step
    data_s: float = 0.0  # per micro-batch
    feed_s: float = 0.0
    request: float = 0.0
    # Set by `ReplicaAverage`:
    fragment_weight: float = 0.0  # since the last average of this fragment
    weighted_square: float = 0.0  # of the length of the fragment's change
    round_s: float = 0.0  # spent on the steps
    sync_s: float = 0.0  # spent on the previous average, including the wait for others

    def add(self, other: WorkerRound) -> None:
        """Add the steps of another round, whose average failed."""
        for name in ("weight", "loss_sum", "loss_weight", "num_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class FragmentSteps:
    """Steps since the last average of a fragment."""

    weight: float = 0.0  # of this worker
    num_micro_batches: int = 0  # of all workers
    num_steps: int = 0

    def add(self, other: FragmentSteps) -> None:
        self.weight += other.weight
        self.num_micro_batches += other.num_micro_batches
        self.num_steps += other.num_steps


class ReplicaAverage:
    """Averages the replicas' weights, one fragment after the other.

    Each replica sends its change since the fragment's last average, which tolerates a coarse encoding better than the
    weights do. Changes are weighted by samples. Statistics of BatchNorm are sent as they are, with the last fragment.

    The drift is computed from the lengths of the changes and of their mean, over all fragments. An average that fails
    changes nothing: its steps are part of the next one.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        statistics: Sequence[torch.Tensor],
        communicator: Communicator,
        seed: int,
        compress: Compression = "fp32",
        num_fragments: int = 1,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
    ) -> None:
        self._device = communicator.world.device
        self._seed = seed
        self._compress: Compression = compress
        self._statistics = [Fragment(statistics)] if statistics else []
        self._parameters, self._num_parts = parameters, num_fragments
        self._addresses = [p.data_ptr() for p in parameters]
        self._trained = cut([p.detach() for p in parameters], num_fragments)
        self._steps = [FragmentSteps() for _ in self._trained]
        self._outer = None if outer is None else outer([fragment.common for fragment in self._trained])
        self.num_completed = 0
        self._next = 0  # the fragment to be averaged next
        self.is_in_flight = False
        self._square_distance = self._square_length = 0.0  # of the fragments before that one
        self._round_begun_s = perf_counter()
        self._sync_s = 0.0  # spent on averaging since then
        self.connect(communicator)

    def connect(self, communicator: Communicator) -> None:
        """Exchange with these workers from now on. No average may be in flight."""
        self._communicator = communicator
        self._sums: list[WeightedSum] = []  # allocated by all workers together, in the next average

    @property
    def _sizes(self) -> list[int]:
        return [fragment.numel for fragment in self._trained]

    def _allocate(self) -> None:
        communicator = self._communicator
        # One for all fragments of the parameters, which are averaged in turn, and one for the statistics.
        sums = [weighted_sum(self._compress, max(self._sizes), communicator, len(fields(WorkerRound)))]
        self._sums = sums + [weighted_sum("fp32", each.numel, communicator) for each in self._statistics]

    @property
    def num_fragments(self) -> int:
        return len(self._trained)

    @property
    def num_values(self) -> int:
        return sum(self._sizes)

    @property
    def num_unsent_steps(self) -> int:
        """Steps that some fragment's averages do not include yet: what the loss of a worker would cost."""
        counts = [steps.num_steps for steps in self._steps]
        if self.is_in_flight:
            counts[self._next] += self._taken.num_steps
        return max(counts)

    def add_step(self, weight: float, num_micro_batches: int) -> None:
        step = FragmentSteps(weight, num_micro_batches, 1)
        for steps in self._steps:
            steps.add(step)

    def _follow_memory(self) -> None:
        """Parameters may have other memory since the last average: parameter.data = ..., or vector_to_parameters."""
        addresses = [p.data_ptr() for p in self._parameters]
        if addresses != self._addresses:
            self._addresses = addresses
            parts = parts_of([p.detach() for p in self._parameters], self._num_parts)
            for fragment, part in zip(self._trained, parts, strict=True):
                fragment.use(part)

    @torch.no_grad()
    def start(self, own: WorkerRound) -> None:
        begun_s = self._now_s()
        self._follow_memory()
        self._own = own
        own.round_s, own.sync_s = begun_s - self._round_begun_s - self._sync_s, self._sync_s
        self._round_begun_s = begun_s
        self._taken, self._steps[self._next] = self._steps[self._next], FragmentSteps()
        if not self._sums:
            self._allocate()
        rank = self._communicator.world.rank
        # Scaled by a number that all workers know, so that the sum stays in the range of fp16.
        own.fragment_weight = self._taken.weight / max(self._taken.num_micro_batches, 1)
        seed = derive_seed(self._seed, Purpose.COMPRESSION, self.num_completed, rank)
        weight, (fragment, *statistics) = own.fragment_weight, self._fragments()
        own.weighted_square = weight * fragment.measure()
        fragment.send(self._sums[0], weight, seed, astuple(own))
        for each, total in zip(statistics, self._sums[1:], strict=False):
            each.measure()
            each.send(total, weight, seed)
        self.is_in_flight = True
        self._sync_s = self._now_s() - begun_s

    @torch.no_grad()
    def finish(self, *, has_moved_on: bool) -> tuple[list[WorkerRound], float | None]:
        """Set the fragment to the common values. If the replica took steps since `start`, add the difference instead.

        Returns what the workers report, by rank, and after the last fragment the drift.
        """
        begun_s = self._now_s()
        self._follow_memory()
        pairs = list(zip(self._fragments(), self._sums, strict=False))
        table, *_ = [total.messages() for _, total in pairs]
        # All data has arrived. From here on nothing can fail.
        rounds = [WorkerRound(*row) for row in table]
        weights = [each.fragment_weight for each in rounds]
        squares = [fragment.receive(total, weights) for fragment, total in pairs]
        for fragment, _ in pairs:
            outer = None if fragment in self._statistics else self._outer
            fragment.apply(outer, has_moved_on=has_moved_on)
        self.is_in_flight = False
        total = max(sum(weights), 1e-30)
        self._square_distance += max(0.0, sum(each.weighted_square for each in rounds) / total - squares[0])
        self._square_length += pairs[0][0].square_length
        self.num_completed += 1
        self._next = (self._next + 1) % len(self._trained)
        drift = None
        if self._next == 0:
            drift = math.sqrt(self._square_distance) / max(math.sqrt(self._square_length), 1e-12)
            self._square_distance = self._square_length = 0.0
        self._sync_s += self._now_s() - begun_s
        return rounds, drift

    def drop(self) -> WorkerRound:
        """Give up an average that has failed. Returns this worker's round: its steps are part of the next average."""
        self._steps[self._next].add(self._taken)
        self.is_in_flight = False
        return self._own

    def state_dict(self) -> dict[str, Any]:
        """Equal on all workers after an average of all fragments, when the replica has the common values."""
        return {
            "common": torch.cat([fragment.common.detach() for fragment in (*self._trained, *self._statistics)]),
            "outer": None if self._outer is None else self._outer.state_dict(),
            "num_averages": self.num_completed,
            "next_fragment": self._next,
            "steps": [astuple(steps) for steps in self._steps],
            "squares": (self._square_distance, self._square_length),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Residuals begin with zeros."""
        fragments = (*self._trained, *self._statistics)
        sizes = [fragment.numel for fragment in fragments]
        for fragment, values in zip(fragments, torch.split(state["common"], sizes), strict=True):
            fragment.common.copy_(values)
        self.load_residuals(None)
        self.num_completed = state["num_averages"]
        if len(state["steps"]) != len(self._trained):
            return  # cut into another number of fragments now; the replicas were equal
        if self._outer is not None and state["outer"] is not None:
            self._outer.load_state_dict(state["outer"])
        self._next = state["next_fragment"]
        self._steps = [FragmentSteps(*steps) for steps in state["steps"]]
        self._square_distance, self._square_length = state["squares"]

    def residuals(self) -> torch.Tensor | None:
        """The part of this worker's changes not sent yet; None if its encoding leaves nothing."""
        if all(fragment.residual is None for fragment in self._trained):
            return None
        return torch.cat(
            [
                torch.zeros(each.numel, device=self._device) if each.residual is None else each.residual
                for each in self._trained
            ]
        )

    @torch.no_grad()
    def load_residuals(self, saved: torch.Tensor | None) -> None:
        """What `residuals` returned; None to begin with zeros."""
        parts: Sequence[torch.Tensor | None] = (None,) * len(self._trained)
        if saved is not None:
            parts = torch.split(saved, self._sizes)
        for fragment, part in zip(self._trained, parts, strict=True):
            fragment.residual = None if part is None else part.to(self._device, copy=True)

    def _fragments(self) -> list[Fragment]:
        """What is averaged next: a fragment of the parameters, and with the last one the statistics."""
        return [self._trained[self._next], *(self._statistics if self._next == len(self._trained) - 1 else ())]

    def _now_s(self) -> float:
        if self._device.type == "cuda":  # otherwise work queued before the average would count as averaging
            torch.cuda.synchronize(self._device)
        return perf_counter()
