"""Exchanges over torch.distributed: NCCL, Gloo, or another backend of the user's default group."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.base import DEFAULT_TIMEOUT_S, OwnedBuffer, Ownership, Pending
from paceline.comm.owned_tensors import owned_tensors
from paceline.comm.rendezvous import Rendezvous
from paceline.core.errors import CommunicationError, CommunicationTimeout, MisuseError
from paceline.core.world import World

# How often a worker that connects checks whether a peer was lost.
CHECK_S = 0.02
# No message with this tag is ever sent; see `abort`.
_ABORT_TAG = 2**30


class ProcessGroupCommunicator:
    """A process group that is shared neither with the user's collectives nor with another trainer.

    Gloo and NCCL groups are constructed directly: torch.distributed's public functions would register a default group,
    which belongs to the user. All workers of `world` construct it together. It is also a `Link`.
    """

    is_trusted = False  # Gloo and NCCL do not authenticate their peers

    def __init__(
        self,
        world: World,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.backend = backend or default_backend(world)
        self._group: Any = None
        self._is_aborted = False
        self._rendezvous = rendezvous or Rendezvous(world, timeout_s)  # referenced: the group uses its store
        try:
            self._group = self._connect()
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise self._translate(error, "connecting", timeout_s) from None

    def _connect(self) -> Any:
        """The group. If workers may change, the attempt ends when one is lost after the rendezvous."""
        store, check = self._rendezvous.store, self._rendezvous.check
        if check is None:
            return self._open(store)
        # In a thread, because torch blocks for up to timeout_s. An abandoned attempt ends with its thread.
        group: Future[Any] = Future()

        def open_group() -> None:
            try:
                group.set_result(self._open(store))
            except BaseException as error:
                group.set_exception(error)

        Thread(target=open_group, name="paceline connect", daemon=True).start()
        while True:
            try:
                return group.result(CHECK_S)
            except TimeoutError:
                check()

    def _open(self, store: Any) -> Any:
        world, timeout = self.world, timedelta(seconds=self.timeout_s)
        if self.backend == "gloo":
            return _gloo_group(store, world, timeout)
        if self.backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            return nccl(store, world.rank, world.size, options)
        if dist.is_initialized():
            return dist.new_group(backend=self.backend, timeout=timeout)
        raise ValueError(
            f"backend={self.backend!r} needs the default group: call torch.distributed.init_process_group() in the "
            "script, or choose 'gloo' or 'nccl'"
        )

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._start("all_reduce", "allreduce", [torch.view_as_real(tensor) if tensor.is_complex() else tensor])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        # As bytes: no backend carries every dtype.
        return self._start("broadcast", "broadcast", tensor.detach().view(-1).view(torch.uint8), source)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._start(f"send to rank {to}", "send", [tensor], to, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._start(f"receive from rank {source}", "recv", [tensor], source, 0).wait()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        return owned_tensors(self, ownership, partial(self._start, "reduce", "reduce"))

    def abort(self) -> None:
        """Fail the exchanges in progress, here and on the peers, and all later ones. Called from any thread."""
        group, self._is_aborted = self._group, True
        if group is None:
            return
        if self.backend != "gloo":
            group.abort()
            return
        # Gloo's own abort() is a no-op. A receive that times out closes all connections of its group; a receive from a
        # peer that is gone fails earlier and closes nothing.
        for peer in range(self.world.size):
            if peer != self.world.rank:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Waits for Gloo's exchanges in progress, unless they were aborted."""
        group, self._group = self._group, None
        if group is None or self.backend == "gloo":
            return  # Gloo's connections and threads end with the last reference to the group
        if self.backend == "nccl":
            group.shutdown()
        elif dist.is_initialized():
            dist.destroy_process_group(group)

    def _start(self, operation: str, method: str, *args: Any) -> Pending:
        if self._group is None:
            raise MisuseError("the communicator is closed and accepts no exchange")
        try:
            work = getattr(self._group, method)(*args)
        except RuntimeError as error:
            raise self._translate(error, operation, 0.0) from None
        return _PendingWork(work, operation, self)

    def _translate(self, error: RuntimeError, operation: str, waited_s: float) -> CommunicationError:
        """torch.distributed reports timeouts and lost peers as plain RuntimeErrors."""
        text, rank = str(error), self.world.rank
        # Gloo also reports a timeout after a peer's abort.
        is_late = waited_s > 0.9 * self.timeout_s
        if ("imed out" in text or "imeout" in text) and is_late and not self._is_aborted:
            return CommunicationTimeout(
                f"rank {rank} waited timeout_s={self.timeout_s:g} s in {operation}, and not all {self.world.size} "
                "workers arrived: the others hang, or need more time than timeout_s"
            )
        return CommunicationError(f"rank {rank} lost contact with the other workers in {operation}: {text}")


@dataclass(slots=True)
class _PendingWork:
    work: Any
    operation: str
    communicator: ProcessGroupCommunicator
    started_s: float = field(default_factory=monotonic)

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.communicator._translate(error, self.operation, monotonic() - self.started_s) from None


def default_backend(world: World) -> str:
    """NCCL if every worker has its own GPU, else Gloo."""
    return "nccl" if world.device.type == "cuda" and not world.shares_device else "gloo"


def _gloo_group(store: Any, world: World, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    if world.local_size == world.size and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Workers of one host connect over loopback: it needs no resolvable host name and is not reachable from outside.
        options = gloo._Options()
        options._timeout, options._devices = timeout, [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(store, world.rank, world.size, options)
    else:
        group = gloo(store, world.rank, world.size, timeout)
    group.barrier().wait()  # a worker that is connected may close while others still connect to it
    return group
