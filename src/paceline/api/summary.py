"""One line on stderr when a run is set up: how many workers, on which devices."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.world import World, device_count

QUIET_VARIABLE = "PACELINE_QUIET"


def announce(communicator: Communicator, *, quiet: bool, is_device_chosen: bool) -> None:
    """Print the line on rank 0. A collective: quiet workers take part too."""
    world = communicator.world
    own = (world.host, str(world.device), _description(world))
    workers = [tuple(json.loads(text)) for text in gather(json.dumps(own), communicator)]
    if not world.is_main or quiet or os.environ.get(QUIET_VARIABLE, "") not in ("", "0"):
        return
    if world.size == 1 and not is_device_chosen and (count := device_count()) > 1:
        print(
            f"paceline: training on 1 of {count} devices; start the script with `paceline run SCRIPT` to use all",
            file=sys.stderr,
        )
    print(f"paceline: {summary(workers)}", file=sys.stderr)


def summary(workers: Sequence[tuple[str, str, str]]) -> str:
    """Workers and their devices, which they may share: "2 workers | NVIDIA H200 (140 GB) x 2 (1 host)".

    workers: by rank, the worker's host, the name of its device there, and the device's description.
    """
    devices = Counter(description for _, _, description in dict.fromkeys(workers))
    listed = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in devices.items())
    hosts = f" ({_counted(len({host for host, _, _ in workers}), 'host')})" if devices.total() > 1 else ""
    return f"{_counted(len(workers), 'worker')} | {listed}{hosts}"


def _description(world: World) -> str:
    device = world.device
    if device.type == "cuda":
        memory_gb = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)} ({memory_gb:.0f} GB)"
    if device.type != "cpu":
        return str(device)
    threads = _counted(torch.get_num_threads(), "thread") + (" each" if world.local_size > 1 else "")
    return f"CPU ({_counted(len(os.sched_getaffinity(0)), 'core')}, {threads})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
