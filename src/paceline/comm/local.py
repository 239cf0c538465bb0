"""Several replicas inside one process, on one device or on several.

Each replica holds one member of a `LocalGroup`. An exchange happens when its last member calls, in that
member's thread. So replicas may run in threads, or one after another in a single thread: start the call on
every member, then wait on every member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


class LocalGroup:
    """The meeting point of the replicas of one process; `members[i]` is the communicator of replica i."""

    def __init__(self, devices: Sequence[torch.device | str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not devices:
            raise ValueError("a group needs at least one device")
        size = len(devices)
        self._lock = threading.Lock()
        self._meetings: dict[int, _Meeting] = {}
        self.members = tuple(
            LocalCommunicator(self, World(i, size, i, size, "local", torch.device(device)), timeout_s)
            for i, device in enumerate(devices)
        )

    def arrive(self, number: int, rank: int, operation: str, tensor: torch.Tensor) -> _Meeting:
        """Rank's contribution to exchange `number`; the last to arrive carries it out."""
        with self._lock:
            meeting = self._meetings.setdefault(number, _Meeting(operation))
            meeting.tensors[rank] = tensor
            if operation != meeting.operation or {t.numel() for t in meeting.tensors.values()} != {tensor.numel()}:
                meeting.error = CommunicationError(
                    f"exchange {number}: rank {rank} calls {operation} on {tensor.numel()} elements, "
                    f"others {meeting.operation} on {[t.numel() for t in meeting.tensors.values()]}: "
                    "every replica must make the same calls in the same order"
                )
            if len(meeting.tensors) == len(self.members):
                del self._meetings[number]
                if meeting.error is None:
                    _OPERATIONS[operation.partition(" ")[0]](meeting)
                meeting.done.set()
            elif meeting.error is not None:
                meeting.done.set()
            return meeting


class LocalCommunicator:
    """One replica's end of a `LocalGroup`."""

    def __init__(self, group: LocalGroup, world: World, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._group = group
        self._calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._arrive("all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        return self._arrive(f"broadcast from {source}", tensor)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        return

    def _arrive(self, operation: str, tensor: torch.Tensor) -> Pending:
        number, self._calls = self._calls, self._calls + 1
        meeting = self._group.arrive(number, self.world.rank, operation, tensor)
        return _PendingMeeting(meeting, self)


@dataclass
class _Meeting:
    operation: str
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    error: CommunicationError | None = None


@dataclass(frozen=True)
class _PendingMeeting:
    meeting: _Meeting
    communicator: LocalCommunicator

    def wait(self) -> None:
        me = self.communicator
        if not self.meeting.done.wait(me.timeout_s):
            missing = sorted(set(range(me.world.size)) - set(self.meeting.tensors))
            raise CommunicationTimeout(
                f"rank {me.world.rank} waited timeout_s={me.timeout_s:g} s in {self.meeting.operation}: "
                f"replicas {missing} did not call it"
            )
        if self.meeting.error is not None:
            raise self.meeting.error


@torch.no_grad()
def _all_reduce(meeting: _Meeting) -> None:
    # In rank order, whoever came last: the sum must not depend on the threads' timing.
    first, *others = (meeting.tensors[rank] for rank in sorted(meeting.tensors))
    for other in others:
        first.add_(other.to(first.device))
    for other in others:
        other.copy_(first)


@torch.no_grad()
def _broadcast(meeting: _Meeting) -> None:
    source = int(meeting.operation.rpartition(" ")[2])
    for rank, tensor in meeting.tensors.items():
        if rank != source:
            tensor.copy_(meeting.tensors[source])


_OPERATIONS: dict[str, Callable[[_Meeting], None]] = {"all_reduce": _all_reduce, "broadcast": _broadcast}
