"""Measures the time of a step and the bandwidth of the link once, so that the log can say what averaging costs."""

from __future__ import annotations

from time import perf_counter

import torch

from paceline.comm.base import Communicator
from paceline.plan.slow_link import STEPS_IN_FLIGHT, LinkUse, link_use

# Longer than a link's burst, which says nothing about its bandwidth.
PROBE_BYTES = 512 << 10
# The first step allocates. After the last one the first average is due.
FIRST_STEP, LAST_STEP = 1, STEPS_IN_FLIGHT


class LinkMeasurement:
    """Counts steps. After the last one all workers call `measure` together and get the same result."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_done = False
        self.restart()

    def restart(self) -> None:
        """Count again: a worker that begins here has no time of earlier steps. Called on all workers."""
        self._num_steps = 0

    @property
    def is_due(self) -> bool:
        return self._num_steps >= LAST_STEP and not self.is_done

    def add_step(self) -> None:
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._begun_s = self._now_s()

    def measure(self, num_values: int, communicator: Communicator) -> LinkUse:
        world, steps_s = communicator.world, self._now_s() - self._begun_s
        rows = [communicator.empty(PROBE_BYTES, torch.uint8, self._device).zero_() for _ in range(world.size)]
        times = torch.zeros(world.size, 2, dtype=torch.float64, device=self._device)
        communicator.all_reduce(times).wait()  # a barrier
        begun_s = self._now_s()
        for pending in [communicator.broadcast(row, rank) for rank, row in enumerate(rows)]:
            pending.wait()
        link_s = self._now_s() - begun_s
        times.zero_()
        times[world.rank] = torch.tensor([steps_s / (self._num_steps - FIRST_STEP), link_s], dtype=torch.float64)
        communicator.all_reduce(times).wait()
        step_s, link_s = times.amax(dim=0).tolist()
        bytes_per_s = max(world.size - 1, 1) * PROBE_BYTES / max(link_s, 1e-9)
        self.is_done = True
        return link_use(num_values, world.size, bytes_per_s, max(step_s, 1e-9))

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()
