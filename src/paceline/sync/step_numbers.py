"""The small numbers of a step, which every worker needs besides the gradients.

They are stored at the end of the last gradient bucket, so that a step costs one exchange. Exactly one worker fills each
slot, so the sum over workers gives every worker all numbers unchanged.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from typing import cast

import numpy as np
import torch

from paceline.core.timing import Timing
from paceline.sync.numbers import Floats, HostCopy, WorkerMessage

# Numbers are exchanged as float32 if gradients are: larger ones are split into parts that float32 holds.
_DIGEST_BITS = 24
_RATE_PARTS = 3
# A worker's message: timing, digest in two parts, request, and the learning rate that it asks for (group, parts).
_DIGEST, _REQUEST, _GROUP = 5, 7, 8
_MESSAGE = _GROUP + 1 + _RATE_PARTS
_NO_RATE = [0.0] * (1 + _RATE_PARTS)
_FEW = 512


@dataclass(frozen=True)
class Layout:
    """The slots of the numbers. Losses and peaks are written on the device, all others by the host.

    num_grids: tensors with a grid. is_exact: the largest gradient of each micro-batch is known.
    """

    num_micro_batches: int
    is_exact: bool
    num_grids: int
    num_workers: int
    num_parameters: int
    num_buffers: int

    @cached_property
    def counts(self) -> dict[str, int]:
        m, workers = self.num_micro_batches, self.num_workers
        return {
            "losses": m,
            "largest": m if self.is_exact else 0,  # by micro-batch: the largest magnitude, unless it is finite
            "peaks": workers * self.num_grids,  # by worker and tensor: the largest of the worker's terms
            "weights": m,
            "unreported": 1,  # micro-batches without a known loss: the user called loss.backward()
            "messages": _MESSAGE * workers,
            "used": self.num_parameters,
            "changed_buffers": self.num_buffers,
        }

    @cached_property
    def total(self) -> int:
        return sum(self.counts.values())

    @cached_property
    def parts(self) -> dict[str, slice]:
        """The slots by kind of number."""
        borders = pairwise(accumulate(self.counts.values(), initial=0))
        return {name: slice(start, stop) for name, (start, stop) in zip(self.counts, borders, strict=True)}


def _rate_parts(learning_rate: tuple[float, int]) -> list[float]:
    """The group, counted from 2 (1: all groups), and the rate in parts that float32 holds, whose sum is the rate."""
    rest, group = learning_rate
    parts = [float(group + 2)]
    for _ in range(_RATE_PARTS):
        parts.append(float(np.float32(rest)))
        rest -= parts[-1]
    return parts


class StepNumbersWriter:
    """Writes this worker's numbers. Per step: `clear`, `set_...` and `note_...`, `write`; after the exchange `numbers`.

    On a CPU all numbers are written directly into the exchanged memory. On a GPU losses and peaks are, and `write`
    copies those that the host knows.
    """

    def __init__(self, layout: Layout, space: torch.Tensor, rank: int) -> None:
        self._layout = layout
        self._space = space
        self._on_host = space.numpy() if space.is_cpu else None  # the same memory
        parts = layout.parts
        self._largest = space[parts["largest"]]
        # By tensor with a grid: the largest magnitude of this worker's terms.
        self.peaks = space[parts["peaks"]].view(layout.num_workers, -1)[rank]
        self._written = np.zeros(layout.total) if self._on_host is None else self._on_host
        # Assigning single numbers to a memoryview is five times as fast.
        self._numbers = cast("memoryview[float]", self._written.data)
        self._first_largest, self._first_weight = parts["largest"].start, parts["weights"].start
        self._first_peak = parts["peaks"].start + layout.num_grids * rank
        first = parts["messages"].start + _MESSAGE * rank
        self._own_message = slice(first, first + _MESSAGE)
        self._all_used = np.ones(layout.num_parameters, self._written.dtype).data

    def clear(self) -> None:
        self._written.fill(0.0)
        if self._on_host is None:
            self._space.zero_()

    def set_weight(self, number: int, weight: float) -> None:
        self._numbers[self._first_weight + number] = weight

    def set_loss(self, number: int, loss: torch.Tensor) -> None:
        if self._on_host is None:
            self._space[number].copy_(loss.reshape(()))
        else:
            self._numbers[number] = loss.item()

    def note_peaks(self, numbers: Sequence[int], first: int, peaks: torch.Tensor | list[list[float]]) -> None:
        """The largest magnitudes of some micro-batches' terms (rows), for the tensors from index `first` on."""
        if self._on_host is not None:
            self._note_on_host(numbers, self._first_peak + first, peaks if isinstance(peaks, list) else peaks.tolist())
            return
        assert isinstance(peaks, torch.Tensor)
        own = slice(first, first + peaks.shape[1])
        torch.maximum(self.peaks[own], peaks.amax(0), out=self.peaks[own])
        if numbers[-1] - numbers[0] == len(numbers) - 1:  # nearly always
            largest = self._largest[numbers[0] : numbers[-1] + 1]
            torch.maximum(largest, peaks.amax(1), out=largest)
            return
        for number, magnitude in zip(numbers, peaks.amax(1), strict=True):
            self.note_largest(number, magnitude)

    def _note_on_host(self, numbers: Sequence[int], start: int, rows: list[list[float]]) -> None:
        own = slice(start, start + len(rows[0]))
        rows = [cast("list[float]", self._numbers[own].tolist()), *rows]
        if math.isfinite(sum(map(sum, rows))):
            self._numbers[own] = array("d", map(max, *rows))
            return
        self._written[own] = np.maximum.reduce(rows)  # Python's max may lose a NaN
        for number, row in zip(numbers, rows[1:], strict=True):
            self.note_largest(number, float(np.maximum.reduce(row)))

    def note_largest(self, number: int, magnitude: torch.Tensor | float) -> None:
        """The largest magnitude of a micro-batch's terms. One that is known to be finite need not be noted."""
        if isinstance(magnitude, torch.Tensor):
            largest = self._largest[number]
            torch.maximum(largest, magnitude, out=largest)
        elif magnitude > self._numbers[self._first_largest + number] or math.isnan(magnitude):
            self._numbers[self._first_largest + number] = magnitude

    def write(
        self, message: WorkerMessage, used: Sequence[float], changed: Sequence[float], *, num_unreported: int = 0
    ) -> None:
        """Write the numbers that the host knows.

        used: 1 for parameters with a gradient. changed: flags of the buffers without a rule, see `Buffers`.
        num_unreported: micro-batches without a known loss.
        """
        parts = self._layout.parts
        self._numbers[parts["unreported"].start] = num_unreported
        timing, request, digest, learning_rate = message
        rate = _rate_parts(learning_rate) if learning_rate is not None else _NO_RATE
        low = digest & ((1 << _DIGEST_BITS) - 1)
        self._written[self._own_message] = *timing, digest >> _DIGEST_BITS, low, request, *rate
        if min(used) == 1:
            self._numbers[parts["used"]] = self._all_used
        else:
            self._written[parts["used"]] = used
        if changed:
            self._written[parts["changed_buffers"]] = changed
        if self._on_host is None:
            # A copy from pinned memory is asynchronous.
            values = self._written[self._first_weight :].tolist()  # torch cannot pin memory of an array
            on_way = torch.tensor(values, dtype=self._space.dtype, pin_memory=self._space.is_cuda)
            self._space[self._first_weight :].copy_(on_way, non_blocking=True)

    def numbers(self) -> StepNumbers:
        """All workers' numbers, after the exchange."""
        return StepNumbers(self._layout, self._space)

    def peaks_of_all(self) -> torch.Tensor:
        """By tensor with a grid: the largest term of all workers, on the device, after the exchange."""
        return self._space[self._layout.parts["peaks"]].view(self._layout.num_workers, -1).amax(0)

    def total_weight(self) -> torch.Tensor:
        """The weight of all workers' micro-batches, on the device, after the exchange; 1 if none has weight.

        Then all sums are 0: divided by 0 they would leave NaN between the parameters, for the next step to read.
        """
        return self._space[self._layout.parts["weights"]].sum().clamp(min=1.0)


