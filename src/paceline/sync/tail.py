"""The end of the exchanged memory, where a worker writes its part of a step's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from paceline.core.timing import Timing
from paceline.sync.buckets import largest_magnitude, largest_on_host
from paceline.sync.numbers import Layout, StepNumbers


class Tail:
    """Per step: `clear`, what the micro-batches bring, `write` before the exchange; `numbers` after it.

    On a CPU everything is written into the exchanged memory itself. On a GPU losses and peaks are: the device has them.
    What the host knows is copied there by `write`.
    """

    def __init__(self, layout: Layout, space: torch.Tensor, rank: int) -> None:
        self._layout = layout
        self._space = space
        self._rank = rank
        self._on_host = space.numpy() if space.is_cpu else None  # the same memory
        m = layout.num_micro_batches
        self.peaks = space[m : layout.num_device].split(m)  # by grid
        self._written = np.zeros(layout.total) if self._on_host is None else self._on_host
        # A view takes single numbers five times as fast as the array does.
        self._numbers = cast("memoryview[float]", self._written.data)
        self._all_used = np.ones(layout.num_parameters, self._written.dtype).data

    @property
    def device(self) -> torch.device:
        return self._space.device

    def clear(self) -> None:
        self._written.fill(0.0)
        if self._on_host is None:
            self._space.zero_()

    def set_weight(self, number: int, weight: float) -> None:
        self._numbers[self._layout.parts[2].start + number] = weight

    def set_loss(self, number: int, loss: torch.Tensor) -> None:
        if self._on_host is None:
            self._space[number].copy_(loss.reshape(()))
        else:
            self._numbers[number] = loss.item()

    def note_peak(self, grid: int, number: int, gradient: torch.Tensor, *, is_again: bool) -> None:
        """The largest magnitude that a micro-batch adds to a grid's sums. `is_again`: to one that it added to before,
        so that it may add as much as both."""
        if self._on_host is not None:
            self._note_peak_on_host(grid, number, largest_on_host(gradient), is_again=is_again)
            return
        peak, largest = self.peaks[grid][number], largest_magnitude(gradient)
        if is_again:
            peak.add_(largest)
        else:
            torch.maximum(peak, largest, out=peak)

    def write(self, timing: Timing, wish: float, used: Sequence[bool], changed: Sequence[bool], *, parts: bool) -> None:
        """What the host knows at the end. `used`: the parameters with a gradient; `changed`: the buffers without a rule
        that forward changed; `parts`: some gradient came in several."""
        numbers, rank = self._numbers, self._rank
        _, _, _, timings, wishes, of_parameters, of_buffers, in_parts = self._layout.parts
        for place, value in enumerate(timing, timings.start + rank * len(timing)):
            numbers[place] = value
        numbers[wishes.start + rank] = wish
        if all(used):
            numbers[of_parameters] = self._all_used
        else:
            self._written[of_parameters] = used
        if changed:
            self._written[of_buffers] = changed
        numbers[in_parts.start] = parts
        if self._on_host is None:
            # From pinned memory a GPU takes them when it gets there; anything else the host would wait for.
            start = self._layout.num_device
            values = self._written[start:].tolist()  # torch pins nothing that it is given as an array
            on_way = torch.tensor(values, dtype=self._space.dtype, pin_memory=self._space.is_cuda)
            self._space[start:].copy_(on_way, non_blocking=True)

    def numbers(self) -> StepNumbers:
        """All workers' numbers, when the exchange is over."""
        return StepNumbers(self._layout, self._space)

    def total_weight(self) -> torch.Tensor:
        """Of all workers' micro-batches, on the device, when the exchange is over."""
        return self._space[self._layout.parts[2]].sum()

    def _note_peak_on_host(self, grid: int, number: int, largest: float, *, is_again: bool) -> None:
        place = (1 + grid) * self._layout.num_micro_batches + number
        peak = self._numbers[place]
        if is_again:
            self._numbers[place] = peak + largest
        elif not largest <= peak and not math.isnan(peak):  # a NaN is the largest of all
            self._numbers[place] = largest
