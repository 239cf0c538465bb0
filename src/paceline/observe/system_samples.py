"""CPU, memory and GPU utilization of a worker and its host.

Read from /proc and, where the package nvidia-ml-py is installed, from the driver. Best effort: a value that cannot be
read is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

GpuReading = tuple[float | None, float | None]


class SystemSampler:
    """Samples for one worker. whole_host: sample the host too; one worker per host is enough for that."""

    def __init__(self, device: torch.device, *, whole_host: bool) -> None:
        self._whole_host = whole_host
        self._read_gpu = _gpu_reader(device)
        self._last = perf_counter(), process_time()
        self._last_host = _host_ticks() if whole_host else None

    def sample(self) -> list[float | None]:
        """A value for each of `SAMPLED`. CPU utilization is the mean since the previous sample."""
        host_cpu = self._host_cpu() if self._whole_host else None
        host_memory = _host_memory() if self._whole_host else None
        gpu, gpu_memory = self._read_gpu()
        return [self._cpu(), _process_memory(), host_cpu, host_memory, gpu, gpu_memory]

    def _cpu(self) -> float:
        (before_s, used_before_s), self._last = self._last, (perf_counter(), process_time())
        return round(100 * (self._last[1] - used_before_s) / max(self._last[0] - before_s, 1e-9), 1)

    def _host_cpu(self) -> float | None:
        before, self._last_host = self._last_host, _host_ticks()
        if before is None or self._last_host is None:
            return None
        busy, total = (now - then for now, then in zip(self._last_host, before, strict=True))
        return round(100 * busy / total, 1) if total > 0 else None


def _process_memory() -> float | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _host_ticks() -> tuple[int, int] | None:
    """The kernel's busy ticks and all ticks since boot."""
    try:
        with Path("/proc/stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle and waiting for I/O
    except (OSError, ValueError, IndexError):
        return None


def _host_memory() -> float | None:
    """Memory in use that cannot be reclaimed."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines[:3]}
        return 1024 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"])
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _gpu_reader(device: torch.device) -> Callable[[], GpuReading]:
    if device.type != "cuda":
        return lambda: (None, None)
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # package, library, permission or device is missing
        return lambda: (None, float(torch.cuda.memory_reserved(device)))
    return lambda: _driver_reading(pynvml, handle)


def _driver_reading(pynvml: Any, handle: Any) -> GpuReading:
    try:
        utilization = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return utilization, float(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None, None
