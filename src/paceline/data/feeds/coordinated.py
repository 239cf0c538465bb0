"""The feed for steps that workers read in coordination: rank 0 reads for all (dispatched), or the data is a stream.

Both need communication before a step begins, to send batches or to learn which micro-batches exist. It runs ahead of
training, so a step is planned up to `STEPS_AHEAD` steps before it is taken.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline.comm.base import Communicator, Link
from paceline.core.errors import CommunicationError, CommunicationTimeout, PacelineError
from paceline.core.message import decode, encode
from paceline.core.secret import run_secret
from paceline.core.world import World
from paceline.data.feeds.base import DataSettings, PlanStep, Step
from paceline.data.feeds.readers import NO_TIMEOUT_S, ReaderProcesses, ReaderThread, ReaderTimeout
from paceline.data.feeds.sharded import Delivery, Epoch, Epochs
from paceline.data.sources.base import Read, reads_in_thread
from paceline.data.sources.streams import StreamReader
from paceline.plan.epoch import Position
from paceline.plan.shares import Plan, ranges

# Steps that are planned and read ahead if a thread or reader processes can do it.
STEPS_AHEAD = 2

# Makes the link of a world, with the timeouts of a message and of connecting, in seconds.
Connect: TypeAlias = Callable[[World, float, float], Link]

_MISSING = -1  # the number of samples of a micro-batch that does not exist
# The number of samples of each micro-batch of a step, and this worker's own micro-batches.
_StepData: TypeAlias = tuple[Sequence[int], Sequence[Read]]


class _PlannedStep(NamedTuple):
    position: Position
    epoch: Epoch
    plan: Plan

    @property
    def after(self) -> Position:
        return self.epoch.after(self.position, self.plan[-1].stop)


@dataclass(eq=False)
class CoordinatedFeed:
    """Keeps up to `STEPS_AHEAD` steps planned and in flight. `connect` is called if there are other workers."""

    data: InitVar[object]
    read: Callable[[Any], Read]
    epochs: Epochs
    settings: DataSettings
    plan_step: PlanStep
    communicator: Communicator
    connect: Connect

    def __post_init__(self, data: object) -> None:
        if self.settings.at_once > 1:
            raise ValueError(
                "physical_batch needs data with numbered samples and feed='sharded': leave it out, or choose a larger "
                "micro_batch"
            )
        if self.settings.prefetch is not None:
            raise ValueError(
                f"prefetch={self.settings.prefetch} has no effect on streams and dispatched data, which are read "
                f"{STEPS_AHEAD} steps ahead: set readers instead"
            )
        self._timeout_s = self.communicator.timeout_s
        self._deliver = Delivery(data, self.communicator.world.device, self.settings.weight_fn)
        self._in_background = self.settings.readers > 0 or reads_in_thread(data)
        self._num_ahead = STEPS_AHEAD if self._in_background else 0
        self._open()

    def _open(self) -> None:
        self._world = world = self.communicator.world
        # What runs ahead of training is idle while training is, for example in an evaluation. A step that needs the
        # data still waits at most timeout_s.
        limit_s = NO_TIMEOUT_S if self._in_background else self._timeout_s
        self._processes: ReaderProcesses | None = None
        self._link: _WatchedLink | None = None
        self._submit: Callable[[_PlannedStep], Callable[[], _StepData]] = partial(partial, self._load)
        with ExitStack() as cleanup:
            if self.settings.readers:
                self._processes = ReaderProcesses(self.read, self.settings.readers, limit_s)
                cleanup.callback(self._processes.close)
            if world.size > 1:
                self._link = _WatchedLink(self.connect(world, limit_s, self._timeout_s))
                cleanup.callback(self._link.close)
            if self._in_background:
                thread = ReaderThread(self._load, self._timeout_s, abort=self._abort, explain=self._explain_timeout)
                self._submit = thread.submit
                cleanup.callback(thread.close)
            self._cleanup = cleanup.pop_all()
        self._in_flight: deque[tuple[_PlannedStep, Callable[[], _StepData]]] = deque()
        self._current: tuple[_PlannedStep, _StepData] | None = None
        self._plan: Plan = ()
        self._own: Sequence[Read] = ()

    def begin_step(self, position: Position) -> Step | None:
        if self._current is None or self._current[0].position != position:  # else the step is repeated
            self._current = self._next_step(position)
        planned, (counts, own) = self._current
        # Missing micro-batches are left out and the others renumbered, independent of how the step is divided.
        self._plan = plan = ranges([sum(counts[k] != _MISSING for k in share) for share in planned.plan])
        if not plan[-1].stop:
            self._drop_planned()
            if not position.micro_batch:
                raise ValueError(f"epoch {position.epoch} of the data has no samples: give at least one")
            return None
        self._own = [read for read in own if read.exists]
        num_samples = sum(count for count in counts if count != _MISSING)
        is_last = planned.epoch.num_left(position) == plan[-1].stop and position.micro_batch > 0
        total_weight = num_samples if self._deliver.knows_weights else None
        return Step(plan, num_samples, total_weight, is_last or plan != planned.plan, planned.after)

    def micro_batch(self, numbers: range) -> tuple[Any, int]:
        return self._deliver(self._own[numbers[0] - self._plan[self._world.rank].start])

    def reconnect(self) -> None:
        # Data read ahead was planned for other workers, and a stream's readers are ahead of the position.
        self.close()
        self.epochs.reconnect()
        self._open()

    def close(self) -> None:
        self._in_flight.clear()
        self._cleanup.close()

    def _next_step(self, position: Position) -> tuple[_PlannedStep, _StepData]:
        if self._in_flight and self._in_flight[0][0].position[:2] != position[:2]:
            self._drop_planned()  # the run's position has changed
        self.epochs.begin(position.epoch)
        upcoming = self._in_flight[-1][0].after if self._in_flight else position
        while len(self._in_flight) <= self._num_ahead and (epoch := self.epochs.known(upcoming.epoch)) is not None:
            planned = _PlannedStep(upcoming, epoch, self.plan_step(epoch.num_left(upcoming)))
            self._in_flight.append((planned, self._submit(planned)))
            upcoming = planned.after
        planned, answer = self._in_flight.popleft()
        return planned._replace(position=position), answer()

    def _drop_planned(self) -> None:
        """All workers do this at the same step. Requests in flight are completed first."""
        for _, answer in self._in_flight:
            answer()
        self._in_flight.clear()
        self._current = None

    # The methods below run in the reading thread, if there is one.

    def _load(self, planned: _PlannedStep) -> _StepData:
        """Read a step's micro-batches, and exchange the parts that other workers need."""
        plan, link = planned.plan, self._link
        if link is None or self.settings.feed == "sharded":
            counts, own = self._read_all(planned, plan[self._world.rank])
            return counts if link is None else _all_counts(counts, plan, link), own
        if link.world.rank != 0:
            counts, own = _receive(link)
            return counts, own
        counts, reads = self._read_all(planned, range(plan[-1].stop))
        for rank, numbers in enumerate(plan[1:], 1):
            _send(link, (counts, [reads[k] for k in numbers]), rank)
        return counts, [reads[k] for k in plan[0]]

    def _read_all(self, planned: _PlannedStep, numbers: range) -> tuple[list[int], list[Read]]:
        """These micro-batches, after the number of samples of each."""
        read, first = self.read, planned.position.micro_batch
        requests = [planned.epoch.request(first + k) for k in numbers]
        if self._processes is None:
            reads = [read(request) for request in requests]
        else:
            answers = []
            for request in requests:
                reader = read.process_of(request, self.settings.readers) if isinstance(read, StreamReader) else None
                answers.append(self._processes.submit(request, reader))
            reads = [answer() for answer in answers]
        return [each.num_samples if each.exists else _MISSING for each in reads], reads

    def _abort(self) -> None:
        if self._link is not None:
            self._link.abort()
        if self._processes is not None:
            self._processes.kill()

    def _explain_timeout(self) -> PacelineError | None:
        """The error if the reading thread waits for another worker or a reader process."""
        if self._link is not None and self._link.activity:
            return CommunicationTimeout(
                f"rank {self._world.rank} waited timeout_s={self._timeout_s:g} s for its data, in "
                f"{self._link.activity}: that rank hangs, or its work takes longer than the timeout"
            )
        stacks = "" if self._processes is None else self._processes.stacks()
        return ReaderTimeout.in_processes(self._timeout_s, stacks) if stacks else None


