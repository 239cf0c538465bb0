"""Collectives for values of the user: gather, broadcast, reduce, and `main_first`.

A value consists of tensors, arrays, numbers, strings, lists, tuples and dicts. It is sent as JSON and the bytes of its
tensors, so no pickle is loaded; its tensors arrive on the host. A single worker encodes and decodes as well, so that
the result does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import from_rank_0
from paceline.core.errors import CommunicationError, PacelineError
from paceline.core.message import decode, encode
from paceline.core.settings import check_value

Reduction = Literal["mean", "sum", "max", "min"]

# A message on the host is sent through device memory in pieces of this size.
PIECE_BYTES = 64 << 20


def gather(value: Any, communicator: Communicator) -> list[Any]:
    """Every worker's value, by rank, on every worker."""
    own = _pack(value)
    return [_unpack(_shared(own, rank, communicator), rank) for rank in range(communicator.world.size)]


def broadcast(value: Any, source: int, communicator: Communicator) -> Any:
    """The value of rank `source`, on every worker; the others' values are ignored."""
    world = communicator.world
    check_value("source", source, int, least=0, most=world.size - 1)
    own = _pack(value if world.rank == source else None)
    return _unpack(_shared(own, source, communicator), source)


def reduce(value: Any, how: Reduction, communicator: Communicator) -> Any:
    """The reduction, in rank order, of all workers' numbers or tensors. A tensor is on the device of `value`."""
    check_value("how", how, Reduction)
    if not isinstance(value, torch.Tensor | Real):
        raise TypeError(f"reduce() got a {type(value).__name__}: give a tensor or a number")
    if not isinstance(value, torch.Tensor):
        value = int(value) if isinstance(value, Integral) else float(value)
    values = gather(value, communicator)
    kinds = [_kind(each) for each in values]
    if len(set(kinds)) > 1:
        shown = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(f"reduce() needs tensors of one shape and dtype, or numbers, on all workers, and got {shown}")
    if isinstance(value, torch.Tensor):
        return _reduced(torch.stack(values), how).to(value.device)
    dtype = torch.int64 if all(isinstance(each, int) for each in values) else torch.float64
    return _reduced(torch.tensor(values, dtype=dtype), how).item()


@contextmanager
def main_first(communicator: Communicator, together: Callable[[Callable[[], bytes]], bytes]) -> Iterator[None]:
    """Rank 0 runs the block, then the others do. An error on rank 0 is raised on all.

    together: runs a collective operation, and repeats it if a worker is lost. If rank 0 is lost, the new rank 0 runs
    the block.
    """

    def wait_for_main() -> bytes:
        if communicator.world.is_main:
            raise _IsMain  # leaves `together` before the operation counts as complete
        return from_rank_0(b"", communicator)

    try:
        failure = together(wait_for_main)
    except _IsMain:
        pass
    else:
        if failure:
            raise PacelineError(f"on rank 0: {failure.decode()}")
        yield
        return
    try:
        yield
    except BaseException as error:
        with suppress(CommunicationError):  # raise the first error
            from_rank_0(f"{type(error).__name__}: {error}".encode(), communicator)
        raise
    together(lambda: from_rank_0(b"", communicator))


class _IsMain(Exception):
    """This worker is rank 0."""


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return "a number"


def _reduced(rows: torch.Tensor, how: Reduction) -> torch.Tensor:
    if how == "mean":
        return (rows if rows.is_floating_point() or rows.is_complex() else rows.double()).mean(0)
    if how == "sum":
        return rows.sum(0)
    return rows.amax(0) if how == "max" else rows.amin(0)


def _shared(own: torch.Tensor, source: int, communicator: Communicator) -> torch.Tensor:
    """The message of rank `source`."""
    world = communicator.world
    if world.size == 1:
        return own
    num_bytes = torch.tensor([own.numel()], device=world.device)
    communicator.broadcast(num_bytes, source).wait()
    message = own if world.rank == source else torch.empty(int(num_bytes.item()), dtype=torch.uint8)
    for piece in message.split(PIECE_BYTES):
        carrier = piece.to(world.device)
        communicator.broadcast(carrier, source).wait()
        if world.rank != source:
            piece.copy_(carrier)
    return message


def _pack(value: Any) -> torch.Tensor:
    """Encode a value; one that cannot be encoded becomes a message with the reason, for all workers."""
    try:
        return encode(value, "value")
    except TypeError as error:
        return encode(_Refused(str(error)), "value", with_classes=True)


def _unpack(message: torch.Tensor, rank: int) -> Any:
    """Decode a message. The tensors of the value share its memory."""
    value = decode(message)
    if isinstance(value, _Refused):
        raise TypeError(f"the value of rank {rank} cannot be sent to other workers: {value.reason}")
    return value


class _Refused(NamedTuple):
    reason: str
