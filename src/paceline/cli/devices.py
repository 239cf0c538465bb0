"""`paceline devices`: what a run would use, how fast each is, and how fast they reach each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch

from paceline.cli.commands import add_command, add_json_option, columns, reporting, shortened, size
from paceline.comm.shared_memory.communicator import missing_shared_memory
from paceline.core.world import World, devices
from paceline.observe.environment import describe_environment
from paceline.observe.formats import rate

# How long each figure is measured: four of them make about a second per device.
MEASURED_S = 0.2
# Large enough to fill a device, small enough for a core.
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
TRANSFER_BYTES = 256 << 20
NAME_WIDTH = 30

_EXAMPLE = """\
Every device gets a worker. Speeds are measured, in about a second per device:
matrix products in float32 and bfloat16, and copies in its own memory; copies
from and to the host; and copies between devices. float32 is measured as torch
is set, which is without TF32 unless you allow it.

example:
  paceline devices
  paceline devices --no-speed --json
"""


@dataclass(frozen=True)
class Speed:
    """Measured. `host_gb_per_s`: from pinned memory on the host to the device; None for the CPU itself."""

    fp32_gflop_per_s: float
    bf16_gflop_per_s: float
    memory_gb_per_s: float
    host_gb_per_s: float | None


@dataclass(frozen=True)
class Device:
    """`speed` is None if it was not measured, for want of memory if `is_full`."""

    device: str
    name: str
    memory_bytes: int | None
    speed: Speed | None = None
    is_full: bool = False


@dataclass(frozen=True)
class Link:
    """From one device to another. `is_direct`: without passing through the host's memory."""

    source: str
    target: str
    is_direct: bool
    gb_per_s: float | None


@dataclass(frozen=True)
class Host:
    """`no_shared_memory`: why CPU workers cannot exchange through shared memory; None if they can."""

    name: str
    processor: str
    cores: int
    threads: int
    memory_bytes: int | None
    no_shared_memory: str | None


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "devices", "show which devices a run would use, and how fast they are", _EXAMPLE)
    add_json_option(parser)
    parser.add_argument("--no-speed", "--quick", action="store_true", help="measure nothing, only list what there is")
    parser.set_defaults(run=reporting("devices", _devices))


def _devices(options: argparse.Namespace) -> int:
    is_measured = not options.no_speed
    host = find_host()
    found = [find_device(device, host, is_measured=is_measured) for device in devices()]
    links = find_links(devices(), is_measured=is_measured)
    if options.json:
        document = {
            "host": asdict(host),
            "devices": [asdict(device) for device in found],
            "links": [asdict(link) for link in links],
        }
        print(json.dumps(document, indent=2))
    else:
        print(_text(host, found, links))
    return 0


def find_host() -> Host:
    host = describe_environment()["host"]
    two_workers = World(rank=0, size=2, local_rank=0, local_size=2)
    return Host(
        name=host["name"],
        processor=host["processor"],
        cores=host["cores"],
        threads=torch.get_num_threads(),
        memory_bytes=host["memory_bytes"],
        no_shared_memory=missing_shared_memory(two_workers),
    )


def find_device(device: torch.device, host: Host, *, is_measured: bool) -> Device:
    found = Device(str(device), host.processor, host.memory_bytes)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = Device(str(device), properties.name, properties.total_memory)
    try:
        return replace(found, speed=_measure(device) if is_measured else None)
    except torch.OutOfMemoryError:
        return replace(found, is_full=True)


def find_links(found: list[torch.device], *, is_measured: bool) -> list[Link]:
    """Between every two accelerators, in both directions."""
    pairs = [(source, target) for source in found for target in found if source != target and source.type == "cuda"]
    return [
        Link(
            str(source),
            str(target),
            is_direct=torch.cuda.can_device_access_peer(source, target),
            gb_per_s=_copy_speed(source, target) if is_measured else None,
        )
        for source, target in pairs
    ]