class StepNumbers:
    """The numbers of one step after the exchange."""

    def __init__(self, layout: Layout, tail: torch.Tensor) -> None:
        self._layout = layout
        self._source: list[float] | Floats | HostCopy
        if not tail.is_cpu:
            self._source = HostCopy(tail)
        else:  # a list is faster for few numbers
            self._source = tail.tolist() if layout.total <= _FEW else tail.numpy().copy()

    @property
    def has_arrived(self) -> bool:
        return not isinstance(self._source, HostCopy) or self._source.has_arrived

    @cached_property
    def is_ordinary(self) -> bool:
        if isinstance(self._source, HostCopy):
            return False
        messages = self._values("messages")
        # What follows the timing is the same on all workers, and nothing follows the digest.
        first = messages[_DIGEST:_MESSAGE]
        for start in range(_MESSAGE, len(messages), _MESSAGE):
            if messages[start + _DIGEST : start + _MESSAGE] != first:
                return False
        has_requests = any(first[_REQUEST - _DIGEST :])
        # Losses and the largest gradients.
        return not has_requests and all(map(math.isfinite, self._source[: self._layout.parts["peaks"].start]))

    def _values(self, name: str) -> list[float]:
        source = self._source
        if isinstance(source, list):
            return source[self._layout.parts[name]]
        values: list[float] = self._part(name).tolist()
        return values

    def _part(self, name: str) -> Floats:
        if isinstance(self._source, HostCopy):
            self._source = self._source.numbers()
        return np.asarray(self._source[self._layout.parts[name]])

    @property
    def losses(self) -> list[float]:
        return self._values("losses")

    @cached_property
    def weights(self) -> list[float]:
        return self._values("weights")

    @cached_property
    def timings(self) -> Sequence[Timing]:
        values = self._values("messages")
        first, second, third, fourth = values[::_MESSAGE], values[1::_MESSAGE], values[2::_MESSAGE], values[3::_MESSAGE]
        return list(map(Timing, first, second, third, fourth, values[4::_MESSAGE]))

    @property
    def requests(self) -> Sequence[float]:
        return self._values("messages")[_REQUEST::_MESSAGE]

    @property
    def digests(self) -> Sequence[int]:
        values = self._values("messages")
        parts = zip(values[_DIGEST::_MESSAGE], values[_DIGEST + 1 :: _MESSAGE], strict=True)
        return [(int(high) << _DIGEST_BITS) | int(low) for high, low in parts]

    @property
    def learning_rates(self) -> Sequence[tuple[float, int] | None]:
        values = self._values("messages")
        rows = (values[start : start + 1 + _RATE_PARTS] for start in range(_GROUP, len(values), _MESSAGE))
        return [(sum(parts), int(group) - 2) if group else None for group, *parts in rows]

    @property
    def used(self) -> list[float]:
        """By parameter: the number of workers that have a gradient for it."""
        return self._values("used")

    @property
    def changed_buffers(self) -> list[float]:
        return self._values("changed_buffers")

    @property
    def peaks(self) -> list[float]:
        """By tensor with a grid: the largest magnitude of any micro-batch's weighted term; NaN if there is a NaN."""
        if isinstance(self._source, list) and self.is_ordinary:  # all are finite
            values, count = self._values("peaks"), self._layout.num_grids
            rows = [values[start : start + count] for start in range(0, len(values), count)]
            return rows[0] if len(rows) == 1 else list(map(max, *rows))
        peaks: list[float] = np.maximum.reduce(self._part("peaks").reshape(self._layout.num_workers, -1)).tolist()
        return peaks

    def non_finite(self) -> tuple[str, float, int] | None:
        for what, part in (("loss", "losses"), ("gradient", "largest")):
            values = self._values(part)
            if not all(map(math.isfinite, values)):
                number = next(i for i, value in enumerate(values) if not math.isfinite(value))
                return what, values[number], number
        return None

    @property
    def total_weight(self) -> float:
        return sum(self.weights)

    @property
    def loss(self) -> float:
        weights = self.weights
        total = sum(weights)
        if not total or self._values("unreported")[0]:
            return math.nan
        return float(sum(map(mul, weights, self.losses)) / total)
