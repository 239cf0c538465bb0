"""CPU, memory and GPU utilization of a worker and its host.

Read from /proc and, where the package nvidia-ml-py is installed, from the driver. Best effort: a value that cannot be
read is left out.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time

import torch


class SystemSampler:
    """Samples for one worker. whole_host: sample the host too; one worker per host is enough for that."""

    def __init__(self, device: torch.device, *, whole_host: bool) -> None:
        self._device = device
        self._whole_host = whole_host
        self._last = 0.0, 0.0
        self._last_ticks = 0, 0
        self.sample()

    def sample(self) -> dict[str, float]:
        """The values of a `timeline.files.Sample`. CPU utilization is the mean since the previous sample."""
        found = {"cpu": self._cpu()}
        with suppress(OSError, ValueError, LookupError):
            found["memory"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if self._whole_host:
            with suppress(OSError, ValueError, LookupError, ZeroDivisionError):
                found["host_cpu"] = self._host_cpu()
            with suppress(OSError, ValueError, LookupError):
                found["host_memory"] = _host_memory()
        if self._device.type == "cuda":
            try:
                found["gpu"] = float(torch.cuda.utilization(self._device))
                found["gpu_memory"] = float(torch.cuda.device_memory_used(self._device))
            except Exception:  # package, library, permission or device is missing
                found["gpu_memory"] = float(torch.cuda.memory_reserved(self._device))
        return found

    def _cpu(self) -> float:
        (before_s, used_before_s), self._last = self._last, (perf_counter(), process_time())
        return round(100 * (self._last[1] - used_before_s) / max(self._last[0] - before_s, 1e-9), 1)

    def _host_cpu(self) -> float:
        """Without idle and waiting for I/O, in the kernel's ticks since boot."""
        with Path("/proc/stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        (busy, total), self._last_ticks = self._last_ticks, (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        return round(100 * (self._last_ticks[0] - busy) / (self._last_ticks[1] - total), 1)


def _host_memory() -> float:
    """Memory in use that cannot be reclaimed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines[:3]}
    return 1024 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"])
