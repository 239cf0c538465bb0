"""Workers in processes of their own, over torch.distributed: NCCL, Gloo or any registered backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.comm.rendezvous import meet
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.world import World


class ProcessGroupCommunicator:
    """A process group of its own, so that neither the user's collectives nor another trainer's mix in.

    All workers construct it, also where only `ranks` of them exchange; those are counted by their place in it.
    """

    def __init__(
        self,
        world: World,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ranks: Sequence[int] | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.backend = backend or default_backend(world)
        members = range(world.size) if ranks is None else ranks
        self._default_group: DefaultGroup | None = None
        self._group: Any = None
        self._meeting = meet(world, join_timeout_s or timeout_s)  # kept: its store is used until the end
        try:
            self._open(self._meeting.store, members)
        except RuntimeError as error:
            self.close()
            raise _translate(error, "joining the world", self) from None

    def _open(self, store: Any, members: Sequence[int]) -> None:
        world, timeout = self.world, timedelta(seconds=self.timeout_s)
        if self.backend not in ("gloo", "nccl"):
            self._default_group = DefaultGroup(self.backend, store, world, timeout)
            self._group = dist.new_group(members, backend=self.backend, timeout=timeout)
        elif world.rank in members:
            place = store, members.index(world.rank), len(members)
            if self.backend == "gloo":
                self._group = _gloo_group(*place, timeout, is_one_host=world.local_size == world.size)
            else:
                self._group = _nccl_group(*place, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        group = self._open_group()
        try:
            work = group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
        except RuntimeError as error:
            raise _translate(error, "all_reduce", self) from None
        return _PendingWork(work, "all_reduce", self)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        group = self._open_group()
        try:
            work = group.broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor, source)
        except RuntimeError as error:
            raise _translate(error, "broadcast", self) from None
        return _PendingWork(work, "broadcast", self)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        group = self._open_group()
        try:
            group.send([tensor], to, 0).wait()
        except RuntimeError as error:
            raise _translate(error, f"send to rank {to}", self) from None

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        group = self._open_group()
        try:
            group.recv([tensor], source, 0).wait()
        except RuntimeError as error:
            raise _translate(error, f"receive from rank {source}", self) from None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        # Let go of the group: Gloo's connections and threads end with the last reference to it.
        group, self._group = self._group, None
        default, self._default_group = self._default_group, None
        if default is not None:
            default.leave(group)
        elif group is not None and self.backend == "nccl":
            group.shutdown()

    def _open_group(self) -> Any:
        if self._group is None:
            raise MisuseError("the communicator is closed: nothing can be exchanged any more")
        return self._group


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta, *, is_one_host: bool) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    if is_one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Workers of one host meet on loopback: a host name that does not resolve cannot stop them.
        options = gloo._Options()
        options._timeout, options._devices = timeout, [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(store, rank, size, options)
    else:
        group = gloo(store, rank, size, timeout)
    group.barrier().wait()  # who is connected may leave at once, while others still connect to it
    return group


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


class DefaultGroup:
    """What a backend needs that is known to torch.distributed alone: a default group, the user's or one of our own.

    One of our own ends with the last communicator that relies on it, in any order.
    """

    _num_users: ClassVar[dict[Any, int]] = {}

    def __init__(self, backend: str, store: Any, world: World, timeout: timedelta) -> None:
        if not dist.is_initialized():
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
            self._num_users[dist.group.WORLD] = 0
        self._group = dist.group.WORLD
        if self._group in self._num_users:
            self._num_users[self._group] += 1

    def leave(self, group: Any) -> None:
        """Destroy `group`, and the default group with its last user."""
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        if self._group not in self._num_users:
            return
        self._num_users[self._group] -= 1
        if self._num_users[self._group] == 0:
            del self._num_users[self._group]
            if dist.is_initialized() and dist.group.WORLD is self._group:
                dist.destroy_process_group()


class _PendingWork:
    def __init__(self, work: Any, operation: str, communicator: ProcessGroupCommunicator) -> None:
        self._work = work
        self._operation = operation
        self._communicator = communicator

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translate(error, self._operation, self._communicator) from None


def default_backend(world: World) -> str:
    """NCCL where every worker has a GPU of its own, else Gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def _translate(error: RuntimeError, operation: str, communicator: ProcessGroupCommunicator) -> CommunicationError:
    """torch.distributed reports time-outs and lost peers as plain RuntimeErrors; callers need to tell them apart."""
    text = str(error)
    world = communicator.world
    if "imed out" in text or "imeout" in text:
        return CommunicationTimeout(
            f"rank {world.rank} waited timeout_s={communicator.timeout_s:g} s in {operation} and not all {world.size} "
            "workers arrived: the others hang, or their work takes longer than the time-out"
        )
    return CommunicationError(f"rank {world.rank} lost contact with the other workers in {operation}: {text}")
