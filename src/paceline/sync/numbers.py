"""What a completed step tells the loop: losses, weights, times, and what each worker asks of all.

Where workers exchange these numbers is step_numbers.py; here are the interface and the simple kinds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from paceline.core.errors import MisuseError
from paceline.core.timing import NOT_MEASURED, Timing

if TYPE_CHECKING:
    from paceline.sync.step_numbers import StepNumbers

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]


class WorkerMessage(NamedTuple):
    """What a worker sends with a step besides its gradients.

    request: what it asks all workers to do after this step, 0 for nothing. digest: of everything that must be equal on
    all workers, such as hyper-parameters; below 2**48. learning_rate: (rate, group) to be set by all workers, group -1
    for all groups.
    """

    timing: Timing = NOT_MEASURED
    request: float = 0.0
    digest: int = 0
    learning_rate: tuple[float, int] | None = None


NO_MESSAGE = WorkerMessage()

# Sent by a worker that left its epoch's loop: all workers end with an error.
ABANDONED = 4.0


def check_not_abandoned(requests: Sequence[float]) -> None:
    if ABANDONED in requests:
        raise abandoned_error([rank for rank, request in enumerate(requests) if request == ABANDONED])


def abandoned_error(ranks: Sequence[int]) -> MisuseError:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return MisuseError(
        f"{who} left the loop of an epoch before its end, by `break` or `return`. Several workers must end an epoch "
        "after the same step, and the loop's body runs for other micro-batches on each of them: call "
        "trainer.end_epoch() in a hook of trainer.every (trainer.end() to end the run), or give the number of steps: "
        "trainer.epochs(max_steps=...)"
    )


class Numbers(Protocol):
    """The numbers of a completed step. On a GPU they may not have arrived yet: reading one waits for it."""

    @property
    def has_arrived(self) -> bool: ...

    @property
    def is_ordinary(self) -> bool:
        """The numbers are on the host and need no attention: all are finite, workers agree and request nothing.

        Always False on a GPU, where the host does not wait for them.
        """

    @property
    def losses(self) -> list[float]:
        """By micro-batch; 0 if none was reported."""

    @property
    def loss(self) -> float:
        """The weighted mean, summed in the order of the micro-batches, the same on every worker.

        NaN if nothing had weight or a micro-batch's loss is unknown. With averaging: of the last average.
        """

    @property
    def total_weight(self) -> float: ...

    @property
    def timings(self) -> Sequence[Timing]:
        """By rank."""

    @property
    def requests(self) -> Sequence[float]:
        """By rank: what the worker asks all workers to do after this step; 0 for nothing."""

    @property
    def digests(self) -> Sequence[int]:
        """By rank, see `WorkerMessage`. Empty if nothing was exchanged."""

    @property
    def learning_rates(self) -> Sequence[tuple[float, int] | None]:
        """By rank: the learning rate that the worker asks all workers to set."""

    def non_finite(self) -> tuple[str, float, int] | None:
        """The first inf or NaN: "loss" or "gradient", its value and its micro-batch."""


class Arriving(Protocol):
    """Numbers on their way from the device to the host."""

    @property
    def has_arrived(self) -> bool: ...

    def tolist(self) -> list[float]:
        """Waits for them."""


class HostCopy:
    """An asynchronous copy of a few numbers from the device to pinned memory."""

    # Buffers of finished copies: allocating a new one takes longer than the copy.
    _free: ClassVar[dict[Hashable, list[tuple[torch.Tensor, torch.cuda.Event]]]] = {}

    def __init__(self, numbers: torch.Tensor) -> None:
        self._kept = self._free.setdefault((numbers.device, numbers.dtype, numbers.shape), [])
        if self._kept:
            self._pinned, self._arrival = self._kept.pop()
        else:
            self._pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._arrival = torch.cuda.Event()
        self._pinned.copy_(numbers, non_blocking=True)
        self._arrival.record()

    def __del__(self) -> None:
        if hasattr(self, "_arrival"):
            # The copy may still be running: the next one follows on the same stream.
            self._kept.append((self._pinned, self._arrival))

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrival.query())

    def tolist(self) -> list[float]:
        """Waits for this copy only, not for later work of the device."""
        self._arrival.synchronize()
        values: list[float] = self._pinned.tolist()
        return values

    def numbers(self) -> Floats:
        """The same as a new array."""
        self._arrival.synchronize()
        return self._pinned.numpy().copy()


class OneLoss:
    """The numbers of a world of one with one micro-batch, which need no exchange."""

    digests: Sequence[int] = ()

    def __init__(
        self, loss: torch.Tensor | Arriving | None, weight: float, message: WorkerMessage = NO_MESSAGE
    ) -> None:
        self.total_weight = weight
        self._message = message
        self._is_loss_known = loss is not None
        # Without weight the loss is a mean over nothing, possibly 0/0.
        if loss is None or not weight:
            self._source: list[float] | Arriving = [0.0]
        elif isinstance(loss, torch.Tensor):
            self._source = [loss.item()] if loss.is_cpu else HostCopy(loss.reshape(1))
        else:
            self._source = loss
        is_finite = isinstance(self._source, list) and math.isfinite(self._source[0])
        self.is_ordinary = is_finite and not message.request and message.learning_rate is None

    @property
    def has_arrived(self) -> bool:
        return isinstance(self._source, list) or self._source.has_arrived

    @property
    def timings(self) -> Sequence[Timing]:
        return (self._message.timing,)

    @property
    def requests(self) -> Sequence[float]:
        return (self._message.request,)

    @property
    def learning_rates(self) -> Sequence[tuple[float, int] | None]:
        return (self._message.learning_rate,)

    @property
    def losses(self) -> list[float]:
        if not isinstance(self._source, list):
            self._source = self._source.tolist()
        return self._source

    def non_finite(self) -> tuple[str, float, int] | None:
        loss = self.losses[0]
        return None if math.isfinite(loss) else ("loss", loss, 0)

    @property
    def loss(self) -> float:
        return self.losses[0] if self.total_weight and self._is_loss_known else math.nan


@dataclass(frozen=True)
class KnownNumbers:
    """The numbers of a step that another worker completed."""

    losses: list[float]
    loss: float
    total_weight: float
    timings: Sequence[Timing]
    has_arrived: ClassVar[bool] = True
    is_ordinary: ClassVar[bool] = True  # whoever completed the step has acted on them
    requests: ClassVar[Sequence[float]] = ()
    digests: ClassVar[Sequence[int]] = ()
    learning_rates: ClassVar[Sequence[tuple[float, int] | None]] = ()

    @classmethod
    def of(cls, numbers: Numbers) -> KnownNumbers:
        return cls(numbers.losses, numbers.loss, numbers.total_weight, numbers.timings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "loss": self.loss,
            "total_weight": float(self.total_weight),
            "timings": [tuple(map(float, timing)) for timing in self.timings],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KnownNumbers:
        return cls(**{**values, "timings": [Timing(*timing) for timing in values["timings"]]})

    def non_finite(self) -> None:
        return None


class RoundMean(NamedTuple):
    """The mean loss of all workers' steps between two averages, and their weight per step; NaN before the first."""

    loss: float = math.nan
    weight: float = math.nan


