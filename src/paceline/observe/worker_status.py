"""A worker's status file, `ranks/rank-R.json` in the run's folder: where it runs, its memory, its step.

    {"rank": 3, "host": "b", "device": "cuda:1", "device_name": "NVIDIA H200", "pid": 4715, "process_started": 123456,
     "time": 1763296811.5, "step": 1210, "step_at": 1763296811.4, "cpu": 101.5, "memory": 3221225472,
     "memory_limit": 137438953472, "host_cpu": 61.0, "host_memory": 23622320128, "gpu": 97.0,
     "gpu_memory": 62277025792, "gpu_memory_limit": 150323855360, "peak_bytes": 61203283968}

`step_at` is when the step was first seen; times are Unix times. Memory is in bytes, `cpu` in percent of a core, `gpu`
and `host_cpu` in percent; values that cannot be read are left out. The first worker of a host has the host's values.
`peak_bytes` is the most memory that the worker used: of its GPU, or else of its process. A background thread replaces
the file once a second, so a file that is much older belongs to a worker that was suspended or killed.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Self

import torch

from paceline.core.world import World
from paceline.observe.best_effort import BestEffort
from paceline.observe.environment import processor_name
from paceline.observe.run_files import RunFiles, process_started, write_json
from paceline.observe.timeline.recorder import SystemSampler

INTERVAL_S = 1.0


class WorkerStatus:
    """Writes this worker's status from construction to the end of the `with` block. Failures do not end the run.

    After a failure it tries again: without its status, a worker would be taken for a stalled one.

    world, step: the current ones; called in the background thread.
    """

    def __init__(self, files: RunFiles, world: Callable[[], World], step: Callable[[], int]) -> None:
        self._files, self._world, self._step = files, world, step
        self._sampler = SystemSampler(world().device, whole_host=world().local_rank == 0)
        self._fixed = {
            **_hardware(world().device),
            "pid": os.getpid(),
            "process_started": process_started(os.getpid()),
        }
        self._path: Path | None = None
        self._newest: tuple[int, float] | None = None  # a completed step, and when it was first seen
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-status", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        output, is_closing = BestEffort(self._files.ranks, lambda: self, lambda _: None), False
        while not is_closing:
            output.use(WorkerStatus._write)
            is_closing = self._closing.wait(INTERVAL_S)
        output.use(WorkerStatus._write)

    def _write(self) -> None:
        world = self._world()
        if world.is_joining:
            return  # it has no rank yet
        path = self._files.worker(world.rank)
        if self._path is not None and self._path != path:  # other workers left, so the ranks moved up
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._path = path
        now, step = round(time(), 3), self._step()
        if self._newest is None or step != self._newest[0]:
            self._newest = step, now
        own = {"rank": world.rank, "host": world.host, "device": str(world.device), "time": now}
        device, kilobytes = world.device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 1024 * kilobytes
        newest = {"step": step, "step_at": self._newest[1], "peak_bytes": peak_bytes}
        write_json(path, {**own, **newest, **self._fixed, **self._sampler.sample()})


def _hardware(device: torch.device) -> dict[str, Any]:
    host = {"memory_limit": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if device.type != "cuda":
        return {"device_name": processor_name(), **host}
    properties = torch.cuda.get_device_properties(device)
    return {"device_name": properties.name, "gpu_memory_limit": properties.total_memory, **host}
