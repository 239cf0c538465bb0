"""Metrics of an epoch: mean loss, the user's scalars, each worker's share and speed."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from paceline.comm.messages import gather
from paceline.core.deferred import DeferredReader
from paceline.run.evaluation.evaluate import is_number
from paceline.run.report import ratio
from paceline.run.run import Run
from paceline.run.step.planner import GPU_LAG_STEPS
from paceline.run.step.record import StepRecord


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch of a run.

    epoch: its number, from 0. step: optimizer steps completed in the whole run. loss: the mean over the epoch's
    samples, each before its update; NaN if none had weight. scalars: weighted means of the scalars that train_fn
    returned with the loss. lr: the learning rate of the next step. wall_s: duration in seconds.
    shares: each worker's fraction of the epoch's micro-batches, by rank. samples_per_s: each worker's speed while
    computing; 0.0 until measured.
    """

    epoch: int
    step: int
    loss: float
    scalars: dict[str, float]
    lr: float
    wall_s: float
    shares: tuple[float, ...]
    samples_per_s: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochMetrics:
        """The inverse of `to_dict`, also after JSON has turned tuples into lists."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**fields)


class Tally:
    """Accumulates one worker's epochs, one after the other; `end` combines all workers.

    Per epoch call `begin`, `note` per micro-batch, `add` per completed step, `end`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        # A GPU's numbers are read some steps later, without waiting for the device.
        self._records = DeferredReader(self._read, GPU_LAG_STEPS if run.world.device.type == "cuda" else 0)
        self._micro_batch_s: defaultdict[int, float] = defaultdict(float)  # as last measured, by rank
        self.begin()

    def begin(self) -> None:
        self._start = perf_counter()
        self._records.clear()
        self._noted: list[tuple[dict[str, Any], float]] = []  # in this attempt at the open step
        self._attempt: object = None
        self._exchanged_loss = [0.0, 0.0]  # weighted sum, weight; known to all workers
        self._own_loss = [0.0, 0.0]  # of steps that were not exchanged
        self._scalars: dict[str, list[Any]] = {}  # likewise; the sums may be device tensors
        # By rank: workers may be lost or join.
        self._counts: Counter[int] = Counter()
        self._measured_counts: Counter[int] = Counter()
        self._compute_s: defaultdict[int, float] = defaultdict(float)

    def note(self, scalars: Mapping[str, Any], weight: float) -> None:
        """Add one micro-batch's scalars from train_fn. They count when the step completes."""
        checked = {str(name): _checked(name, value) for name, value in scalars.items()}
        self._forget_other_attempts()
        self._noted.append((checked, weight))

    def add(self, record: StepRecord) -> None:
        self._forget_other_attempts()
        for scalars, weight in self._noted:
            for name, value in scalars.items() if weight else ():
                total = self._scalars.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + value * weight, total[1] + weight
        self._noted = []
        self._records.add(record)

    def _forget_other_attempts(self) -> None:
        """A step may be repeated, for exact sums or after the loss of a worker, and then all of it is noted again."""
        if self._attempt is not (attempt := self._run.loop.open.step):
            self._noted, self._attempt = [], attempt

    def end(self, epoch: int) -> EpochMetrics:
        """Combine all workers. Collective; the result is the same on each."""
        self._records.flush()
        scalars = {name: [float(total), weight] for name, (total, weight) in self._scalars.items()}
        own = json.dumps({"exchanged": self._exchanged_loss, "own": self._own_loss, "scalars": scalars})
        parts = [json.loads(text) for text in self._run.together(lambda: gather(own, self._run.communicator))]
        names = dict.fromkeys(name for part in parts for name in part["scalars"])
        ranks, num_micro_batches = range(len(parts)), self._counts.total()
        return EpochMetrics(
            epoch,
            step=self._run.loop.position.step,
            loss=_mean([parts[0]["exchanged"], *(part["own"] for part in parts)]),
            scalars={name: _mean([part["scalars"].get(name, [0.0, 0.0]) for part in parts]) for name in names},
            lr=self._run.loop.replica.learning_rate,
            wall_s=perf_counter() - self._start,
            shares=tuple(ratio(self._counts[rank], num_micro_batches) for rank in ranks),
            samples_per_s=tuple(self._run.steps.micro_batch * self._speed(rank) for rank in ranks),
        )

    def _speed(self, rank: int) -> float:
        """Micro-batches per second while computing; the last known speed if it had none in this epoch."""
        if self._measured_counts[rank]:
            return self._measured_counts[rank] / self._compute_s[rank]
        return ratio(1, self._micro_batch_s[rank])

    def _read(self, record: StepRecord) -> None:
        total = self._exchanged_loss if record.is_exchanged else self._own_loss
        loss_sum, weight = record.part
        total[0] += loss_sum
        total[1] += weight
        for rank, (count, timing) in enumerate(zip(record.shares, record.timings, strict=True)):
            self._counts[rank] += count
            # Not every step has a measurement: with averaging, workers report when they average.
            self._micro_batch_s[rank] = timing.micro_batch or self._micro_batch_s[rank]
            if self._micro_batch_s[rank]:
                self._measured_counts[rank] += count
                self._compute_s[rank] += count * self._micro_batch_s[rank]


def _checked(name: object, value: Any) -> Any:
    if is_number(value):
        return value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)
    shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(f"train_fn returned {shown} as {name!r}: it must be one number, the mean over the micro-batch")


def _mean(parts: list[list[float]]) -> float:
    weight = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / weight if weight else math.nan