class _WatchedLink:
    """A link that knows which message is in flight: `activity`, empty if none."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.activity = ""
        self.world, self.is_trusted = link.world, link.is_trusted
        self.abort, self.close = link.abort, link.close

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.activity = f"send to rank {to}"
        self._link.send(tensor, to)
        self.activity = ""

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self.activity = f"receive from rank {source}"
        self._link.receive(tensor, source)
        self.activity = ""
        return tensor


def _all_counts(own: Sequence[int], plan: Plan, link: _WatchedLink) -> list[int]:
    """The counts of all workers, added up by rank 0."""
    mine, others = plan[link.world.rank], range(1, link.world.size)
    counts = torch.zeros(plan[-1].stop, dtype=torch.int64)
    counts[mine.start : mine.stop] = torch.tensor(own, dtype=torch.int64)
    if link.world.rank != 0:
        link.send(counts, 0)
        link.receive(counts, 0)
        return counts.tolist()
    for rank in others:
        counts += link.receive(torch.empty_like(counts), rank)
    for rank in others:
        link.send(counts, rank)
    return counts.tolist()


# The formats of a message: one that cannot hold code, or pickle.
_PLAIN, _PICKLED = 0, 1
_PURPOSE = "a batch of rank 0"


def _send(link: _WatchedLink, value: Any, to: int) -> None:
    try:
        kind, message = _PLAIN, encode(value, "batch", with_classes=True)
    except TypeError as error:
        secret = run_secret()
        if secret is None and not link.is_trusted:
            raise TypeError(
                f"{error}. Workers on other hosts accept pickled batches only from authenticated peers: give the run a "
                "secret (--secret-file, or the variable PACELINE_SECRET_FILE under torchrun; see docs/security.md), or "
                "let collate_fn return tensors, numbers, strings, lists, tuples and dicts"
            ) from None
        content = pickle.dumps(value)
        signed = content if secret is None else secret.sign(content, _PURPOSE)
        kind, message = _PICKLED, torch.frombuffer(bytearray(signed), dtype=torch.uint8)
    link.send(torch.tensor([kind, len(message)], dtype=torch.int64), to)
    link.send(message, to)


def _receive(link: _WatchedLink) -> Any:
    kind, size = link.receive(torch.empty(2, dtype=torch.int64), 0).tolist()
    message = link.receive(torch.empty(size, dtype=torch.uint8), 0)
    if kind == _PLAIN:
        return decode(message)
    secret = run_secret()
    if secret is None and not link.is_trusted:
        raise CommunicationError(
            "a pickled batch arrived from rank 0, which is not authenticated: give the run a secret (--secret-file; "
            "see docs/security.md)"
        )
    content = message.numpy().tobytes()
    return pickle.loads(content if secret is None else secret.check(content, _PURPOSE))
