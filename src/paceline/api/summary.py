"""Lines on stderr: how many workers on which devices when a run is set up, later how they chose to average."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.events import Event, Events
from paceline.core.notice import notice
from paceline.core.usable_devices import left_out
from paceline.core.world import World, devices, unconnected_gpus

QUIET_VARIABLE = "PACELINE_QUIET"
MEASURED_MB = 4


def announce(communicator: Communicator, *, quiet: bool, is_device_chosen: bool) -> None:
    """Print the line on rank 0. A collective: quiet workers take part too."""
    world = communicator.world
    own = (world.host, str(world.device), _description(world))
    workers = [tuple(json.loads(text)) for text in gather(json.dumps(own), communicator)]
    cost = _cost_without_direct_path(workers, communicator)
    if not world.is_main or _is_quiet(quiet):
        return
    for index, reason in left_out().items() if not is_device_chosen else ():
        notice(f"left out cuda:{index}, which cannot run a kernel: {reason}")
    if world.size == 1 and not is_device_chosen and (count := len(devices())) > 1:
        notice(f"training on 1 of {count} devices; start the script with `paceline run SCRIPT` to use all")
    notice(summary(workers))
    if cost:
        notice(cost)


def announce_choice(communicator: Communicator, events: Events, *, quiet: bool) -> None:
    """Print on rank 0 what strategy="slow link" chooses, with the reason."""

    def report(event: Event) -> None:
        if event.name == "averaging" and communicator.world.is_main:
            notice(event.details["reason"])

    if not _is_quiet(quiet):
        events.listen(report)


def _is_quiet(quiet: bool) -> bool:
    return quiet or os.environ.get(QUIET_VARIABLE, "") not in ("", "0")


def summary(workers: Sequence[tuple[str, str, str]]) -> str:
    """Workers and their devices, which they may share: "2 workers | NVIDIA H200 (140 GB) x 2 (1 host)".

    workers: by rank, the worker's host, the name of its device there, and the device's description.
    """
    devices = Counter(description for _, _, description in dict.fromkeys(workers))
    listed = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in devices.items())
    hosts = f" ({_counted(len({host for host, _, _ in workers}), 'host')})" if devices.total() > 1 else ""
    unlike = " | unlike devices" if len(devices) > 1 else ""
    return f"{_counted(len(workers), 'worker')} | {listed}{hosts}{unlike}"


def _cost_without_direct_path(workers: Sequence[tuple[str, str, str]], communicator: Communicator) -> str:
    """A line about GPUs of one host that exchange through its memory, with what that costs; "" if there are none."""
    gpus = dict.fromkeys((host, device) for host, device, _ in workers if device.startswith("cuda"))
    if len(gpus) == len({host for host, _ in gpus}):
        return ""  # at most one per host
    own = unconnected_gpus(device for host, device in gpus if host == communicator.world.host)
    pairs = {pair: None for text in gather(json.dumps(own), communicator) for pair in json.loads(text)}
    if not pairs:
        return ""
    from paceline.run.probe import all_reduce_s  # rarely needed

    seconds = all_reduce_s(communicator, MEASURED_MB << 20, 2)  # the first one connects
    return (
        f"no direct path between {', '.join(pairs)}: they exchange through the host's memory, "
        f"{1e3 * seconds / MEASURED_MB:.2g} ms per MB of gradients"
    )


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
