"""The training loop: a step, from top to bottom.

The loop yields this worker's micro-batches, and `step` is called after each. It serves users who write
`for batch in epoch: ...` as well as entry points that run a function over micro-batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.checkpoint.policy import Decision
from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, GenerationEnded, MisuseError, NonFiniteError
from paceline.core.events import Events
from paceline.core.generators import generators_of
from paceline.core.seeding import Purpose, derive_seed
from paceline.core.timing import Timing
from paceline.data.feeds.base import Feed, Step
from paceline.data.feeds.sharded import passes
from paceline.observe.timeline.recorder import Recorder
from paceline.plan.epoch import Position
from paceline.plan.shares import Plan, sizes
from paceline.run.config import RunConfig
from paceline.run.report import Report
from paceline.run.saving.stopping import Stopped
from paceline.run.step import checks, gc_policy
from paceline.run.step.build import share_weights
from paceline.run.step.checks import Agreement, FiniteWatch, ReplicaCheck
from paceline.run.step.ema import WeightAverage
from paceline.run.step.gc_policy import GcPolicy
from paceline.run.step.out_of_memory import explain_out_of_memory
from paceline.run.step.planner import Planner
from paceline.run.step.replica import Number, Replica, Update
from paceline.run.step.stopwatch import Account, stopwatch_for
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.buffers import Buffers
from paceline.sync.loss_scale import LossScale
from paceline.sync.numbers import LEFT, KnownNumbers, LocalNumbers, Numbers, WorkerMessage, left_error
from paceline.sync.strategy import GradientExchange, UpdateUnless

if TYPE_CHECKING:
    from paceline.run.saving.checkpointer import Checkpointer

# Measure one of this many steps if no plan depends on it.
SELDOM_MEASURED = 16
NO_STEP = Step((), 0, None, is_cut=False)  # before the first


class Recovery(Protocol):
    """How a run goes on when its workers change."""

    @property
    def is_change_pending(self) -> bool:
        """Whether workers are to join or leave after the current step."""

    def note(self, *, is_computing: bool) -> None:
        """This worker begins a micro-batch, or a part of the run that may take any time."""

    def rejoin(self, error: BaseException | None) -> None:
        """Return when the run can go on, or raise the error. None: workers join or leave between two steps."""


class Loop:
    """The steps of one worker."""

    def __init__(
        self,
        config: RunConfig,
        communicator: Communicator,
        replica: Replica,
        exchange: GradientExchange,
        feed: Feed,
        planner: Planner,
        events: Events,
        checkpointer: Checkpointer,
        average: WeightAverage | None,
        timeline: Recorder,
        collections: GcPolicy,
    ) -> None:
        world = communicator.world
        self.position = Position()
        self.max_steps: int | None = None
        self.replica = replica
        self._config = config
        self._world = world
        self._planner = planner
        replica.note_schedulers()  # a checkpoint may have been loaded
        self._usual_plan: Plan = ()
        self._step = NO_STEP
        self._at_once = config.micro_batches_at_once(world.rank)
        self._exchange = exchange
        self._feed = feed
        self._generators = generators_of(world.device)
        self._step_to_seed: int | None = None  # the step whose seed for all workers was not used yet
        self._watch = FiniteWatch()
        # One worker needs no times for its plan.
        is_planned = not isinstance(communicator, SingleCommunicator) or config.strategy != "gradients"
        self._stopwatch = stopwatch_for(world.device, timeline, 1 if is_planned else SELDOM_MEASURED)
        self._timeline = timeline
        self._account = Account(world.size)
        self._events = events
        self._checkpointer = checkpointer
        self._average = average
        self._gc_policy = collections
        self._loss_scale = LossScale() if config.precision == "fp16" else None
        # fp16 needs the norm even if nothing is clipped.
        limit = math.inf if config.max_grad_norm is None and self._loss_scale else config.max_grad_norm
        self.update = Update(replica, limit)
        self._has_norm = limit is not None
        # Otherwise a GPU is idle while the host waits to know whether exact sums fit their grids.
        self._may_update_early = config.exact and world.device.type == "cuda"
        self._hooks: list[tuple[int, Callable[[StepRecord], object]]] = []
        self._epoch_hooks: list[tuple[int, Callable[[int], object]]] = []
        self._gradient_hooks: list[Callable[[Mapping[str, torch.Tensor]], object]] = []
        self._parameter_hooks: list[Callable[[], object]] = []
        self._agreement = Agreement(replica, communicator)
        # Averaged replicas differ between two averages.
        check_of = communicator if not isinstance(config.strategy, Averaging) else None
        self._replica_check = ReplicaCheck(replica, check_of)
        self._communicator = communicator
        self._added: list[torch.Tensor] | None = None  # new parameters, trained once all workers have them
        self._requested_rate: tuple[float, int] | None = None
        self._may_request_rates = self._can_request_rates()
        self._loss: torch.Tensor | None = None
        self.weight = 0  # of the open micro-batch
        self._is_open = False
        self._is_last = True  # of this worker's micro-batches of the step
        self.is_inside_epoch = self.is_in_hook = self.is_closed = False
        self._may_end_epoch = False
        self._left_epoch: int | None = None  # left by `break`
        self._is_left_open = False  # the work at the end of an epoch is still due
        self.is_repeating = False  # exact mode repeats this step
        self.last_record: StepRecord | None = None
        self._due: deque[Callable[[], None]] = deque()  # hooks of the last step, and of the epoch that it has ended
        self._ended_epoch = -1  # the last one whose end was handled
        self._recovery: Recovery | None = None

    def micro_batches(self, epoch: int) -> Iterator[Any]:
        """This worker's micro-batches of an epoch; `step` must be called after each.

        Steps in which this worker has no share are completed here. A step that exact mode repeats does not advance the
        position: its micro-batches are yielded again.
        """
        self.is_inside_epoch = True
        self._timeline.event("epoch begin", number=epoch)
        self._gc_policy.begin_epoch()
        self._begun_at: Position | None = None
        try:
            while self.position.epoch == epoch and not self.is_over:
                try:
                    if (mine := self._next_share()) is None:
                        break
                    for numbers in passes(mine, self._at_once):
                        batch = self._begin_micro_batch(numbers, is_last=numbers.stop == mine.stop)
                        if batch is not None:
                            yield batch
                        else:
                            self.step()  # every sample of it was bad
                        if self._is_open:
                            raise MisuseError(
                                "the next micro-batch was asked for before step() was called for this one"
                            )
                        if self._is_last:
                            break  # completed, or abandoned because a worker was lost
                    if not mine:
                        self._finish_step()
                except (GenerationEnded, CommunicationError) as error:
                    self._recover(error)
            self._complete_epoch()
        except GeneratorExit:  # `break`, or an exception in the loop's body
            self._left_epoch, self._is_left_open = epoch, True
            raise
        finally:
            self._gc_policy.end_epoch()
            self.is_inside_epoch = False
            if self._recovery is not None:
                self._recovery.note(is_computing=False)
            # Several workers keep the step open until the others have been told.
            if self._is_step_under_way and (self._world.size == 1 or self._left_epoch is None):
                self.abandon()

    def _next_share(self) -> range | None:
        """Begin the next step, after what is due before it; None if the epoch is over."""
        if self._checkpointer.is_active:
            self._save_or_stop()
        if self.position.step % gc_policy.EVERY_STEPS == 0:
            self._gc_policy.collect()
        mine = self._begin_step()
        self.is_repeating, self._begun_at = self._begun_at == self.position, self.position
        return mine

    def _save_or_stop(self) -> None:
        decision = self._checkpointer.decide(self)
        if decision is Decision.CHANGE:
            assert self._recovery is not None, "nobody else asks for it"
            self._checkpointer.complete_writing()
            self._recovery.rejoin(None)
            self._save_or_stop()
        elif decision is Decision.SAVE:
            self._checkpointer.save_due(self)
        elif decision is Decision.STOP:
            self._checkpointer.stop(self)
            raise Stopped(self.position.step)

    def abandon(self) -> None:
        """Drop the step under way, if any."""
        if self._is_step_under_way:
            self._is_open, self._is_last = False, True
            self._exchange.abandon()

    def end_epoch(self) -> None:
        """End the epoch after the current step. Called in one of its hooks."""
        if not self._may_end_epoch or self.last_record is None:
            raise MisuseError(
                "end_epoch() ends an epoch on all workers after the same step: call it in a hook of trainer.every, "
                "such as trainer.every(100, lambda record: trainer.end_epoch())"
            )
        if self.position.epoch == self.last_record.epoch:  # else that was the epoch's last step
            self.position = self.position.next_epoch()

    def settle(self) -> None:
        """Complete an epoch whose loop was left by `break`.

        A single worker may leave an epoch early. Several workers may not: the loop's body runs for different
        micro-batches on each, so they would leave at different steps. That is an error on all of them.
        """
        if not self._is_left_open:
            return
        self._is_left_open = False
        if self.position.epoch == self._left_epoch and not self.is_over and self._world.size > 1:
            self._tell_left()
        self._complete_epoch()

    def begin_next_epoch(self) -> bool:
        """After a `break`, advance to the next epoch. Returns False if the last epoch was not left early."""
        self.settle()
        left, self._left_epoch = self._left_epoch, None
        if left != self.position.epoch or self.is_over:
            return False
        self.position = self.position.next_epoch()
        self._end_epoch(left)
        return True

    def _complete_epoch(self) -> None:
        self._watch.flush()
        self._stopwatch.flush()
        self._exchange.synchronize()

    @property
    def _is_step_under_way(self) -> bool:
        """Whether this worker has begun a step that it did not exchange yet."""
        return self._is_open or not self._is_last

    def _tell_left(self) -> None:
        """Take part in the others' steps without gradients until all workers know that this one left."""
        if self._world.device.type != "cpu":  # they would read it some steps later
            raise left_error([self._world.rank])
        is_under_way = self._is_step_under_way
        if self._is_open:
            self._exchange.end_micro_batch(None)
        self._is_open, self._is_last = False, True
        while self.position.epoch == self._left_epoch and not self.is_over:
            if not is_under_way:
                if self._checkpointer.is_active:
                    self._save_or_stop()
                mine = self._begin_step()
                if mine is None:
                    break
                if mine:
                    self._exchange.begin_micro_batch(mine[-1], 0, is_last=True)
                    self._exchange.end_micro_batch(None)
            is_under_way = False
            self._exchange.send(WorkerMessage(request=LEFT, digest=self.replica.digest()))
            if (numbers := self._exchange.finish()) is not None:
                self._checkpointer.observe(numbers)  # an error, as soon as all have read it
                self._exchange.complete()
                self.position = self._feed.after_step(self.position)
        self._exchange.synchronize()
        raise left_error([self._world.rank])

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward for this micro-batch's loss, a mean over its samples. Gradients of several calls add up."""
        if not self._is_open:
            raise MisuseError("backward() was called outside of a micro-batch: call it inside `for batch in epoch`")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor with one number")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number, such as loss.mean()")
        try:
            scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
            self._exchange.backward(scaled, retain_graph)
        except torch.OutOfMemoryError as error:
            self.explain(error)
            raise
        reported = loss.detach()
        self._loss = reported if self._loss is None else self._loss + reported

    def replayed(self, loss: torch.Tensor | None) -> None:
        """A CUDA graph has run this micro-batch's forward and backward. loss: its output; None if nothing ran."""
        self._loss = loss

    def step(self) -> StepRecord | None:
        """End this micro-batch, and the step if it was this worker's last. Returns the record of a completed step."""
        if not self._is_open:
            raise MisuseError("step() was called without a micro-batch: call it once for each `for batch in epoch`")
        if self.weight and not self._exchange.has_gradient():
            raise MisuseError(
                "step() was called before backward(): this micro-batch has no gradient"
                if self._loss is None
                else "backward() gave no trained parameter a gradient: compute the loss with trainer.model, and do not "
                "call zero_grad() before step()"
            )
        if self._loss is None and self.weight:
            if self._loss_scale is not None:
                raise MisuseError(
                    "precision='fp16' scales the loss before backward: call trainer.backward(loss) instead of "
                    "loss.backward() or your own GradScaler"
                )
            self._is_loss_known = False  # a bare loss.backward()
        self._is_open = False
        try:
            self._exchange.end_micro_batch(self._loss)
            self._stopwatch.mark()
            return self._finish_step() if self._is_last else None
        except (GenerationEnded, CommunicationError) as error:
            return self._recover(error)

    def _recover(self, error: BaseException) -> StepRecord | None:
        """Go on with the workers that are left, or raise the error.

        The step under way is begun again. If the others have completed it, this worker takes over their state; then the
        result is the step's record.
        """
        if self._recovery is None:
            raise error
        step = self.position.step
        while True:
            self.abandon()
            self._recovery.rejoin(error)
            try:
                self._run_hooks()
            except (GenerationEnded, CommunicationError) as another:
                error = another
                continue
            return self.last_record if self.position.step > step else None

    @property
    def has_gradient_hooks(self) -> bool:
        return bool(self._gradient_hooks)

    @property
    def is_over(self) -> bool:
        """Whether the run has reached its number of steps."""
        return self.max_steps is not None and self.position.step >= self.max_steps

    def synchronize(self) -> None:
        """Make all replicas equal, if the strategy lets them differ."""
        self._exchange.synchronize()

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every `steps` steps, on all workers together."""
        if steps < 1:
            raise ValueError(f"every({steps}, ...): choose at least 1 step")
        self._hooks.append((steps, hook))

    def every_epoch(self, epochs: int, hook: Callable[[int], object]) -> None:
        """Call `hook(number)` at the end of every `epochs` epochs, on all workers together."""
        if epochs < 1:
            raise ValueError(f"every_epoch({epochs}, ...): choose at least 1 epoch")
        self._epoch_hooks.append((epochs, hook))

    def on_parameters(self, hook: Callable[[], object]) -> None:
        """Call `hook()` when the set of trained parameters has changed."""
        self._parameter_hooks.append(hook)

    def set_learning_rate(self, rate: float, group: int = -1) -> None:
        """Set the learning rate of a parameter group, or of all, on all workers alike.

        In the loop's body it applies to the current step, and one worker's request is enough. Elsewhere it applies at
        once, on every worker that calls it.
        """
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr={rate}: choose a finite number >= 0")
        if not self.is_inside_epoch:
            self.replica.set_learning_rate(rate, group)
            return
        if not self._may_request_rates:
            raise MisuseError(
                "set_lr() was called in an epoch's loop, which a worker without a share skips: with several GPUs, or "
                "with Averaging, call it in a hook: trainer.every(1, lambda record: trainer.set_lr(...))"
            )
        self._requested_rate = (rate, group)

    def check_replicas(self) -> None:
        """Raise on all workers if their weights differ. Called by all workers together, between two steps."""
        self._replica_check.look(self.position.step)

    def on_gradients(self, hook: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        """Call `hook(parameters)` in every step, when gradients are the mean and not clipped yet."""
        self._gradient_hooks.append(hook)

    def explain(self, error: BaseException) -> None:
        """Add a note with a remedy to an out-of-memory error."""
        if isinstance(error, torch.OutOfMemoryError):
            explain_out_of_memory(error, self._config, self.replica, self._world)

    def report(self) -> Report:
        """Where the workers' time went."""
        return self._account.report()

    def state_dict(self) -> dict[str, Any]:
        """The position, and all state of the next step besides weights and optimizer."""
        return {
            "position": self.position.to_dict(),
            "trained": self.replica.names_to_train(),
            "groups": self.replica.group_names(),
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale else None,
            "exchange": self._exchange.state_dict(),
            "num_workers": self._world.size,
            "planner": self._planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. What was learned about the workers is used only in a world of the same size."""
        self.position = Position.from_dict(state["position"])
        self._events.step = self.position.step
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])
        if "trained" in state:
            self.replica.set_trained(state["trained"])
            if self.replica.has_changed():
                self.replica.take_changes()
                self._use_parameters([])
        self._exchange.load_state_dict(state["exchange"])
        if state["num_workers"] == self._world.size:
            self._planner.load_state_dict(state["planner"])

    # A world that changes

    def recover_with(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def handover(self) -> dict[str, Any]:
        """What a worker that is behind needs besides weights and optimizer to be where this one is."""
        record = self.last_record
        return {
            "engine": self.state_dict(),
            "record": None if record is None else record.to_dict(),
            "ended_epoch": self._ended_epoch,
        }

    def take_over(self, state: Mapping[str, Any], *, is_joining: bool) -> None:
        """Continue where the worker is that made `handover`.

        A worker that was one step behind has still to run the hooks of that step. One that joins runs none of them.
        """
        engine = state["engine"]
        self.position = Position.from_dict(engine["position"])
        self._events.step = self.position.step
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(engine["loss_scale"])
        self.replica.set_trained(engine["trained"])
        if self.replica.has_changed():
            self.replica.take_changes()
        self.replica.note_schedulers()
        self._exchange.load_state_dict(engine["exchange"])
        if state["record"] is not None:
            self.last_record = record = StepRecord.from_dict(state["record"])
            if is_joining:
                self._ended_epoch = state["ended_epoch"]
            else:
                self._due = deque(self._hooks_of_step(record))

    def planner_state(self) -> dict[str, Any]:
        return self._planner.handover()

    def regroup(self, planner_state: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        """Divide the work among the workers of the new world.

        planner_state: of a worker that knows the world before. previous_ranks: the ranks in it, by rank; None for a new
        worker.
        """
        self._world = self._communicator.world
        self._planner.regroup(planner_state, previous_ranks)
        self._usual_plan, self._step = (), NO_STEP
        self._may_request_rates = self._can_request_rates()
        self._replica_check.regroup()

    def regroup_report(self, previous_ranks: Sequence[int | None]) -> None:
        """previous_ranks: the ranks in the world that this worker has reported on so far."""
        self._account.regroup(previous_ranks)

    def reconnect(self) -> None:
        """Exchange with the workers of the new world. All of them call this together."""
        self._use_parameters([])
        self._feed.reconnect()

    def _can_request_rates(self) -> bool:
        """A rate that is requested in the loop's body is exchanged; on several GPUs it would arrive too late."""
        is_exchanged = self._world.device.type == "cpu" and not isinstance(self._config.strategy, Averaging)
        return self._world.size == 1 or is_exchanged

    # The parts of a step

    def _begin_step(self) -> range | None:
        """This worker's micro-batches of the next step; None if the epoch is over."""
        self._stopwatch.begin_step()
        step = self._feed.begin_step(self.position)
        self._stopwatch.mark()
        if step is None:
            ended, self.position = self.position.epoch, self.position.next_epoch()
            self._end_epoch(ended)
            return None
        if step.plan is not self._step.plan:
            self._note_plan(step)
        self._step = step
        self._is_loss_known = True
        if self.replica.has_changed():
            self._take_parameter_changes()
        self._exchange.begin_step(
            step.plan,
            total_weight=step.total_weight,
            loss_scale=self._loss_scale.value if self._loss_scale else 1.0,
        )
        return step.plan[self._world.rank]

    def _begin_micro_batch(self, numbers: range, *, is_last: bool) -> Any:
        """The batch of one micro-batch, or of several that this device runs at once."""
        self._stopwatch.mark()
        batch, self.weight = self._feed.micro_batch(numbers)
        self._stopwatch.mark()
        # The last of several represents all of them, so that the step's last micro-batch is recognized.
        self._exchange.begin_micro_batch(numbers[-1], self.weight, is_last=is_last)
        # Dropout belongs to the micro-batch, not to the rank.
        self._seed(Purpose.MICRO_BATCH, self.position.step, numbers[0])
        if self._recovery is not None:
            self._recovery.note(is_computing=True)
        self._loss = None
        self._is_last = is_last
        self._is_open = True
        return batch

    def _finish_step(self) -> StepRecord | None:
        position = self.position
        plan, num_samples = self._step.plan, self._step.num_samples
        timing = self._stopwatch.send(len(plan[self._world.rank]))
        digest = self.replica.digest() if self._world.size > 1 else 0
        if self._recovery is not None and self._recovery.is_change_pending:
            self._checkpointer.request_change()
        message = WorkerMessage(timing, self._checkpointer.requested, digest, self._requested_rate)
        self._exchange.send(message)
        early: list[Number | None] = []  # the norm, if the update was queued early
        update_unless = self._update_unless(early) if self._may_update_early else None
        numbers = self._exchange.finish(self._accept, update_unless)
        self._requested_rate = None
        self._stopwatch.mark()
        if numbers is None:
            if self._added is not None:
                self._use_parameters(self._added)
            return None
        self._planner.observe(plan, numbers)
        if not numbers.is_ordinary:
            self._checkpointer.observe(numbers)
        # From here on every worker does the same. Code that may draw random numbers draws the same ones.
        self._step_to_seed = position.step
        if self.replica.may_draw:
            self._seed_for_all()
        # A single worker knows its own request: reading it from a GPU would wait.
        if self._world.size == 1:
            if message.learning_rate is not None:
                self.replica.set_learning_rate(*message.learning_rate)
        elif self._may_request_rates and not numbers.is_ordinary and any(rates := numbers.learning_rates):
            self._set_requested_rate(rates)
        for on_gradients in self._gradient_hooks:
            self._run_hook(on_gradients, self.replica.parameters)
        norm = early[0] if early else self.update.clip() if self._has_norm else None
        is_ordinary = numbers.is_ordinary and norm is None
        if is_ordinary or self._is_step_valid(numbers, norm):
            if not early:
                self.update.step()
            if self._average is not None:
                self._average.update()
            if self.replica.schedulers and self._config.optimization.scheduler_every == "step":
                self.replica.step_schedulers(lambda: self._told_loss(numbers))
            is_skipped = False
        else:
            is_skipped = True
        self._stopwatch.mark()
        self._events.step = position.step + 1
        self._exchange.complete()
        self._stopwatch.completed(position.step + 1)
        self._account.add((plan, num_samples, numbers))
        record = StepRecord(
            position.step + 1,
            position.epoch,
            num_samples,
            self.replica.learning_rate,
            is_skipped,
            plan,
            numbers,
            norm,
        )
        self.last_record = record
        self.position = self._feed.after_step(position)
        if self._hooks:
            self._due.extend(self._hooks_of_step(record))
        if record.step % checks.REPLICA_CHECK_STEPS == 0 and self._world.size > 1:
            self._replica_check.after_step(len(plan[0]), numbers, record.step)
        if self._due or self.position.epoch != position.epoch:
            self._run_hooks()
        return record

    def _run_hooks(self) -> None:
        """Run what is due after the last step: its hooks, then those of the epoch if it has ended.

        Can be called again after an interruption: it continues with the next hook.
        """
        record = self.last_record
        if record is not None:
            self._may_end_epoch = True
            try:
                self._run_due()
            finally:
                self._may_end_epoch = False
            if self.position.epoch != record.epoch and self._ended_epoch != record.epoch:
                self._end_epoch(record.epoch)
        self._run_due()

    def _run_due(self) -> None:
        while self._due:
            self._due.popleft()()

    def _update_unless(self, norms: list[Number | None]) -> UpdateUnless | None:
        """Queues the update before the host waits for the exchange, if no code of the user runs in between."""
        is_direct = not self._gradient_hooks and self._added is None and self._loss_scale is None
        if not is_direct or self._requested_rate is not None or not self.update.can_be_voided:
            return None
        return lambda is_void: norms.append(self.update.clip_and_step_unless(is_void))

    def _end_epoch(self, number: int) -> None:
        """An epoch's last step is done, on all workers."""
        self._ended_epoch = number
        self._timeline.event("epoch end", number=number)
        if self._config.optimization.scheduler_every == "epoch":
            self.replica.step_schedulers()
        self._due.extend(self._hooks_of_epoch(number))
        self._run_due()

    def _hooks_of_step(self, record: StepRecord) -> list[Callable[[], None]]:
        return [partial(self._run_hook, hook, record) for steps, hook in self._hooks if record.step % steps == 0]

    def _hooks_of_epoch(self, number: int) -> list[Callable[[], None]]:
        return [partial(self._run_hook, hook, number) for count, hook in self._epoch_hooks if (number + 1) % count == 0]

    def _take_parameter_changes(self) -> None:
        """Some parameters were frozen, unfrozen or added between two steps.

        A single worker uses the new set at once. Several workers first compare their sets in this step's exchange, and
        repeat the step with the new set.
        """
        self._added = [*(self._added or []), *self.replica.take_changes()]
        if self._world.size == 1:
            self._use_parameters(self._added)

    def _accept(self, numbers: Numbers) -> bool:
        """Whether the step counts. Raises on all workers if they disagree."""
        has_changes = self._added is not None
        if has_changes or not numbers.is_ordinary:
            self._agreement.check(numbers, now=has_changes)
        return not has_changes

    def _use_parameters(self, added: Sequence[torch.Tensor]) -> None:
        """Train the replica's current parameters. All workers get rank 0's values of new ones."""
        self._added = None
        if added:
            share_weights(self.replica.model, self.replica.parameters, self._communicator)
        self._exchange.set_parameters(self.replica.parameters, Buffers(self.replica.model, self._communicator))
        if self._average is not None:
            self._average.set_parameters(self.replica)
        for hook in self._parameter_hooks:
            hook()

    def _set_requested_rate(self, by_rank: Sequence[tuple[float, int] | None]) -> None:
        requests = {rank: rate for rank, rate in enumerate(by_rank) if rate is not None}
        (first, (rate, group)), *others = requests.items()
        for rank, other in others:
            if other != (rate, group):
                raise MisuseError(
                    f"set_lr({rate:g}, group={group}) on rank {first} and set_lr({other[0]:g}, group={other[1]}) on "
                    f"rank {rank} in one step: compute the rate from what all workers know, such as "
                    "trainer.position.step"
                )
        self.replica.set_learning_rate(rate, group)

    def _told_loss(self, numbers: Numbers) -> float:
        if not self._is_loss_known:
            raise MisuseError(
                "ReduceLROnPlateau needs the loss, which is unknown after a bare loss.backward(): call "
                "trainer.backward(loss)"
            )
        return numbers.loss

    def _note_plan(self, step: Step) -> None:
        """Emit an event if the plan changed, except for the smaller step at an epoch's end."""
        plan, usual = step.plan, self._usual_plan
        if plan != usual and not step.is_cut:
            self._usual_plan = plan
            self._events.emit("plan", shares=sizes(plan), before=sizes(usual))

    def _is_step_valid(self, numbers: Numbers, norm: Number | None) -> bool:
        """Whether to update. False if fp16 overflowed; without fp16 a non-finite number is an error."""
        step = self.position.step + 1
        if self._loss_scale is not None:
            assert norm is not None
            is_finite = math.isfinite(norm.item()) and all(map(math.isfinite, numbers.losses))
            self._loss_scale.update(is_finite=is_finite)
            return is_finite
        self._watch.check(step, self._step.plan, numbers)
        if isinstance(norm, torch.Tensor) and norm.is_cpu and not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the gradient's norm is {norm.item()} at step {step} although every loss is finite: the weights are "
                f"those of step {step - 1}. Look for a division by zero or an overflow in the model's backward",
                step=step,
            )
        return True

    def _seed(self, purpose: Purpose, *numbers: int) -> None:
        seed = derive_seed(self._config.seed, purpose, *numbers)
        for generator in self._generators:
            generator.manual_seed(seed)

    def _seed_for_all(self) -> None:
        """Seed for what all workers do after the exchange, once per step."""
        if self._step_to_seed is not None:
            self._seed(Purpose.AFTER_STEP, self._step_to_seed)
            self._step_to_seed = None

    def _run_hook(self, hook: Callable[[Any], object], subject: Any) -> None:
        self._seed_for_all()
        is_inside, self.is_inside_epoch, self.is_in_hook = self.is_inside_epoch, False, True
        if self._recovery is not None:
            self._recovery.note(is_computing=False)
        begin = perf_counter()
        try:
            hook(subject)
        finally:
            self.is_inside_epoch, self.is_in_hook = is_inside, False
            self._timeline.took("hook", begin, function=getattr(hook, "__qualname__", type(hook).__name__))


