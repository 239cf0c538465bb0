"""`paceline devices`: the devices a run would use, their measured speed, and the bandwidth between them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import permutations
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.cli import commands as cli
from paceline.observe.formats import rate, size

if TYPE_CHECKING:  # imported by the functions below: the help text needs no torch
    import torch

# At least this long per figure; a GPU's take about twice as long.
MEASURED_S = 0.2
# Large enough to saturate a GPU, small enough for one CPU core.
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
TRANSFER_BYTES = 256 << 20
MAX_NAME_LENGTH = 30

_NOTE = """\
Every device gets one worker. The measurements take one to two seconds per
device: matrix products in float32 and bfloat16, copies within the device's
memory, from the host, and between devices. float32 products use TF32 only if
torch is configured to.
"""

Document = dict[str, Any]


def add_parser(commands: Any) -> None:
    summary = "show which devices a run would use, and how fast they are"
    parser = cli.add_command(commands, "devices", summary, _NOTE, examples=("", "--no-speed --json"), run=_devices)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-speed", "--quick", action="store_true", help="list the devices without measuring them")


def _devices(options: argparse.Namespace) -> None:
    import torch

    from paceline.comm.shared_memory.communicator import missing_shared_memory
    from paceline.core.world import World, devices
    from paceline.observe.environment import describe_environment

    host, found = describe_environment()["host"] | {"threads": torch.get_num_threads()}, devices()
    # Why CPU workers cannot use shared memory; None if they can.
    host["no_shared_memory"] = missing_shared_memory(World(rank=0, size=2, local_rank=0, local_size=2))
    # Between every two GPUs, in both directions. `is_direct`: without a copy in the host's memory.
    links = [
        {
            "source": str(source),
            "target": str(target),
            "is_direct": torch.cuda.can_device_access_peer(source, target),
            "gb_per_s": None if options.no_speed else _copy_speed(source, target),
        }
        for source, target in permutations([device for device in found if device.type == "cuda"], 2)
    ]
    described = [_describe(device, host, is_measured=not options.no_speed) for device in found]
    document = {"host": host, "devices": described, "links": links}
    cli.print_json(document) if options.json else _print(document)


def _describe(device: torch.device, host: Document, *, is_measured: bool) -> Document:
    """`is_full`: too little free memory to measure."""
    import torch

    name, memory_bytes, speed, is_full = host["processor"], host["memory_bytes"], None, False
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
    try:
        speed = _measure(device) if is_measured else None
    except torch.OutOfMemoryError:
        is_full = True
    return {"device": str(device), "name": name, "memory_bytes": memory_bytes, "speed": speed, "is_full": is_full}


def _measure(device: torch.device) -> Document:
    import torch

    memory = torch.empty(COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device).fill_(1)
    copy = torch.empty_like(memory)
    copy_s = _best_s(lambda: copy.copy_(memory), device)
    return {
        "fp32_gflop_per_s": _product_speed(device, torch.float32),
        "bf16_gflop_per_s": _product_speed(device, torch.bfloat16),
        "memory_gb_per_s": 2 * memory.nbytes / copy_s / 1e9,  # one read, one write
        "host_gb_per_s": _copy_speed(torch.device("cpu"), device) if device.type == "cuda" else None,
    }


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    size = MATRIX_SIZE[device.type]
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best_s(lambda: torch.mm(a, b, out=out), device) / 1e9


def _copy_speed(source: torch.device, target: torch.device) -> float:
    import torch

    data = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, device=source, pin_memory=source.type == "cpu")
    copy = torch.empty_like(data, device=target)
    return data.nbytes / _best_s(lambda: copy.copy_(data, non_blocking=True), target) / 1e9


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """The duration of the fastest of several calls: other processes may use the machine."""
    import torch
    from torch.utils.benchmark import Timer

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    timer = Timer("work()", globals={"work": work}, timer=now_s, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=MEASURED_S).times))


def _print(document: Document) -> None:
    host, found, links = document["host"], document["devices"], document["links"]
    reason = host["no_shared_memory"]
    cli.print_fields(
        {
            "host": host["name"],
            "processor": f"{host['processor']}, {host['cores']} cores",
            "threads": f"{host['threads']} in a single process; workers divide the cores",
            "memory": cli.or_dash(host["memory_bytes"], size),
            "CPU workers": f"exchange through {'shared memory' if reason is None else f'Gloo: {reason}'}",
        }
    )
    print()
    header = ("device", "name", "memory", "fp32\nFLOP/s", "bf16\nFLOP/s", "copy\nGB/s", "from host\nGB/s")
    cli.print_table([header, *map(_device_row, found)], right=range(2, 7))
    if links:
        paths = {True: "direct", False: "through the host"}
        rows = [(x["source"], x["target"], paths[x["is_direct"]], cli.or_dash(x["gb_per_s"], rate)) for x in links]
        print()
        cli.print_table([("from", "to", "path", "GB/s"), *rows], right=(3,))
    if full := [device["device"] for device in found if device["is_full"]]:
        print(f"\nnot measured because their memory is in use: {', '.join(full)}")
    print(f"\na run uses {cli.count(len(found), 'worker')} by default; --workers and -d change that")


def _device_row(device: Document) -> tuple[str, ...]:
    name, speed = device["name"], device["speed"] or {}
    cells = [cli.or_dash(speed.get(f"{dtype}_gflop_per_s"), lambda g: rate(g * 1e9)) for dtype in ("fp32", "bf16")]
    cells += [cli.or_dash(speed.get(f"{source}_gb_per_s"), rate) for source in ("memory", "host")]
    return (
        device["device"],
        cli.shortened(name, MAX_NAME_LENGTH),
        cli.or_dash(device["memory_bytes"], size),
        *cells,
    )
