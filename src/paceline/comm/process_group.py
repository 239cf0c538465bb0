"""Workers in processes of their own, over torch.distributed: NCCL, Gloo or any registered backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.world import World

# Workers may reach their first meeting far apart: importing, or building the data, takes one longer than another.
JOIN_TIMEOUT_S = 300.0
# How many open communicators rely on a default group that one of them started: it ends with the last, in any order.
_users: dict[dist.ProcessGroup, int] = {}


class ProcessGroupCommunicator:
    """A torch.distributed group of its own, so that neither the user's collectives nor another trainer's mix in.

    Joins the default group if the process has one, else starts it from the variables that torchrun sets. All workers
    construct it, also where only `ranks` of them exchange; those are counted by their place in it.
    """

    def __init__(
        self,
        world: World,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.backend = backend or default_backend(world)
        timeout = timedelta(seconds=timeout_s)
        self._default_group: dist.ProcessGroup | None = None
        try:
            if not dist.is_initialized():
                _start_default_group(world, self.backend, timedelta(seconds=max(timeout_s, JOIN_TIMEOUT_S)))
                _users[_default_group()] = 0
            self._join_default_group()
            group = dist.new_group(ranks, backend=self.backend, timeout=timeout)
            if self.backend == "gloo" and (ranks is None or world.rank in ranks):
                dist.barrier(group)  # who is connected may leave at once, while others still connect to it
        except RuntimeError as error:
            self._leave_default_group()
            raise _translate(error, "joining the world", self) from None
        self._group: dist.ProcessGroup | None = group

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        group = self._open_group()
        try:
            work = dist.all_reduce(tensor, group=group, async_op=True)
        except RuntimeError as error:
            raise _translate(error, "all_reduce", self) from None
        return _PendingWork(work, "all_reduce", self)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        group = self._open_group()
        try:
            work = dist.broadcast(tensor, group=group, async_op=True, group_src=source)
        except RuntimeError as error:
            raise _translate(error, "broadcast", self) from None
        return _PendingWork(work, "broadcast", self)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        group = self._open_group()
        try:
            dist.send(tensor, to, group=group)
        except RuntimeError as error:
            raise _translate(error, f"send to rank {to}", self) from None

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        group = self._open_group()
        try:
            dist.recv(tensor, source, group=group)
        except RuntimeError as error:
            raise _translate(error, f"receive from rank {source}", self) from None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        # Let go of the group: its connections and threads end with the last reference, not with its destruction.
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self._leave_default_group()

    def _join_default_group(self) -> None:
        self._default_group = _default_group()
        if self._default_group in _users:
            _users[self._default_group] += 1

    def _leave_default_group(self) -> None:
        default, self._default_group = self._default_group, None
        if default not in _users:
            return
        _users[default] -= 1
        if _users[default] == 0:
            del _users[default]
            if dist.is_initialized() and _default_group() is default:
                dist.destroy_process_group()

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise MisuseError("the communicator is closed: nothing can be exchanged any more")
        return self._group


class _PendingWork:
    def __init__(self, work: dist.Work, operation: str, communicator: ProcessGroupCommunicator) -> None:
        self._work = work
        self._operation = operation
        self._communicator = communicator

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translate(error, self._operation, self._communicator) from None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def default_backend(world: World) -> str:
    """NCCL where every worker has a GPU of its own, else Gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def _start_default_group(world: World, backend: str, timeout: timedelta) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start the script with torchrun, "
            "`paceline run` or paceline.launch, or unset RANK and WORLD_SIZE to train alone"
        )
    if world.local_size == world.size:
        # Workers of one host meet on loopback: a host name that does not resolve cannot stop them.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    # Workers that were restarted find the store of the workers before them, with addresses where nobody is any more.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


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
