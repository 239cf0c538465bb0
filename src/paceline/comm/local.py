"""Several replicas inside one process, on one device or on several.

Each replica holds one member of a `LocalGroup`. An exchange happens when its last member calls, in that
member's thread. So replicas may run in threads, or one after another in a single thread: start the call on
every member, then wait on every member.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S, Pending
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World

# An exchange, given the replicas' tensors in rank order.
Operation = Callable[[list[torch.Tensor]], None]


class LocalGroup:
    """The meeting point of the replicas of one process; `members[i]` is the communicator of replica i."""

    def __init__(self, devices: Sequence[torch.device | str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not devices:
            raise ValueError("a group needs at least one device")
        size = len(devices)
        self._lock = threading.Lock()
        self._meetings: dict[int, _Meeting] = {}
        self._left: set[int] = set()
        # What was sent and not yet received, by sender and receiver.
        self._mail: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._mail_changed = threading.Condition(self._lock)
        self.members = tuple(
            LocalCommunicator(self, World(i, size, i, size, "local", torch.device(device)), timeout_s)
            for i, device in enumerate(devices)
        )

    def arrive(self, number: int, rank: int, name: str, operation: Operation, tensor: torch.Tensor) -> _Meeting:
        """Rank's contribution to exchange `number`; the last to arrive carries it out."""
        call = f"{name} on {tuple(tensor.shape)} of {tensor.dtype}"
        with self._lock:
            meeting = self._meetings.setdefault(number, _Meeting(rank, call))
            meeting.tensors[rank] = tensor
            if call != meeting.call:
                meeting.fail(
                    f"exchange {number}: rank {rank} calls {call}, rank {meeting.caller} {meeting.call}: "
                    "every replica must make the same calls in the same order"
                )
            elif absent := self._left - set(meeting.tensors):
                meeting.fail(_gone(min(absent), meeting))
            if len(meeting.tensors) == len(self.members):
                del self._meetings[number]
                meeting.carry_out(operation)
            return meeting

    def post(self, source: int, to: int, tensor: torch.Tensor) -> None:
        with self._mail_changed:
            self._mail[source, to].append(tensor)
            self._mail_changed.notify_all()

    def fetch(self, source: int, to: int, timeout_s: float) -> torch.Tensor:
        """The oldest tensor that `source` posted to `to`."""
        with self._mail_changed:
            mail = self._mail[source, to]
            if not self._mail_changed.wait_for(lambda: mail or source in self._left, timeout_s):
                raise CommunicationTimeout(
                    f"rank {to} waited timeout_s={timeout_s:g} s in receive: replica {source} did not send"
                )
            if not mail:
                raise CommunicationError(f"replica {source} closed its communicator before it sent to rank {to}")
            return mail.popleft()

    def leave(self, rank: int) -> None:
        """Rank makes no more calls: whoever waits for one, or will, is told."""
        with self._lock:
            self._left.add(rank)
            self._mail_changed.notify_all()
            for meeting in self._meetings.values():
                if rank not in meeting.tensors:
                    meeting.fail(_gone(rank, meeting))


class LocalCommunicator:
    """One replica's end of a `LocalGroup`."""

    def __init__(self, group: LocalGroup, world: World, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._group = group
        self._calls = 0

    is_trusted = True  # all of it is in this process

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._arrive("all_reduce", _all_reduce, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        if not 0 <= source < self.world.size:
            raise ValueError(f"source={source} is not a rank in a world of {self.world.size}")
        return self._arrive(f"broadcast from {source}", partial(_broadcast, source), tensor)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.post(self.world.rank, to, tensor.clone())

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._group.fetch(source, self.world.rank, self.timeout_s))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        self._group.leave(self.world.rank)

    def _arrive(self, name: str, operation: Operation, tensor: torch.Tensor) -> Pending:
        number, self._calls = self._calls, self._calls + 1
        meeting = self._group.arrive(number, self.world.rank, name, operation, tensor)
        return _PendingMeeting(meeting, self)


@dataclass
class _Meeting:
    """One exchange: `caller` was the first to come, and `call` is what everybody must call then."""

    caller: int
    call: str
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.done.set()

    def carry_out(self, operation: Operation) -> None:
        try:
            if self.error is None:
                # In rank order, whoever came last: the result must not depend on the threads' timing.
                operation([self.tensors[rank] for rank in sorted(self.tensors)])
        except RuntimeError as error:
            self.fail(f"{self.call} failed: {error}")
        self.done.set()


@dataclass(frozen=True)
class _PendingMeeting:
    meeting: _Meeting
    communicator: LocalCommunicator

    def wait(self) -> None:
        me = self.communicator
        if not self.meeting.done.wait(me.timeout_s):
            missing = sorted(set(range(me.world.size)) - set(self.meeting.tensors))
            raise CommunicationTimeout(
                f"rank {me.world.rank} waited timeout_s={me.timeout_s:g} s in {self.meeting.call}: "
                f"replicas {missing} did not call it"
            )
        if self.meeting.error is not None:
            raise CommunicationError(self.meeting.error)


def _gone(rank: int, meeting: _Meeting) -> str:
    return f"replica {rank} closed its communicator before {meeting.call}, which rank {meeting.caller} waits for"


@torch.no_grad()
def _all_reduce(tensors: list[torch.Tensor]) -> None:
    first, *others = tensors
    for other in others:
        first.add_(other.to(first.device))
    for other in others:
        other.copy_(first)


@torch.no_grad()
def _broadcast(source: int, tensors: list[torch.Tensor]) -> None:
    for rank, tensor in enumerate(tensors):
        if rank != source:
            tensor.copy_(tensors[source])
