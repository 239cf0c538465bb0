"""Steps that workers read together: one that reads for all (dispatched), or a stream whose end nobody knows.

Both need the workers to talk before a step begins: to hand over batches, or to learn which micro-batches there are.
That is done ahead of time, beside the training, so the plan of a step is made `ahead` steps before it is taken.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.comm.base import Link, PointToPoint
from paceline.core.errors import CommunicationError
from paceline.core.message import decode, encode
from paceline.core.secret import run_secret
from paceline.core.world import World
from paceline.data.feeds.base import PlanStep, Step
from paceline.data.feeds.device import DeviceCopier
from paceline.data.feeds.readers import Readers
from paceline.data.feeds.sharded import weight_of
from paceline.data.sources.base import Read
from paceline.plan.shares import Plan, ranges
from paceline.plan.steps import Position


class Planned(NamedTuple):
    """A step that will be taken: its first micro-batch in the epoch, and who takes which."""

    epoch: int
    first: int
    plan: Plan


# Instead of a micro-batch's number of samples, where it does not exist.
_NOT_THERE = -1


class Delivered(NamedTuple):
    """What came of it: how many samples each micro-batch has, if it exists, and this worker's."""

    num_samples: Sequence[int]
    own: Sequence[Read]


class Course(Protocol):
    """How an epoch goes on, as far as it is known beforehand."""

    def begin(self, epoch: int) -> None:
        """The run is in this epoch now; all workers say so together."""

    def num_left(self, position: Position) -> int:
        """Micro-batches from there to the epoch's end, if it has a known one; more than any step has if not; 0 if
        nobody knows the epoch before it begins."""

    def after(self, position: Position, num_micro_batches: int) -> Position: ...


class TogetherFeed:
    """Keeps `ahead` steps planned and under way, and hands them out one by one."""

    def __init__(
        self,
        course: Course,
        plan_step: PlanStep,
        deliver: Readers,
        rank: int,
        device: torch.device,
        *,
        ahead: int,
        knows_weights: bool = True,
        weight_fn: Callable[[Any], int] | None = None,
        tell: Callable[[Any], None] | None = None,
    ) -> None:
        self._course = course
        self._plan_step = plan_step
        self._deliver = deliver
        self._rank = rank
        self._ahead = ahead
        # In exact mode knowing them changes the last bit: that must not depend on how the same data is read.
        self._knows_weights = knows_weights and weight_fn is None
        self._weight_fn = weight_fn
        self._tell = tell
        self._to_device = DeviceCopier(device)
        self._under_way: deque[tuple[Position, Planned, Callable[[], Delivered]]] = deque()
        self._position: Position | None = None
        self._planned: Planned
        self._delivered: Delivered

    def begin_step(self, position: Position) -> Step | None:
        if position != self._position:  # else it is repeated
            self._take(position)
        counts = self._delivered.num_samples
        # What does not exist is left out, and the rest numbered anew: the same for every way of dividing the step.
        self._plan = ranges([sum(counts[k] != _NOT_THERE for k in own) for own in self._planned.plan])
        if not self._plan[-1].stop:
            self._give_up()
            if not position.micro_batch:
                raise ValueError(f"epoch {position.epoch} of the data has no sample: there is nothing to train on")
            return None
        num_samples = sum(count for count in counts if count != _NOT_THERE)
        is_last = self._course.num_left(position) == self._plan[-1].stop and position.micro_batch > 0
        is_cut = is_last or self._plan != self._planned.plan
        return Step(self._plan, num_samples, num_samples if self._knows_weights else None, is_cut)

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        read = self._existing[numbers[0] - self._plan[self._rank].start]
        if read.skipped and self._tell is not None:
            self._tell(read.skipped)
        if read.batch is None:
            return None, 0
        weight = read.num_samples if self._weight_fn is None else weight_of(read.batch, self._weight_fn)
        return self._to_device(read.batch), weight

    def after_step(self, position: Position) -> Position:
        return self._course.after(position, self._planned.plan[-1].stop)

    def close(self) -> None:
        self._under_way.clear()
        self._deliver.close()

    def _take(self, position: Position) -> None:
        if self._under_way and not _same_place(self._under_way[0][0], position):
            self._give_up()  # the run went elsewhere
        self._course.begin(position.epoch)
        self._plan_ahead(position)
        _, self._planned, answer = self._under_way.popleft()
        self._delivered = answer()
        self._existing = [read for read in self._delivered.own if _count(read) != _NOT_THERE]
        self._position = position

    def _plan_ahead(self, position: Position) -> None:
        if self._under_way:
            last, planned, _ = self._under_way[-1]
            position = self._course.after(last, planned.plan[-1].stop)
        while len(self._under_way) <= self._ahead and (num_left := self._course.num_left(position)):
            plan = self._plan_step(num_left)
            planned = Planned(position.epoch, position.micro_batch, plan)
            self._under_way.append((position, planned, self._deliver.submit(planned)))
            position = self._course.after(position, plan[-1].stop)

    def _give_up(self) -> None:
        """Drop what was planned. All workers do, at the same step; what is on its way still has to arrive."""
        for _, _, answer in self._under_way:
            answer()
        self._under_way.clear()
        self._position = None


