"""Workers in processes of their own, over torch.distributed: NCCL, Gloo or any registered backend."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


class ProcessGroupCommunicator:
    """A torch.distributed group of its own, so that neither the user's collectives nor another trainer's mix in.

    Joins the default group if the process has one, else starts it from the variables that torchrun sets.
    """

    def __init__(self, world: World, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.backend = backend or default_backend(world)
        timeout = timedelta(seconds=timeout_s)
        self._started_default_group = not dist.is_initialized()
        try:
            if self._started_default_group:
                _start_default_group(world, self.backend, timeout)
            self._group = dist.new_group(backend=self.backend, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise _translate(error, "joining the world", self) from error

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _translate(error, "all_reduce", self) from error
        return _PendingWork(work, "all_reduce", self)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        try:
            work = dist.broadcast(tensor, src=source, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _translate(error, "broadcast", self) from error
        return _PendingWork(work, "broadcast", self)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
            if self._started_default_group:
                dist.destroy_process_group()


class _PendingWork:
    def __init__(self, work: dist.Work, operation: str, communicator: ProcessGroupCommunicator) -> None:
        self._work = work
        self._operation = operation
        self._communicator = communicator

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translate(error, self._operation, self._communicator) from error


def default_backend(world: World) -> str:
    """NCCL where every worker has a GPU of its own, else Gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def _start_default_group(world: World, backend: str, timeout: timedelta) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} is not: start the script with torchrun, "
            "`paceline run` or paceline.launch, or unset RANK and WORLD_SIZE to train alone"
        )
    if world.local_size == world.size:
        # Workers of one host meet on loopback: a host name that does not resolve cannot stop them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)


def _translate(error: Exception, operation: str, communicator: ProcessGroupCommunicator) -> Exception:
    """torch.distributed reports time-outs and lost peers as plain RuntimeErrors; callers need to tell them apart."""
    if isinstance(error, ValueError):
        return error
    text = str(error)
    world = communicator.world
    if "imed out" in text or "imeout" in text:
        return CommunicationTimeout(
            f"rank {world.rank} waited timeout_s={communicator.timeout_s:g} s in {operation} and some of the other "
            f"{world.size - 1} workers did not arrive: they hang, or their work takes longer than the time-out"
        )
    return CommunicationError(f"rank {world.rank} lost contact with the other workers in {operation}: {text}")
