"""Report devices of this process without peer access to each other, and the cost of copying through the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from time import perf_counter

import torch

WARM_UP_COPIES = 2
TIMED_COPIES = 5


def report_missing_peer_access(
    devices: Sequence[torch.device],
    num_bytes: int,
    *,
    can_reach: Callable[[torch.device, torch.device], bool] = torch.cuda.can_device_access_peer,
    copy_time_s: Callable[[torch.device, torch.device, int], float] | None = None,
) -> None:
    """Print the pairs of devices that exchange through the host, and the time that `num_bytes` take."""
    accelerators = sorted({device for device in devices if device.type == "cuda"}, key=str)
    apart = [pair for pair in combinations(accelerators, 2) if not (can_reach(*pair) and can_reach(*pair[::-1]))]
    if not apart:
        return
    first, second = apart[0]
    measured_s = (copy_time_s or _copy_time_s)(first, second, num_bytes)
    pairs = ", ".join(f"{a} and {b}" for a, b in apart)
    print(
        f"paceline: no direct access between {pairs}: gradients go through the host. {num_bytes / 1e6:.1f} MB of them "
        f"take {1e3 * measured_s:.2f} ms from {first} to {second}, once per step and replica each way",
        file=sys.stderr,
    )


def _copy_time_s(source: torch.device, target: torch.device, num_bytes: int) -> float:
    sent = torch.empty(num_bytes, dtype=torch.uint8, device=source)
    received = torch.empty(num_bytes, dtype=torch.uint8, device=target)
    for copies in (WARM_UP_COPIES, TIMED_COPIES):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        start = perf_counter()
        for _ in range(copies):
            received.copy_(sent)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
    return (perf_counter() - start) / TIMED_COPIES