def _count(read: Read) -> int:
    """How many samples it has; one whose samples were all left out exists too, as where every worker reads its own."""
    return read.num_samples if read.exists else _NOT_THERE


def _same_place(one: Position, other: Position) -> bool:
    return (one.epoch, one.micro_batch) == (other.epoch, other.micro_batch)


class Inline:
    """Does what is asked for when the answer is: nothing runs beside the step."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def submit(self, request: Any) -> Callable[[], Any]:
        return _Once(self._work, request)

    def close(self) -> None:
        return


class _Once:
    def __init__(self, work: Callable[[Any], Any], request: Any) -> None:
        self._work = work
        self._request = request

    def __call__(self) -> Any:
        return self._work(self._request)


class OwnParts:
    """Every worker reads its own part of the stream, and tells the others what it found."""

    def __init__(self, read: Callable[[Planned, range], Sequence[Read]], link: PointToPoint | None) -> None:
        self._read = read
        self._link = link  # None: there is nobody else

    def __call__(self, planned: Planned) -> Delivered:
        own = planned.plan[0 if self._link is None else self._link.world.rank]
        reads = self._read(planned, own)
        counts = torch.zeros(planned.plan[-1].stop, dtype=torch.int64)
        counts[own.start : own.stop] = torch.tensor([_count(read) for read in reads], dtype=torch.int64)
        if self._link is not None:
            _add_up(counts, self._link)
        return Delivered(counts.tolist(), reads)


def _add_up(numbers: torch.Tensor, link: PointToPoint) -> None:
    """The sum over all workers, on every worker, by way of rank 0."""
    if link.world.rank != 0:
        link.send(numbers, 0)
        link.receive(numbers, 0)
        return
    others = range(1, link.world.size)
    for rank in others:
        theirs = torch.empty_like(numbers)
        link.receive(theirs, rank)
        numbers += theirs
    for rank in others:
        link.send(numbers, rank)


class ReadByOne:
    """Rank 0 reads every micro-batch and sends each worker its own."""

    def __init__(self, read: Callable[[Planned, range], Sequence[Read]], link: Link) -> None:
        self._read = read
        self._link = link

    def __call__(self, planned: Planned) -> Delivered:
        if self._link.world.rank != 0:
            counts, own = _receive(self._link)
            return Delivered(counts, own)
        everything = range(planned.plan[-1].stop)
        reads = self._read(planned, everything)
        counts = [_count(read) for read in reads]
        for rank, numbers in enumerate(planned.plan):
            if rank != 0:
                _send(self._link, (counts, [reads[k] for k in numbers]), rank)
        return Delivered(counts, [reads[k] for k in planned.plan[0]])


class WatchedLink:
    """A link that tells what it is at: `doing` is empty while no message is under way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.doing = ""
        self.abort, self.close = link.abort, link.close

    @property
    def world(self) -> World:
        return self._link.world

    @property
    def is_trusted(self) -> bool:
        return self._link.is_trusted

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.doing = f"send to rank {to}"
        self._link.send(tensor, to)
        self.doing = ""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.doing = f"receive from rank {source}"
        self._link.receive(tensor, source)
        self.doing = ""


# How a message is written: in a format without code, or pickled.
_PLAIN, _PICKLED = 0, 1


def _send(link: Link, value: Any, to: int) -> None:
    kind, message = _encode(value, link.is_trusted)
    link.send(torch.tensor([kind, len(message)], dtype=torch.int64), to)
    link.send(message, to)


def _receive(link: Link) -> Any:
    head = torch.empty(2, dtype=torch.int64)
    link.receive(head, 0)
    kind, size = head.tolist()
    message = torch.empty(size, dtype=torch.uint8)
    link.receive(message, 0)
    return _decode(kind, message, link.is_trusted)


def _encode(value: Any, is_trusted: bool) -> tuple[int, torch.Tensor]:
    try:
        return _PLAIN, encode(value, "batch", with_classes=True)
    except TypeError as error:
        secret = run_secret()
        if secret is None and not is_trusted:
            raise TypeError(
                f"{error}. Workers on other hosts take what only pickle can hold from peers that prove who they are: "
                "give the run a secret (--secret-file, or the variable PACELINE_SECRET_FILE under torchrun; see "
                "docs/security.md), or let collate_fn return tensors, numbers, strings, lists, tuples and dicts"
            ) from None
    pickled = pickle.dumps(value)
    return _PICKLED, torch.frombuffer(
        bytearray(pickled if secret is None else secret.sign(pickled, _PURPOSE)), dtype=torch.uint8
    )


def _decode(kind: int, message: torch.Tensor, is_trusted: bool) -> Any:
    if kind == _PLAIN:
        return decode(message)
    secret = run_secret()
    if secret is None and not is_trusted:
        raise CommunicationError(
            "a pickled batch came from rank 0, which has not proved who it is: give the run a secret (--secret-file; "
            "see docs/security.md)"
        )
    content = message.numpy().tobytes()
    return pickle.loads(content if secret is None else secret.check(content, _PURPOSE))


_PURPOSE = "a batch of rank 0"