@dataclass(slots=True)  # not frozen: that costs a microsecond per step
class StepRecord:
    """A completed step. Numbers are read from the device on demand.

    step: number of completed steps. epoch: counted from 0. num_samples: size of the global batch. lr: learning rate of
    the next step. is_skipped: fp16 overflowed.
    """

    step: int
    epoch: int
    num_samples: int
    lr: float
    is_skipped: bool
    _plan: Plan
    _numbers: Numbers
    _norm: Number | None

    def to_dict(self) -> dict[str, Any]:
        """For a worker that did not complete this step. Waits for its numbers."""
        numbers = KnownNumbers.of(self._numbers)
        plan = [(own.start, own.stop) for own in self._plan]
        own = (self.step, self.epoch, self.num_samples, self.lr, self.is_skipped, plan, self.grad_norm)
        return {"own": own, "numbers": numbers.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        step, epoch, num_samples, lr, is_skipped, plan, norm = values["own"]
        shares = tuple(range(*bounds) for bounds in plan)
        numbers = KnownNumbers.from_dict(values["numbers"])
        norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        return cls(step, epoch, num_samples, lr, is_skipped, shares, numbers, norm)

    @property
    def loss(self) -> float:
        """The mean over the global batch, before the update; the same on every worker.

        NaN if no sample had weight, or after a bare `loss.backward()`. With `Averaging`: the mean over all workers'
        steps between the last two averages; NaN until the first.
        """
        return self._numbers.loss

    @property
    def weight(self) -> float:
        """The total weight of the mean: samples, or the sum of weight_fn. With `Averaging`: per step, as for `loss`."""
        return self._numbers.total_weight

    @property
    def is_exchanged(self) -> bool:
        """Whether all workers know the numbers of this step. With `Averaging` each worker knows its own."""
        return not isinstance(self._numbers, LocalNumbers)

    @property
    def part(self) -> tuple[float, float]:
        """For a sum over steps: weighted loss, and weight; of all workers, or this one's if it was not exchanged."""
        if self.is_skipped:
            return 0.0, 0.0
        if isinstance(self._numbers, LocalNumbers):
            return self._numbers.own_part
        return (self.loss * self.weight, self.weight) if self.weight else (0.0, 0.0)

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of micro-batches that each worker took, by rank."""
        return sizes(self._plan)

    @property
    def timings(self) -> Sequence[Timing]:
        """The workers' timings, by rank."""
        return self._numbers.timings

    @property
    def grad_norm(self) -> float | None:
        """The mean gradient's norm before clipping; None unless `max_grad_norm` is set (math.inf only measures)."""
        return None if self._norm is None else self._norm.item()
