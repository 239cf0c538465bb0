"""What a completed step tells the loop: losses, weights, times, and what each worker asks of all.

Where workers exchange these numbers is step_numbers.py; here are the interface and the simple kinds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from paceline.core.errors import MisuseError
from paceline.core.timing import NOT_MEASURED, Timing

if TYPE_CHECKING:
    from paceline.sync.step_numbers import StepNumbers

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]


class WorkerMessage(NamedTuple):
    """What a worker tells the others with a step, beside its gradients.

    `wish`: what it asks all to do after this step, 0 for nothing. `digest`: of what must be the same on every worker,
    such as the optimizers' hyper-parameters; below 2**48. `learning_rate`: (rate, group) that it asks all to set, group
    -1 for all groups.
    """

    timing: Timing = NOT_MEASURED
    wish: float = 0.0
    digest: int = 0
    learning_rate: tuple[float, int] | None = None


SILENCE = WorkerMessage()

# The wish of a worker that left its epoch's loop. Nobody grants it: all workers end with an error.
LEFT = 3.0


def check_nobody_left(wishes: Sequence[float]) -> None:
    if LEFT in wishes:
        raise left_error([rank for rank, wish in enumerate(wishes) if wish == LEFT])


def left_error(ranks: Sequence[int]) -> MisuseError:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return MisuseError(
        f"{who} left the loop of an epoch before its end, by `break` or `return`. Several workers must end an epoch "
        "after the same step, and the loop's body runs for other micro-batches on each of them: call "
        "trainer.end_epoch() in a hook of trainer.every (trainer.end() to end the run), or give the number of steps: "
        "trainer.epochs(max_steps=...)"
    )


class Numbers(Protocol):
    """What a completed step tells. On a GPU the numbers may still be on their way; asking for one waits for it."""

    @property
    def has_arrived(self) -> bool: ...

    @property
    def losses(self) -> list[float]:
        """Per micro-batch, as the user reported it; 0 where nothing was reported."""

    @property
    def loss(self) -> float:
        """The weighted mean, added up in the order of the micro-batches; NaN if nothing had weight, or a micro-batch's
        loss was not told. The same on every worker: where steps are not exchanged, what was exchanged last."""

    @property
    def total_weight(self) -> float: ...

    @property
    def timings(self) -> Sequence[Timing]:
        """By rank."""

    @property
    def wishes(self) -> Sequence[float]:
        """What each worker asks all to do after this step, by rank; 0 for nothing."""

    @property
    def digests(self) -> Sequence[int]:
        """By rank; see `WorkerMessage`. Empty where nothing was exchanged."""

    @property
    def learning_rates(self) -> Sequence[tuple[float, int] | None]:
        """What each worker asks all to set, by rank."""

    def non_finite(self) -> tuple[str, float, int] | None:
        """What is inf or NaN, its value and its micro-batch: a loss, or where peaks are known a gradient."""


class Arriving(Protocol):
    """Numbers that are on their way from the device to the host."""

    @property
    def has_arrived(self) -> bool: ...

    def tolist(self) -> list[float]:
        """Waits for them."""


class HostCopy:
    """A few numbers on their way from the device to the host, without making either wait."""

    # Places of copies that nobody reads any more: making a new one takes longer than the copy.
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
            # It may still be on its way: the next one comes after it on the same stream.
            self._kept.append((self._pinned, self._arrival))

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrival.query())

    def tolist(self) -> list[float]:
        """Waits for this copy, and for nothing that was queued on the device after it."""
        self._arrival.synchronize()
        values: list[float] = self._pinned.tolist()
        return values

    def numbers(self) -> Floats:
        """The same as an array of its own."""
        self._arrival.synchronize()
        return self._pinned.numpy().copy()


class OneLoss:
    """The numbers of a world of one with one micro-batch: they need no layout and no exchange."""

    digests: Sequence[int] = ()

    def __init__(self, loss: torch.Tensor | Arriving | None, weight: float, message: WorkerMessage = SILENCE) -> None:
        self.total_weight = weight
        self.weights = [weight]
        self.timings: Sequence[Timing] = (message.timing,)
        self.wishes: Sequence[float] = (message.wish,)
        self.learning_rates: Sequence[tuple[float, int] | None] = (message.learning_rate,)
        self._is_told = loss is not None
        # Without weight the loss is a mean over nothing, 0/0 perhaps.
        if loss is None or not weight:
            self._source: list[float] | Arriving = [0.0]
        elif isinstance(loss, torch.Tensor):
            self._source = [loss.item()] if loss.is_cpu else HostCopy(loss.reshape(1))
        else:
            self._source = loss

    @property
    def has_arrived(self) -> bool:
        return isinstance(self._source, list) or self._source.has_arrived

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
        return self.losses[0] if self.total_weight and self._is_told else math.nan


class RoundMean(NamedTuple):
    """What all workers' steps between two meetings came to: their mean loss, and their weight per step."""

    loss: float = math.nan
    weight: float = 0.0


class LocalNumbers:
    """The numbers of a step that was not exchanged. Of it this worker knows only its own part, from micro-batch
    `first` on; `loss` and `total_weight` are what all workers know, those of the last meeting (`mean`)."""

    digests: Sequence[int] = ()
    learning_rates: Sequence[tuple[float, int] | None] = ()

    def __init__(
        self,
        own: StepNumbers | OneLoss,
        first: int,
        timings: Sequence[Timing],
        wishes: Sequence[float],
        mean: RoundMean,
        *,
        is_loss_known: bool,
    ) -> None:
        self._own = own
        self._first = first
        self._is_loss_known = is_loss_known
        self.timings = timings
        self.wishes = wishes
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
        """This worker's weighted sum of losses, and their weight; NaN if it was not told a loss."""
        weight, loss = self._own.total_weight, self._own.loss
        if not weight:
            return 0.0, 0.0
        if not self._is_loss_known:
            return math.nan, weight
        return (weight * loss, weight) if math.isfinite(loss) else (0.0, 0.0)  # fp16 skips such a step

    def non_finite(self) -> tuple[str, float, int] | None:
        found = self._own.non_finite()
        return None if found is None else (found[0], found[1], self._first + found[2])
