"""What an epoch comes to: its mean loss, the user's own numbers, and each worker's part in it."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Number
from time import perf_counter
from typing import Any

import torch

from paceline.comm.messages import gather
from paceline.run.run import Run
from paceline.run.step.loop import StepRecord
from paceline.run.step.planner import GPU_LAG_STEPS


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch of a run.

    epoch: its number, from 0. step: optimizer steps done in the whole run. loss: the mean over the epoch's samples, as
    each was before its update; NaN if none had weight. scalars: means of what train_fn returned beside the loss,
    weighted like it. lr: the rate for the next step. wall_s: seconds it took.
    shares: each worker's part of the epoch's micro-batches, by rank. samples_per_s: its speed while it computed; 0.0
    until it was measured once.
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
        """What `to_dict` gave, also after a way through JSON."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**fields)


class Tally:
    """Adds up epochs on one worker, one after the other; `end` puts all workers' parts together.

    Per epoch: `begin`; per micro-batch `note` its scalars; per completed step `add` its record; `end`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._world = run.communicator.world
        self._lag_steps = GPU_LAG_STEPS if self._world.device.type == "cuda" else 0
        self._seconds = [0.0] * self._world.size  # per micro-batch, as last measured
        self.begin()

    def begin(self) -> None:
        size = self._world.size
        self._begun = perf_counter()
        self._noted: list[tuple[dict[str, Any], float]] = []
        self._unread: deque[StepRecord] = deque()
        self._loss = [0.0, 0.0]  # weighted sum, and weight
        self._scalars: dict[str, list[Any]] = {}  # likewise; the sums may be on the device
        self._counts = [0] * size
        self._measured_counts = [0] * size
        self._compute_s = [0.0] * size

    def note(self, scalars: Mapping[str, Any], weight: float) -> None:
        """What train_fn said about one micro-batch. It counts when its step is completed."""
        checked = {str(name): _checked(name, value) for name, value in scalars.items()}
        self._noted.append((checked, weight))

    def add(self, record: StepRecord) -> None:
        # A step that exact mode repeated was noted once more each time: only the last time counts.
        own_micro_batches = record.shares[self._world.rank]
        for scalars, weight in self._noted[-own_micro_batches:] if own_micro_batches else ():
            for name, value in scalars.items() if weight else ():
                total = self._scalars.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + value * weight, total[1] + weight
        self._noted = []
        # Its numbers may still be on their way from the device: nobody should wait for them.
        self._unread.append(record)
        while len(self._unread) > self._lag_steps:
            self._take(self._unread.popleft())

    def end(self, epoch: int) -> EpochMetrics:
        """All workers together; the same result on each."""
        while self._unread:
            self._take(self._unread.popleft())
        loss = self._loss
        scalars = {name: [float(total), weight] for name, (total, weight) in self._scalars.items()}
        parts = [
            json.loads(text) for text in gather(json.dumps({"loss": loss, "scalars": scalars}), self._run.communicator)
        ]
        names = dict.fromkeys(name for part in parts for name in part["scalars"])
        return EpochMetrics(
            epoch,
            step=self._run.loop.position.step,
            loss=_mean([part["loss"] for part in parts]),
            scalars={name: _mean([part["scalars"].get(name, [0.0, 0.0]) for part in parts]) for name in names},
            lr=self._run.loop.replica.learning_rate,
            wall_s=perf_counter() - self._begun,
            shares=tuple(_ratio(count, sum(self._counts)) for count in self._counts),
            samples_per_s=tuple(self._run.steps.micro_batch * self._speed(rank) for rank in range(len(self._counts))),
        )

    def _speed(self, rank: int) -> float:
        """Micro-batches per second while it computed; the last known if it had none in this epoch."""
        if self._measured_counts[rank]:
            return self._measured_counts[rank] / self._compute_s[rank]
        return _ratio(1, self._seconds[rank])

    def _take(self, record: StepRecord) -> None:
        loss_sum, weight = record.part_of(self._world.rank)
        self._loss[0] += loss_sum
        self._loss[1] += weight
        for rank, (count, timing) in enumerate(zip(record.shares, record.timings, strict=True)):
            self._counts[rank] += count
            # Not every step brings a measurement: replicas that are averaged tell when they meet.
            self._seconds[rank] = timing.micro_batch or self._seconds[rank]
            if self._seconds[rank]:
                self._measured_counts[rank] += count
                self._compute_s[rank] += count * self._seconds[rank]


def _checked(name: object, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().to(torch.float64).reshape(())
    if isinstance(value, Number):
        return float(value)  # type: ignore[arg-type]
    shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(f"train_fn returned {shown} as {name!r}: it must be one number, the mean over the micro-batch")


def _mean(parts: list[list[float]]) -> float:
    weight = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / weight if weight else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
