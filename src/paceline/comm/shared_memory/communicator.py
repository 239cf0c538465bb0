"""CPU workers: sums in shared memory inside each host, and between the hosts' leaders over Gloo.

On one host no socket or port is opened. Tensors that `empty` did not allocate are copied through scratch buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.comm.base import DONE, OwnedBuffer, Ownership, Pending
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shared_memory.bridge import Bridge
from paceline.comm.shared_memory.buffers import (
    SMALL_BYTES,
    BridgedBuffer,
    LargeBuffer,
    SharedBuffer,
    SmallBuffer,
    allocate,
)
from paceline.comm.shared_memory.owned import owned_buffers
from paceline.comm.shared_memory.peers import LocalPeers, find_hosts
from paceline.comm.shared_memory.peers import missing_shared_memory as missing_shared_memory
from paceline.core.errors import CommunicationError, MisuseError
from paceline.core.world import World

# The sizes of scratch buffers: a tensor uses the smallest one that holds it, or the largest one several times.
SCRATCH_BYTES = (512, SMALL_BYTES, 4 << 20)


class SharedMemoryCommunicator:
    """All workers construct it together. It raises `SharedMemoryUnavailable` on all if one cannot share memory.

    `rendezvous` has the workers' `placement` as offers. Memory of `empty` is released after `close()` with the last
    tensor over it. An exchange of a tensor larger than the largest scratch buffer completes all but its last part
    inside the call.
    """

    def __init__(self, world: World, timeout_s: float, rendezvous: Rendezvous) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._hosts = find_hosts(rendezvous.offers)
        [ranks] = [ranks for ranks in self._hosts if world.rank in ranks]
        self._peers = LocalPeers(world, timeout_s, ranks, rendezvous)
        self._num_buffers = self._num_deliveries = 0
        self._buffers: dict[tuple[int, torch.dtype], SharedBuffer] = {}
        self._scratch: dict[tuple[torch.dtype, int], SharedBuffer] = {}
        self._scratch_users: dict[SharedBuffer, _ScratchExchange] = {}
        self._bridge: Bridge | None = None
        if len(self._hosts) > 1 and self._peers.is_leader:
            try:
                self._bridge = Bridge(self._peers, self._hosts, rendezvous)
            except BaseException as error:
                self._fail(error)
                self.close()
                raise

    @property
    def num_hosts(self) -> int:
        return len(self._hosts)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._exchange(tensor, "all_reduce", None)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        if not 0 <= source < self.world.size:
            raise ValueError(f"source={source} is not a rank in a world of {self.world.size}")
        return self._exchange(tensor, f"broadcast from {source}", source)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._peers.check_usable()
        if device.type != "cpu" or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        buffer = self._allocate(numel, dtype)
        self._buffers[buffer.tensor.data_ptr(), dtype] = buffer
        return buffer.tensor

    def owned(self, ownership: Ownership) -> list[OwnedBuffer]:
        self._peers.check_usable()
        if ownership.device.type != "cpu":
            raise ValueError(f"workers cannot share memory of {ownership.device}")
        try:
            return owned_buffers(self, self._peers, ownership)
        except OSError as error:
            raise _out_of_memory(sum(ownership.numels), ownership.dtype, error) from None

    def abort(self) -> None:
        if self._peers.segments:  # not closed
            self._peers.abort()
            if self._bridge is not None:
                self._bridge.stop()

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
        self._buffers.clear()
        self._scratch.clear()
        self._scratch_users.clear()
        self._peers.close()

    def _exchange(self, tensor: torch.Tensor, operation: str, source: int | None) -> Pending:
        self._peers.check_usable()
        buffer = self._buffers.get((tensor.data_ptr(), tensor.dtype))
        if buffer is None or not tensor.is_contiguous() or tensor.numel() != buffer.tensor.numel():
            return self._exchange_copy(tensor, operation, source)
        return self.start(buffer, operation, source)

    def start(
        self,
        buffer: SharedBuffer,
        operation: str,
        source: int | None,
        receive: Callable[[], object] | None = None,
    ) -> Pending:
        """Start an exchange of a buffer. receive: reads the memory of rank `source`; nothing else is done."""
        self._peers.check_usable()
        call = f"{operation} of {buffer.name}"
        if buffer.is_busy:
            raise MisuseError(f"{call} is called while the buffer is in another exchange: wait() for that one first")
        buffer.is_busy = True
        buffer.publish()
        number = self._peers.own.announce_call(call)
        if self._bridge is not None:
            assert isinstance(buffer, BridgedBuffer)
            self._bridge.submit(number, buffer, call, source)
        delivery = None if receive is None else (self._num_deliveries, receive)
        self._num_deliveries += receive is not None
        return _Exchange(self, buffer, number, call, source, delivery)

    def _allocate(self, numel: int, dtype: torch.dtype) -> SharedBuffer:
        try:
            offset, parts = allocate(self._peers, numel, dtype)
            name = f"{numel} elements of {dtype} (buffer {self._num_buffers} at offset {offset})"
            self._num_buffers += 1
            if len(self._hosts) > 1:
                return BridgedBuffer(self._peers, name, parts, len(self._hosts))
            kind = SmallBuffer if numel * dtype.itemsize <= SMALL_BYTES else LargeBuffer
            return kind(self._peers, name, parts)
        except OSError as error:
            raise _out_of_memory(numel, dtype, error) from None

    def _exchange_copy(self, tensor: torch.Tensor, operation: str, source: int | None) -> Pending:
        """Exchange a tensor that `empty` did not allocate."""
        if not tensor.numel():
            return DONE
        flat = tensor.detach().cpu().contiguous().view(-1)
        content = flat if source is None else flat.view(torch.uint8)
        nbytes = next((size for size in SCRATCH_BYTES if content.nbytes <= size), SCRATCH_BYTES[-1])
        # All workers make the same calls, so all allocate a scratch buffer in the same call.
        key = content.dtype, nbytes
        if key not in self._scratch:
            self._scratch[key] = self._allocate(nbytes // content.dtype.itemsize, content.dtype)
        scratch = self._scratch[key]
        name = f"{operation} ({content.numel()} copied)"
        *parts, last = content.split(scratch.tensor.numel())
        for part in parts:
            self._exchange_part(scratch, part, name, source).wait()
        pending = self._exchange_part(scratch, last, name, source)
        if flat.data_ptr() != tensor.data_ptr():
            pending.copies.append((tensor, flat))
        return pending

    def _exchange_part(
        self, scratch: SharedBuffer, part: torch.Tensor, operation: str, source: int | None
    ) -> _ScratchExchange:
        if (user := self._scratch_users.pop(scratch, None)) is not None:
            user.wait()
        view = scratch.tensor[: part.numel()]
        if source is None or source == self.world.rank:
            view.copy_(part)
        user = self._scratch_users[scratch] = _ScratchExchange(self.start(scratch, operation, source), [(part, view)])
        return user

    def _fail(self, error: BaseException) -> None:
        self._peers.fail(error)
        if self._bridge is not None:
            self._bridge.stop()


@dataclass(slots=True)
class _Exchange:
    """A call on a shared buffer. `wait` does the work that follows the calls of all workers.

    delivery: the number of a call in which the others read the memory of rank `source`, and what they do with it.
    """

    communicator: SharedMemoryCommunicator
    buffer: SharedBuffer
    number: int
    call: str
    source: int | None
    delivery: tuple[int, Callable[[], object]] | None
    is_done: bool = False

    def wait(self) -> None:
        if self.is_done:
            return
        self.communicator._peers.check_usable()
        try:
            if self.delivery is None:
                self.buffer.complete(self.number, self.call, self.source)
                self.buffer.turn = 1 - self.buffer.turn
            else:
                self._deliver(*self.delivery)
        except BaseException as error:
            self.communicator._fail(error)
            raise
        self.buffer.is_busy = False
        self.is_done = True

    def _deliver(self, delivery: int, receive: Callable[[], object]) -> None:
        peers = self.communicator._peers
        if self.source == peers.world.rank:
            peers.wait_for_all(lambda peer: peer.num_received > delivery, self.call, "did not receive it")
            return
        if delivery < peers.own.num_received:
            raise MisuseError(f"{self.call}: deliveries must be waited for in the order of their calls")
        peers.wait_for_calls(self.number, self.call, of=self.source)
        receive()
        peers.own.receive(delivery)


@dataclass(slots=True)
class _ScratchExchange:
    """An exchange in a scratch buffer. The next exchange that needs the buffer completes it.

    copies: targets and sources, to be copied when it is complete. Then they are dropped: this object lives on.
    """

    exchange: Pending
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    @torch.no_grad()
    def wait(self) -> None:
        if self.copies:
            self.exchange.wait()
            for target, source in self.copies:
                target.copy_(source.view(target.shape))
            self.copies = []


def _out_of_memory(numel: int, dtype: torch.dtype, error: OSError) -> CommunicationError:
    return CommunicationError(f"cannot allocate shared memory for {numel:,} elements of {dtype}: {error}")