class LocalNumbers:
    """The numbers of a step that was not exchanged.

    This worker knows only its own micro-batches, from number `first` on. `loss` and `total_weight` are those of the
    last average (`mean`), which all workers know.
    """

    is_ordinary = False
    digests: Sequence[int] = ()
    learning_rates: Sequence[tuple[float, int] | None] = ()

    def __init__(
        self,
        own: StepNumbers | OneLoss,
        first: int,
        timings: Sequence[Timing],
        requests: Sequence[float],
        mean: RoundMean,
        *,
        is_loss_known: bool,
    ) -> None:
        self._own = own
        self._first = first
        self._is_loss_known = is_loss_known
        self.timings = timings
        self.requests = requests
        self.mean = mean

    @property
    def has_arrived(self) -> bool:
        return self._own.has_arrived

    @property
    def losses(self) -> list[float]:
        return self._own.losses

    @property
    def loss(self) -> float:
        return self.mean.loss

    @property
    def total_weight(self) -> float:
        return self.mean.weight

    @property
    def own_part(self) -> tuple[float, float]:
        """This worker's weighted sum of losses, and their weight; NaN if a loss is unknown."""
        weight, loss = self._own.total_weight, self._own.loss
        if not weight:
            return 0.0, 0.0
        if not self._is_loss_known:
            return math.nan, weight
        return (weight * loss, weight) if math.isfinite(loss) else (0.0, 0.0)  # fp16 skips such a step

    def non_finite(self) -> tuple[str, float, int] | None:
        found = self._own.non_finite()
        return None if found is None else (found[0], found[1], self._first + found[2])
