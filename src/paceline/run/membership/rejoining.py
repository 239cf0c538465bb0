"""Brings a worker into a new generation: connects to its members, agrees on the state, and continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import count
from time import monotonic
from typing import Any, TypeVar

import torch

from paceline.comm.messages import gather
from paceline.core.errors import CommunicationError, GenerationEnded, MisuseError, PacelineError
from paceline.core.events import Events
from paceline.core.message import decode, encode
from paceline.run.evaluation import collect
from paceline.run.membership.board import Activity
from paceline.run.membership.communicator import ElasticCommunicator, LeftRun
from paceline.run.membership.generation import Generation
from paceline.run.saving.checkpointer import Checkpointer
from paceline.run.saving.state import HasState, load_random_state, load_replica, random_state, replica_states
from paceline.run.settings import Optimization
from paceline.run.sharding.divide import make_division
from paceline.run.sharding.optimizers import PieceOptimizers
from paceline.run.sharding.update import Phase, ShardedUpdate
from paceline.run.step import loop_state
from paceline.run.step.ema import PieceAverage, WeightAverage
from paceline.run.step.loop import Loop
from paceline.sync.compression.residuals import Residuals

T = TypeVar("T")

# Numbers the runs that this process sets up, in sequence or concurrently.
_runs_of_process = count()


@dataclass(frozen=True)
class _Progress:
    """How far a worker is. Steps and operations are collective, so two workers differ by at most one of them.

    The end of a stream's epoch is collective too: a worker that knows of it is one epoch ahead, at the same step.

    If replicas are averaged, averages are collective instead of steps: two workers differ by at most one average and
    the steps since the one before.
    """

    epoch: int
    step: int
    operations: int
    averages: int
    is_joining: bool
    run: int  # the number of the run in its process
    phase: Phase = Phase.NONE  # of the update, if the state is divided
    division: int = -1  # the generation of the division, if the state is divided

    @property
    def total(self) -> int:
        return self.epoch + self.step + self.operations + self.averages

    def needs_state_of(self, ahead: _Progress) -> bool:
        return self.is_joining or self.step < ahead.step or self.averages < ahead.averages


class Rejoining:
    """Brings this worker into the newest generation, as often as needed.

    The work between two changes consists of steps and operations (an evaluation, a save), which are collective. The
    remaining workers repeat a step or operation that a loss interrupted. If only some workers had completed it, the
    others take over their state or result.
    """

    def __init__(
        self,
        communicator: ElasticCommunicator,
        loop: Loop,
        checkpointer: Checkpointer,
        average: WeightAverage | None,
        events: Events,
        optimization: Optimization,
    ) -> None:
        self._communicator = communicator
        self._loop = loop
        self._checkpointer = checkpointer
        self._average = average
        self._events = events
        self._row = communicator.membership.row
        self._base = communicator.generation  # the generation of the planner's ranks
        self._number = next(_runs_of_process)
        self._num_operations = 0
        self._result: Any = None  # of the last operation
        self._is_operating = False
        self._num_unsent_steps = 0  # of a worker, when the last generation ended
        self._met: list[_Progress] | None = None  # by rank in the newest generation, until it has rejoined
        self._before: Generation | None = None  # the last complete generation, until the newest one has rejoined
        self._optimization = optimization
        self._divided_in = [self._base]  # the generation of the present division, then of the one before

    def enter(self) -> None:
        """Set-up is complete: from now on this worker can continue after a loss. A newcomer joins the others here."""
        if self._communicator.can_recover:
            return
        self._communicator.can_recover = True
        if self._communicator.is_joining:
            self.rejoin(None)
        else:
            self._note_entered()
        self._row.enter(Activity.ELSEWHERE)

    @property
    def is_change_pending(self) -> bool:
        """Whether workers will join or leave after the current step."""
        return self._communicator.membership.board.newest != self._communicator.generation.number

    def note(self, *, is_computing: bool) -> None:
        """Report the activity to the agent, which limits the time of a micro-batch but not of hooks."""
        self._row.enter(Activity.COMPUTING if is_computing else Activity.ELSEWHERE)
        self._row.note_steps(self._loop.position.step)

    def run(self, operation: Callable[[], T]) -> T:
        """Run a collective operation outside of steps, and repeat it if a loss interrupts it. Returns its result."""
        if self._is_operating or not self._communicator.can_recover:
            return operation()
        self._row.enter(Activity.ELSEWHERE)
        self._is_operating, number = True, self._num_operations
        try:
            while self._num_operations == number:
                try:
                    self._result = operation()
                    self._num_operations += 1
                except (GenerationEnded, CommunicationError) as error:
                    self.rejoin(error)
            result: T = self._result
            return result
        finally:
            self._is_operating = False

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of the worker with rank `source` at the call. Its rank may change before the value is sent."""
        communicator = self._communicator
        before = communicator.generation
        is_valid = 0 <= source < len(before.members)

        def send() -> Any:
            rank = communicator.generation.rank_of(before.members[source]) if is_valid else source
            if rank is None:  # lost
                have_value = collect.gather(value is not None, communicator)
                if True not in have_value:
                    raise PacelineError(
                        f"rank {source} was lost while its value was broadcast, and no other worker has one: give a "
                        "value on all workers, or compute it in trainer.main_first()"
                    )
                rank = have_value.index(True)
            return collect.broadcast(value, rank, communicator)

        return self.run(send)

    def ask_to_leave(self, rank: int) -> None:
        """Request that the worker with this rank leaves after one of the next steps. Called in any thread."""
        members = self._communicator.generation.members
        if not 0 <= rank < len(members):
            raise ValueError(f"rank={rank} is not in a world of {len(members)}: choose 0 <= rank < {len(members)}")
        if len(members) == 1:
            raise ValueError("the only worker cannot leave: stop the run instead")
        self._communicator.membership.ask_to_leave(members[rank])

    def rejoin(self, error: BaseException | None) -> None:
        """An exchange failed with this error, or a change is due. Return when the run can continue, or raise it."""
        began_s = monotonic()
        self._interrupt(error)
        self._repeat(self._rejoin)
        before, self._before = self._before or self._communicator.generation, None
        self._row.enter(Activity.ELSEWHERE)
        self._emit(before, monotonic() - began_s)

    def resolve_step(self, error: BaseException) -> bool:
        """Whether to complete the update of the open step, for which this worker has all data. `rejoin` follows.

        If any worker has begun its update, all had the data and complete it. Otherwise none has changed anything.
        """
        self._interrupt(error)
        self._repeat(self._meet)
        self._row.enter(Activity.ELSEWHERE)
        assert self._met is not None
        own = self._met[self._communicator.world.rank]
        return own.step > self._loop.position.step

    def _interrupt(self, error: BaseException | None) -> None:
        self._before = self._before or self._communicator.generation
        self._row.enter(Activity.WAITING)  # for the others, without a time limit
        if isinstance(error, CommunicationError):  # of a connection other than the communicator
            with suppress(GenerationEnded):
                self._communicator.interrupt(error)

    def _repeat(self, attempt: Callable[[], None]) -> None:
        """Repeat the attempt until it completes without another loss."""
        while True:
            try:
                return attempt()
            except GenerationEnded:
                self._met = None
            except CommunicationError as another:
                self._met = None
                with suppress(GenerationEnded):
                    self._communicator.interrupt(another)

    def _rejoin(self) -> None:
        if self._met is None:
            self._meet()
        assert self._met is not None
        workers, self._met = self._met, None
        if (averages := self._loop.exchange.averages) is not None:
            averages.drop()
            self._num_unsent_steps = averages.num_unsent_steps
        self._take_over_state(self._communicator.generation, workers)
        self._loop.reconnect()
        self._checkpointer.reconnect(self._loop)
        self._note_entered()

    def _meet(self) -> None:
        """Connect to the members of the newest generation, and gather their progress."""
        communicator, loop = self._communicator, self._loop
        try:
            communicator.rejoin()
        except LeftRun:
            self._checkpointer.leave()  # now: the user's code, or a logger, may take long to end
            raise
        num_averages = 0 if loop.exchange.averages is None else loop.exchange.averages.num_completed
        own = _Progress(
            loop.position.epoch,
            loop.position.step,
            self._num_operations,
            num_averages,
            communicator.is_joining,
            self._number,
            loop.update.phase if isinstance(loop.update, ShardedUpdate) else Phase.NONE,
            -1 if loop.replica.pieces is None else self._divided_in[0].number,
        )
        workers = [_Progress(**json.loads(text)) for text in gather(json.dumps(asdict(own)), communicator)]
        self._met = workers if loop.replica.pieces is None else _after_update(workers)

    def _note_entered(self) -> None:
        self._row.note_steps(self._loop.position.step)
        self._row.note_entered(self._communicator.generation)

    def _take_over_state(self, generation: Generation, workers: list[_Progress]) -> None:
        """Bring all workers, newcomers included, to the state of the most advanced one."""
        communicator, loop = self._communicator, self._loop
        rank = communicator.world.rank
        own = workers[rank]
        holders = [rank for rank, each in enumerate(workers) if not each.is_joining]
        if not holders:
            raise CommunicationError("all workers with the state of the run are lost: it restarts")
        source = max(holders, key=lambda rank: (workers[rank].total, -rank))
        ahead = workers[source]
        self._check_same_run(own, workers, ahead)
        base, planner = collect.broadcast((self._base.to_json(), loop.planner.handover()), source, communicator)
        is_state_sent = any(each.needs_state_of(ahead) for each in workers)
        if is_state_sent:
            state = _shared(self._message() if rank == source else None, source, communicator)
            if own.needs_state_of(ahead):
                self._load(state, is_joining=own.is_joining)
        if loop.position.epoch < ahead.epoch:  # this worker lost who would have told it that there is no more data
            loop.next_epoch()
        if any(each.operations < ahead.operations and not each.is_joining for each in workers):
            result = collect.broadcast(self._result if rank == source else None, source, communicator)
            if own.operations < ahead.operations:
                self._result = result
        if loop.replica.pieces is not None:
            self._divide(loop.replica.pieces, workers, source)
        self._num_operations, communicator.is_joining = ahead.operations, False
        # All plan from the same measurements: some workers may not have been in the previous generation.
        loop.regroup(planner, generation.previous_ranks(Generation.from_json(base)))
        unknown = (None,) * len(workers)
        loop.times.regroup(unknown if own.is_joining else generation.previous_ranks(self._base))
        self._base = generation
        if is_state_sent:
            loop.replica_check.compare(loop.position.step)

    def _divide(self, pieces: PieceOptimizers, workers: list[_Progress], source: int) -> None:
        """Divide the optimizer's state among the workers of this generation, and send all weights to each of them."""
        communicator, generation = self._communicator, self._communicator.generation
        numbers = {each.division for each in workers if not each.is_joining}
        if len(numbers) > 1 and workers[communicator.world.rank].division == max(numbers):
            # Another worker was lost when only some had completed this; nothing has changed since.
            pieces.revert()
            self._divided_in = self._divided_in[1:]
        division = pieces.shards.division
        ranks = generation.previous_ranks(self._divided_in[0])
        sources = [next((ranks.index(rank) for rank in c.holders if rank in ranks), None) for c in division.chunks]
        names = self._loop.replica.names_of(division.parameters[::-1])  # `cover` reverses them
        exchange = self._loop.exchange.state_dict()
        sources, names, exchange = collect.broadcast((sources, names, exchange), source, communicator)
        if None in sources:
            raise CommunicationError(
                "a part of the optimizer's state was held by lost workers only: the run restarts from its newest "
                "checkpoint; a larger redundancy= survives more simultaneous losses"
            )
        self._loop.exchange.load_state_dict(exchange)  # some workers may have widened grids, to repeat the step
        known = self._loop.replica.parameters_by_name()
        parameters = {name: known[name] for name in names}
        with nullcontext() if self._average is None else self._average.not_in_model():
            pieces.move(make_division(self._optimization, communicator), sources, parameters)
        self._divided_in = [generation, *self._divided_in[:1]]

    def _check_same_run(self, own: _Progress, workers: list[_Progress], ahead: _Progress) -> None:
        if own.run != ahead.run:
            raise MisuseError(
                f"this worker was started to join a run, but it is run number {ahead.run + 1} of the other workers and "
                f"number {own.run + 1} of this one: a script that trains several runs in sequence cannot replace "
                "workers; set max_restarts=0"
            )
        if any(each.run != ahead.run for each in workers):
            raise CommunicationError("a worker that tried to join was in another run")

    def _message(self) -> torch.Tensor:
        """The state of the run on this worker."""
        with nullcontext() if self._average is None else self._average.not_in_model():
            state = {
                "replica": replica_states(self._loop.replica),
                "loop": loop_state.handover(self._loop),
                "average": None if self._whole_average is None else self._whole_average.state_dict(),
                "registered": {name: thing.state_dict() for name, thing in self._handed_over.items()},
                "random": random_state(self._communicator.world.device),
            }
            return encode(state, "state")

    def _load(self, state: Mapping[str, Any], *, is_joining: bool) -> None:
        load_replica(self._loop.replica, state["replica"])
        loop_state.take_over(self._loop, state["loop"], is_joining=is_joining)
        if self._whole_average is not None:
            self._whole_average.load_state_dict(state["average"])
        if not is_joining:
            return  # the step's hooks and the loop's body have yet to run: they change the user's own state
        for name, thing in self._handed_over.items():
            thing.load_state_dict(state["registered"][name])
        load_random_state(state["random"], self._communicator.world.device)

    @property
    def _whole_average(self) -> WeightAverage | None:
        """None if each worker has a part of it, which moves with the optimizer's state."""
        return None if isinstance(self._average, PieceAverage) else self._average

    @property
    def _handed_over(self) -> dict[str, HasState]:
        """The user's own state. Residuals belong to one worker and are not passed on."""
        registered = self._checkpointer.registered.items()
        return {name: thing for name, thing in registered if not isinstance(thing, Residuals | PieceAverage)}

    def _emit(self, before: Generation, seconds: float) -> None:
        now = self._communicator.generation
        if self._communicator.membership.member not in before.members:
            before = now  # this worker has joined and does not know which left
        left = {member: before.rank_of(member) for member in before.members if member not in now.members}
        reasons = dict.fromkeys(now.left.get(member, "it was lost") for member in left)
        joined = [rank for rank, member in enumerate(now.members) if member not in before.members]
        self._events.emit(
            "world",
            generation=now.number,
            size=len(now.members),
            left=list(left.values()),
            joined=joined,
            reason="; ".join(reasons),
            seconds=round(seconds, 3),
            **({} if self._loop.exchange.averages is None else {"lost_steps": len(left) * self._num_unsent_steps}),
        )


def _after_update(workers: list[_Progress]) -> list[_Progress]:
    """The progress of workers with divided state, after they complete an update that another worker has begun."""
    steps = [each.step for each in workers if not each.is_joining]
    open_steps = [each for each in workers if not each.is_joining and each.step == min(steps)]
    is_agreed = max(steps) > min(steps) or Phase.AGREED in [each.phase for each in open_steps]
    if not is_agreed and not all(each.phase for each in open_steps):
        return workers
    return [replace(each, step=min(steps) + 1) if each in open_steps else each for each in workers]


def _shared(message: torch.Tensor | None, source: int, communicator: ElasticCommunicator) -> Any:
    """The state in the message of rank `source`, on every worker, compared with its digest."""
    message, digest = collect.broadcast((message, None if message is None else _digest(message)), source, communicator)
    if (found := _digest(message)) != digest:
        raise MisuseError(
            f"the state of rank {source} arrived on rank {communicator.world.rank} with digest {found[:12]} instead of "
            f"{digest[:12]}: check the memory and the network of this machine"
        )
    return decode(message)


def _digest(message: torch.Tensor) -> str:
    content: Any = message.numpy()
    return sha256(content).hexdigest()
