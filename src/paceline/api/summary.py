"""One line on stderr when a run is set up: how many workers, on which devices."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.world import World

QUIET_VARIABLE = "PACELINE_QUIET"


class WorkerDevice(NamedTuple):
    """The device of a worker: its host, its name there, and a description."""

    host: str
    device: str
    description: str


def is_quiet(quiet: bool) -> bool:
    return quiet or os.environ.get(QUIET_VARIABLE, "") not in ("", "0")


def announce(communicator: Communicator, *, quiet: bool) -> None:
    """Print the line on rank 0. A collective: quiet workers take part too."""
    world = communicator.world
    workers = [WorkerDevice(*json.loads(text)) for text in gather(json.dumps(_device_of(world)), communicator)]
    if world.is_main and not is_quiet(quiet):
        print(f"paceline: {summary(workers)}", file=sys.stderr)


def summary(workers: Sequence[WorkerDevice]) -> str:
    """Workers and their devices, which they may share: "2 workers | NVIDIA H200 (140 GB) x 2 (1 host)"."""
    devices = Counter(worker.description for worker in dict.fromkeys(workers))
    listed = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in devices.items())
    hosts = f" ({_counted(len({worker.host for worker in workers}), 'host')})" if devices.total() > 1 else ""
    return f"{_counted(len(workers), 'worker')} | {listed}{hosts}"


def _device_of(world: World) -> WorkerDevice:
    device = world.device
    if device.type == "cuda":
        memory_gb = torch.cuda.get_device_properties(device).total_memory / 2**30
        return WorkerDevice(world.host, str(device), f"{torch.cuda.get_device_name(device)} ({memory_gb:.0f} GB)")
    if device.type != "cpu":
        return WorkerDevice(world.host, str(device), str(device))
    threads = _counted(torch.get_num_threads(), "thread") + (" each" if world.local_size > 1 else "")
    return WorkerDevice(world.host, str(device), f"CPU ({_counted(len(os.sched_getaffinity(0)), 'core')}, {threads})")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
