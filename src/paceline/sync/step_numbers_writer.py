"""The end of the exchanged memory, where a worker writes its part of a step's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from paceline.sync.step_numbers import Layout, StepNumbers, WorkerMessage, digest_parts, rate_parts


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
        parts = layout.parts
        self._largest = space[parts["largest"]]
        # By tensor with a grid: the largest magnitude of this worker's terms.
        self.peaks = space[parts["peaks"]].view(layout.num_workers, -1)[rank]
        if self._on_host is not None:
            self._host_peaks, self._host_largest = self.peaks.numpy(), self._largest.numpy()
        self._written = np.zeros(layout.total) if self._on_host is None else self._on_host
        # A view takes single numbers five times as fast as the array does.
        self._numbers = cast("memoryview[float]", self._written.data)
        self._first_weight = parts["weights"].start
        self._all_used = np.ones(layout.num_parameters, self._written.dtype).data

    @property
    def device(self) -> torch.device:
        return self._space.device

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

    def note_peaks(self, number: int, first: int, peaks: torch.Tensor) -> None:
        """The largest magnitudes that a micro-batch adds to the sums of tensors from number `first` on."""
        if self._on_host is not None:
            own, added = self._host_peaks[first : first + len(peaks)], peaks.numpy()
            np.maximum(own, added, out=own)
            self._host_largest[number] = np.maximum(self._host_largest[number], added.max())
            return
        own_on_device = self.peaks[first : first + len(peaks)]
        torch.maximum(own_on_device, peaks, out=own_on_device)
        self.note_largest(number, peaks.amax())

    def note_largest(self, number: int, magnitude: torch.Tensor) -> None:
        """The largest magnitude that a micro-batch adds to any sum."""
        largest = self._largest[number]
        torch.maximum(largest, magnitude, out=largest)

    def write(
        self, message: WorkerMessage, used: Sequence[float], changed: Sequence[bool], *, num_untold: int = 0
    ) -> None:
        """What the host knows at the end. `used`: 1 for parameters with a gradient; `changed`: the buffers without a
        rule that forward changed; `num_untold`: micro-batches whose loss nobody told."""
        parts = self._layout.parts
        self._numbers[parts["untold"].start] = num_untold
        self._put(parts["timings"], message.timing)
        self._put(parts["wishes"], (message.wish,))
        self._put(parts["digests"], digest_parts(message.digest))
        if message.learning_rate is not None:
            self._put(parts["learning_rates"], rate_parts(message.learning_rate))
        if min(used) == 1:
            self._numbers[parts["used"]] = self._all_used
        else:
            self._written[parts["used"]] = used
        if changed:
            self._written[parts["changed_buffers"]] = changed
        if self._on_host is None:
            # From pinned memory a GPU takes them when it gets there; anything else the host would wait for.
            start = self._layout.num_device
            values = self._written[start:].tolist()  # torch pins nothing that it is given as an array
            on_way = torch.tensor(values, dtype=self._space.dtype, pin_memory=self._space.is_cuda)
            self._space[start:].copy_(on_way, non_blocking=True)

    def numbers(self) -> StepNumbers:
        """All workers' numbers, when the exchange is over."""
        return StepNumbers(self._layout, self._space)

    def peaks_of_all(self) -> torch.Tensor:
        """By tensor with a grid: the largest of all workers' terms, on the device, when the exchange is over."""
        return self._space[self._layout.parts["peaks"]].view(self._layout.num_workers, -1).amax(0)

    def total_weight(self) -> torch.Tensor:
        """Of all workers' micro-batches, on the device, when the exchange is over."""
        return self._space[self._layout.parts["weights"]].sum()

    def _put(self, part: slice, values: Sequence[float]) -> None:
        """This worker's numbers, where each worker has as many."""
        for place, value in enumerate(values, part.start + self._rank * len(values)):
            self._numbers[place] = value
