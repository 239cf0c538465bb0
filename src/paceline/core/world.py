"""The workers of a run. `World` is a value that is passed to functions; there is no global rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from paceline.core.processes import is_worker
from paceline.core.usable_devices import left_out, note_broken, try_gpus


@dataclass(frozen=True)
class World:
    """One worker's view of the current workers.

    `local_rank` and `local_size` count the workers on this host; `device` is the device of this worker. `is_joining`:
    this worker is being set up to join a live run; it is a world of one until then.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_joining: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.local_size < 1:
            raise ValueError(f"size={self.size}, local_size={self.local_size}: a world has at least 1 worker")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} is not in a world of {self.size}: choose 0 <= rank < {self.size}")
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(
                f"local_rank={self.local_rank} is not among {self.local_size} local workers: "
                f"choose 0 <= local_rank < {self.local_size}"
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and not self.is_joining

    @property
    def shares_device(self) -> bool:
        """Whether several local workers use the same GPU, which NCCL does not support."""
        return self.device.type == "cuda" and self.local_size > len(devices())

    @classmethod
    def from_environment(
        cls, device: torch.device | str | None = None, environment: Mapping[str, str] | None = None
    ) -> World:
        """The world set by torchrun, `paceline run` or `paceline.launch`; without one of them, a world of one."""
        env = os.environ if environment is None else environment
        if not is_worker(env):
            return cls(host=socket.gethostname(), device=first_usable() if device is None else choose_device(0, device))
        rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        local_rank = _integer(env, "LOCAL_RANK", rank)
        local_size = _integer(env, "LOCAL_WORLD_SIZE", size)
        return cls(rank, size, local_rank, local_size, socket.gethostname(), choose_device(local_rank, device))


def devices() -> list[torch.device]:
    """The devices a run can use: all visible GPUs that can run a kernel, or the CPU if there is none."""
    if torch.cuda.is_available():
        visible = range(torch.cuda.device_count())
        usable = [index for index in visible if index not in left_out()]
        return [torch.device("cuda", index) for index in usable or visible]
    return [torch.device("cpu")]


def device_count() -> int:
    """How many devices a launch uses; at least 1. Tries the GPUs if there are several."""
    if torch.cuda.is_available():
        try_gpus()
    return len(devices())


def first_usable() -> torch.device:
    """The device of a process that is alone: the first GPU that can run a kernel, or the CPU if there is none."""
    available = devices()
    for device in available if len(available) > 1 else ():
        if (problem := why_unusable(device)) is None:
            return device
        note_broken(device.index, problem)
    return available[0]


def why_unusable(device: torch.device) -> str | None:
    """Run a kernel: this build of torch may have none for the GPU, or it may be broken. None if that works."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        return f"{torch.cuda.get_device_name(device)}: {str(error).splitlines()[0]}"
    return None


def unconnected_gpus(gpus: Iterable[torch.device | str]) -> list[str]:
    """Pairs of these GPUs of one host that cannot read each other's memory, as "cuda:0 and cuda:1"."""
    can_reach = torch.cuda.can_device_access_peer
    pairs = combinations(dict.fromkeys(map(torch.device, gpus)), 2)
    return [f"{a} and {b}" for a, b in pairs if not (can_reach(a, b) and can_reach(b, a))]


def choose_device(local_rank: int, requested: torch.device | str | None = None) -> torch.device:
    """The device of the worker with this local rank. Workers share GPUs if there are fewer GPUs than workers."""
    available = devices()
    if requested is None:
        return available[local_rank % len(available)]
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError):
        names = ", ".join(dict.fromkeys(["cpu", *map(str, available)]))
        raise ValueError(f"device={requested!r} is unknown: choose one of {names}") from None
    if device.type != "cuda":
        return device
    if available[0].type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(requested)!r} is not available: torch sees {', '.join(map(str, available))}. "
            "Choose one of these, or check CUDA_VISIBLE_DEVICES"
        )
    return available[local_rank % len(available)] if device.index is None else device


def choose_devices(requested: Sequence[torch.device | str], local_rank: int = 0) -> tuple[torch.device, ...]:
    """The devices of the replicas of the process with this local rank. Each process of this host has as many."""
    if isinstance(requested, str | torch.device):
        raise TypeError(f"devices={requested!r} is one device: give a list, such as [{str(requested)!r}]")
    first = local_rank * len(requested)
    return tuple(choose_device(number, device) for number, device in enumerate(requested, first))


def _integer(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name}={text!r} is not an integer: torchrun sets it") from None