# Measuring


def _measure(device: torch.device) -> Speed:
    is_gpu = device.type == "cuda"
    memory = torch.empty(COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device).fill_(1)
    copy = torch.empty_like(memory)
    seconds = _seconds(lambda: copy.copy_(memory), device)
    return Speed(
        fp32_gflop_per_s=_product_speed(device, torch.float32),
        bf16_gflop_per_s=_product_speed(device, torch.bfloat16),
        memory_gb_per_s=2 * memory.nbytes / seconds / 1e9,  # read and written
        host_gb_per_s=_copy_speed(torch.device("cpu"), device) if is_gpu else None,
    )


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX_SIZE[device.type]
    a = torch.rand(size, size, device=device).to(dtype)
    b = torch.rand(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device) / 1e9


def _copy_speed(source: torch.device, target: torch.device) -> float:
    data = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, device=source)
    if source.type == "cpu":
        data = data.pin_memory()
    copy = torch.empty_like(data, device=target)
    return data.nbytes / _seconds(lambda: copy.copy_(data, non_blocking=True), target) / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the best of several, since others may use the machine too."""
    best_s = _timed(work, device)  # the first one also warms up
    deadline_s = perf_counter() + MEASURED_S
    while perf_counter() < deadline_s:
        best_s = min(best_s, _timed(work, device))
    return best_s


def _timed(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start_s = perf_counter()
    work()
    _wait(device)
    return perf_counter() - start_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# In words


def _text(host: Host, found: list[Device], links: list[Link]) -> str:
    full = [device.device for device in found if device.is_full]
    parts = [columns(_host_rows(host)), columns(_device_rows(found), numbers=range(2, 7))]
    if links:
        parts.append(columns(_link_rows(links), numbers=(3,)))
    if full:
        parts.append(f"not measured, since their memory is in use: {', '.join(full)}")
    many = "s" if len(found) > 1 else ""
    parts.append(f"a run uses {len(found)} worker{many}, unless told otherwise by --workers or -d")
    return "\n\n".join(parts)


def _host_rows(host: Host) -> list[tuple[str, str]]:
    return [
        ("host", host.name),
        ("processor", f"{host.processor}, {host.cores} cores"),
        ("threads", f"{host.threads} in a process of its own; workers divide the cores"),
        ("memory", "unknown" if host.memory_bytes is None else size(host.memory_bytes)),
        ("CPU workers", f"exchange through {_exchange(host)}"),
    ]


def _exchange(host: Host) -> str:
    return "shared memory" if host.no_shared_memory is None else f"Gloo: {host.no_shared_memory}"


def _device_rows(found: list[Device]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("device", "name", "memory", "fp32", "bf16", "copy", "from host"),
        ("", "", "", "FLOP/s", "FLOP/s", "GB/s", "GB/s"),
    ]
    for device in found:
        memory = "-" if device.memory_bytes is None else size(device.memory_bytes)
        rows.append((device.device, shortened(device.name, NAME_WIDTH), memory, *_speed_cells(device.speed)))
    return rows


def _speed_cells(speed: Speed | None) -> tuple[str, str, str, str]:
    if speed is None:
        return ("-", "-", "-", "-")
    from_host = "-" if speed.host_gb_per_s is None else rate(speed.host_gb_per_s)
    return _flops(speed.fp32_gflop_per_s), _flops(speed.bf16_gflop_per_s), rate(speed.memory_gb_per_s), from_host


def _flops(gflop_per_s: float) -> str:
    """ "52.1T" """
    return f"{rate(gflop_per_s / 1e3)}T" if gflop_per_s >= 1e3 else f"{rate(gflop_per_s)}G"


def _link_rows(links: list[Link]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("from", "to", "way", "GB/s")]
    for link in links:
        way = "direct" if link.is_direct else "through the host"
        rows.append((link.source, link.target, way, "-" if link.gb_per_s is None else rate(link.gb_per_s)))
    return rows
