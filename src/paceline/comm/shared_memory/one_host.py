"""CPU workers of one host, with nothing but shared memory between them: no socket and no port.

They find each other's memory through the run's store. Tensors that were not made by `empty` are copied through
buffers that were, in pieces.
"""

from __future__ import annotations

import torch

from paceline.comm.base import DONE, Pending
from paceline.comm.rendezvous import Meeting, wait_for_keys
from paceline.comm.shared_memory.communicator import SMALL_BYTES, Buffer, SharedMemoryCommunicator
from paceline.core.world import World

# Of what sizes the buffers are through which tensors are copied: an exchange always takes a whole one.
SCRATCH_BYTES = (512, SMALL_BYTES, 4 << 20)


class OneHostCommunicator(SharedMemoryCommunicator):
    """All workers construct it together, after their meeting; it raises on all if one of them cannot share memory.

    A tensor that `empty` did not make and that is larger than a piece is exchanged inside the call, all but the last
    piece, as soon as the others make the same call.
    """

    def __init__(self, world: World, timeout_s: float, meeting: Meeting) -> None:
        super().__init__(StoreCommunicator(world, timeout_s, meeting))
        self._scratch: dict[tuple[torch.dtype, int], Buffer] = {}
        self._borrowers: dict[Buffer, _Borrowed] = {}

    def close(self) -> None:
        self._scratch.clear()
        self._borrowers.clear()
        super().close()

    def _outside(self, tensor: torch.Tensor, operation: str, source: int | None) -> Pending:
        if not tensor.numel():
            return DONE
        flat = tensor.detach().cpu().contiguous().view(-1)
        content = flat if source is None else flat.view(torch.uint8)
        size = next((size for size in SCRATCH_BYTES if content.nbytes <= size), SCRATCH_BYTES[-1])
        buffer = self._scratch_of(content.dtype, size)
        call = f"{operation} ({content.numel()} copied)"
        *first, last = content.split(buffer.tensor.numel())
        for piece in first:
            self._borrow(buffer, piece, call, source).wait()
        pending = self._borrow(buffer, last, call, source)
        return pending if flat.data_ptr() == tensor.data_ptr() else _CopiedBack(pending, flat, tensor)

    def _scratch_of(self, dtype: torch.dtype, nbytes: int) -> Buffer:
        """Made by the first call that needs it, which is the same on all workers."""
        key = dtype, nbytes
        if key not in self._scratch:
            self._scratch[key] = self._make_buffer(nbytes // dtype.itemsize, dtype)
        return self._scratch[key]

    def _borrow(self, buffer: Buffer, piece: torch.Tensor, call: str, source: int | None) -> Pending:
        if (earlier := self._borrowers.pop(buffer, None)) is not None:
            earlier.wait()
        part = buffer.tensor[: piece.numel()]
        if source is None or source == self.world.rank:
            part.copy_(piece)
        borrowed = self._borrowers[buffer] = _Borrowed(self._start(buffer, call, source), part, piece)
        return borrowed


class _Borrowed:
    """An exchange of a piece in a buffer that others need too: whoever is next completes it."""

    def __init__(self, exchange: Pending, part: torch.Tensor, piece: torch.Tensor) -> None:
        self._exchange = exchange
        self._part: torch.Tensor | None = part
        self._piece = piece

    def wait(self) -> None:
        if self._part is not None:
            self._exchange.wait()
            self._piece.copy_(self._part)
            self._part = None


class _CopiedBack:
    """An exchange of a copy."""

    def __init__(self, pending: Pending, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        self._pending = pending
        self._copy = copy
        self._tensor = tensor

    @torch.no_grad()
    def wait(self) -> None:
        self._pending.wait()
        self._tensor.copy_(self._copy.view(self._tensor.shape))


class StoreCommunicator:
    """A few small tensors through the store of a meeting: what workers agree on before they share memory."""

    def __init__(self, world: World, timeout_s: float, meeting: Meeting) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._meeting: Meeting | None = meeting
        self._num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        tensor.copy_(sum(self._all(tensor), torch.zeros_like(tensor)))
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        tensor.copy_(self._all(tensor)[source])
        return DONE

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        self._meeting = None

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's, by rank."""
        assert self._meeting is not None, "it serves until workers share memory"
        store = self._meeting.store
        call, self._num_calls = self._num_calls, self._num_calls + 1
        keys = {rank: f"exchange/{call}/{rank}" for rank in range(self.world.size)}
        store.set(keys[self.world.rank], tensor.numpy().tobytes())
        wait_for_keys(store, keys, self.world, self.timeout_s)
        contents = [bytearray(store.get(key)) for key in keys.values()]
        return [torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape) for content in contents]
