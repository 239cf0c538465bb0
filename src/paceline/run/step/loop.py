"""The training loop: a step, from top to bottom.

The loop yields this worker's micro-batches, and `step` is called after each. It serves users who write
`for batch in epoch: ...` as well as entry points that run a function over micro-batches.

What few steps need has files of its own: an epoch that is left early (left_epoch.py), other trained parameters
(parameter_changes.py), losses that are not finite and workers that disagree (checks.py), hooks (hooks.py), other
workers (loop_state.py, and run/membership/rejoining.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.policy import Decision
from paceline.comm.base import Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, GenerationEnded, MisuseError
from paceline.core.events import Events
from paceline.core.generators import generators_of
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.feeds.base import Feed, Step
from paceline.data.feeds.sharded import passes
from paceline.observe.timeline.recorder import Recorder
from paceline.plan.epoch import Position
from paceline.plan.shares import Plan, sizes
from paceline.run.config import RunConfig
from paceline.run.saving.stopping import Stopped
from paceline.run.sharding.divide import make_update
from paceline.run.sharding.update import ShardedUpdate
from paceline.run.step import checks, gc_policy
from paceline.run.step.checks import Agreement, ReplicaCheck, UpdateCheck
from paceline.run.step.ema import WeightAverage
from paceline.run.step.gc_policy import GcPolicy
from paceline.run.step.hooks import Hooks
from paceline.run.step.learning_rates import LearningRates
from paceline.run.step.left_epoch import LeftEpoch
from paceline.run.step.out_of_memory import explain_out_of_memory
from paceline.run.step.parameter_changes import ParameterChanges
from paceline.run.step.planner import Planner
from paceline.run.step.record import StepRecord
from paceline.run.step.replica import Number, Replica
from paceline.run.step.stopwatch import TimeTotals, stopwatch_for
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.loss_scale import LossScale
from paceline.sync.numbers import Numbers, WorkerMessage
from paceline.sync.strategy import GradientExchange, UpdateUnless

if TYPE_CHECKING:
    from paceline.run.membership.rejoining import Rejoining
    from paceline.run.saving.checkpointer import Checkpointer

# Measure one of this many steps if no plan depends on it.
SELDOM_MEASURED = 16
NO_STEP = Step((), 0, None, is_cut=False, after=Position())  # before the first


@dataclass(slots=True)
class OpenStep:
    """The step that this worker is in.

    weight, loss: of the micro-batch, if one is open. is_last: no other micro-batch of this worker follows in the step.
    is_loss_known: False after a bare `loss.backward()`. is_repeated: the step was begun before, at `begun_at`.
    """

    step: Step = NO_STEP
    weight: int = 0
    loss: torch.Tensor | None = None
    has_micro_batch: bool = False
    is_last: bool = True
    is_loss_known: bool = True
    is_repeated: bool = False
    begun_at: Position | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether this worker has begun a step that it did not exchange yet."""
        return self.has_micro_batch or not self.is_last


class Loop:
    """The steps of one worker.

    position: of the next step. open: the step that this worker is in. max_steps: where the run ends. ended_epoch: the
    last one whose end was handled.
    """

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
        gc_policy: GcPolicy,
    ) -> None:
        self.world = world = communicator.world
        self.replica, self.exchange, self.planner = replica, exchange, planner
        self.events, self.checkpointer = events, checkpointer
        self._config, self._communicator, self._feed = config, communicator, feed
        self._average, self._timeline, self._gc_policy = average, timeline, gc_policy
        self._recovery: Rejoining | None = None
        is_averaging = isinstance(config.strategy, Averaging)

        self.position = Position()
        self.open = OpenStep()
        self.max_steps = math.inf
        self.last_record: StepRecord | None = None
        self.ended_epoch = -1
        self.left_epoch = LeftEpoch(self)
        self.is_closed = self._is_in_epoch = self._may_end_epoch = False
        self._usual_plan: Plan = ()
        self._at_once = config.micro_batches_at_once(world.rank)
        self._generators = generators_of(world.device)
        self.step_to_seed: int | None = None  # the step whose seed for all workers was not used yet

        # The update.
        replica.note_schedulers()  # a checkpoint may have been loaded
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        # fp16 needs the norm even if nothing is clipped.
        limit = math.inf if config.max_grad_norm is None and self.loss_scale else config.max_grad_norm
        self.update = make_update(replica, limit, exact=config.exact)
        self._divided = self.update if isinstance(self.update, ShardedUpdate) else None
        self._has_norm = limit is not None
        # Otherwise a GPU is idle while the host waits to know whether exact sums fit their grids.
        self._may_update_early = config.exact and world.device.type == "cuda"
        self._rates = LearningRates(replica, is_averaging=is_averaging)

        self.hooks = Hooks(self._before_hook, timeline)
        self.parameter_changes = ParameterChanges(replica, communicator, exchange, average, self.hooks)
        self._agreement = Agreement(replica, communicator)
        self._update_check = UpdateCheck(self.loss_scale)
        # Averaged replicas differ between two averages.
        self.replica_check = ReplicaCheck(replica, None if is_averaging else communicator)

        # One worker needs no times for its plan.
        is_planned = not isinstance(communicator, SingleCommunicator) or config.strategy != "gradients"
        self._stopwatch = stopwatch_for(world.device, timeline, 1 if is_planned else SELDOM_MEASURED)
        self.times = TimeTotals(world.size)

    # An epoch

    def micro_batches(self, epoch: int) -> Iterator[Any]:
        """This worker's micro-batches of an epoch; `step` must be called after each.

        Steps in which this worker has no share are completed here. A step that exact mode repeats does not advance the
        position: its micro-batches are yielded again.
        """
        self._is_in_epoch = True
        self._timeline.event("epoch begin", number=epoch)
        self._gc_policy.begin_epoch()
        self.open.begun_at = None
        must_abandon = True
        try:
            while self.position.epoch == epoch and self.position.step < self.max_steps:
                try:
                    if self.checkpointer.is_active:
                        self.save_or_stop()
                    if self.position.step % gc_policy.EVERY_STEPS == 0:
                        self._gc_policy.collect()
                    if (mine := self.begin_step()) is None:
                        break
                    yield from self._micro_batches_of(mine)
                except (GenerationEnded, CommunicationError) as error:
                    self._recover(error)
            self.complete_epoch()
        except GeneratorExit:  # `break`, or an exception in the loop's body
            self.left_epoch.note(epoch)
            must_abandon = self.world.size == 1  # several workers keep the step open until the others have been told
            raise
        finally:
            self._gc_policy.end_epoch()
            self._is_in_epoch = False
            if self._recovery is not None:
                self._recovery.note(is_computing=False)
            if must_abandon:
                self.abandon()

    def _micro_batches_of(self, mine: range) -> Iterator[Any]:
        """This worker's micro-batches of the open step."""
        for numbers in passes(mine, self._at_once):
            batch = self._begin_micro_batch(numbers, is_last=numbers.stop == mine.stop)
            if batch is not None:
                yield batch
            else:
                self.step()  # every sample of it was bad
            if self.open.has_micro_batch:
                raise MisuseError("the next micro-batch was asked for before step() was called for this one")
            if self.open.is_last:
                return  # completed, or abandoned because a worker was lost
        self._finish_step()  # this worker has no share in it

    def save_or_stop(self) -> None:
        """Do what the workers have agreed to do before the next step: save, stop, or let workers join and leave."""
        decision = self.checkpointer.decide(self)
        if decision is Decision.CHANGE:
            assert self._recovery is not None, "nobody else asks for it"
            self.checkpointer.complete_writing()
            self.exchange.synchronize()
            self._recovery.rejoin(None)
            self.save_or_stop()
        elif decision is Decision.SAVE:
            self.checkpointer.save_due(self)
        elif decision is Decision.STOP:
            self.checkpointer.stop(self)
            raise Stopped(self.position.step)

    def complete_epoch(self) -> None:
        """After the epoch's last step on this worker: wait for numbers from the GPU, and make replicas equal."""
        self._update_check.flush()
        self._stopwatch.flush()
        position = self.position
        while self.position == position:  # else this worker took over the state of one that has gone on
            try:
                return self.exchange.synchronize()
            except (GenerationEnded, CommunicationError) as error:
                self._recover(error)
        return None

    def end_epoch(self) -> None:
        """End the epoch after the current step. Called in one of its hooks."""
        if not self._may_end_epoch or self.last_record is None:
            raise MisuseError(
                "end_epoch() ends an epoch on all workers after the same step: call it in a hook of trainer.every, "
                "such as trainer.every(100, lambda record: trainer.end_epoch())"
            )
        if self.position.epoch == self.last_record.epoch:  # else that was the epoch's last step
            self.position = self.position.next_epoch()

    @property
    def is_over(self) -> bool:
        """Whether the run has reached its number of steps."""
        return self.position.step >= self.max_steps

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the body of an epoch's loop runs, which workers do at different times."""
        return self._is_in_epoch and not self.hooks.is_running

    # A step

    def begin_step(self) -> range | None:
        """This worker's micro-batches of the next step; None if the epoch is over."""
        self._stopwatch.begin_step()
        step = self._feed.begin_step(self.position)
        self._stopwatch.mark()
        if step is None:
            self.next_epoch()
            self.hooks.run_due()
            return None
        if step.plan is not self.open.step.plan:
            self._note_plan(step)
        self.open.step = step
        self.open.is_loss_known = True
        self.open.is_repeated, self.open.begun_at = self.open.begun_at == self.position, self.position
        if self.replica.has_changed():
            self.parameter_changes.note()
        self.exchange.begin_step(
            step.plan,
            total_weight=step.total_weight,
            loss_scale=self.loss_scale.value if self.loss_scale else 1.0,
        )
        return step.plan[self.world.rank]

    def _begin_micro_batch(self, numbers: range, *, is_last: bool) -> Any:
        """The batch of one micro-batch, or of several that this device runs at once."""
        self._stopwatch.mark()
        if self._recovery is not None:
            self._recovery.note(is_computing=False)  # slow data is no stalled worker
        batch, self.open.weight = self._feed.micro_batch(numbers)
        self._stopwatch.mark()
        # The last of several represents all of them, so that the step's last micro-batch is recognized.
        self.exchange.begin_micro_batch(numbers[-1], self.open.weight, is_last=is_last)
        # Dropout belongs to the micro-batch, not to the rank.
        self._seed(Purpose.MICRO_BATCH, self.position.step, numbers[0])
        if self._recovery is not None:
            self._recovery.note(is_computing=True)
        self.open.loss = None
        self.open.is_last = is_last
        self.open.has_micro_batch = True
        return batch

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run backward for this micro-batch's loss, a mean over its samples. Gradients of several calls add up."""
        if not self.open.has_micro_batch:
            raise MisuseError("backward() was called outside of a micro-batch: call it inside `for batch in epoch`")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor with one number")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number, such as loss.mean()")
        try:
            scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
            self.exchange.backward(scaled, retain_graph)
        except torch.OutOfMemoryError as error:
            self.explain(error)
            raise
        reported = loss.detach()
        self.open.loss = reported if self.open.loss is None else self.open.loss + reported

    def step(self) -> StepRecord | None:
        """End this micro-batch, and the step if it was this worker's last. Returns the record of a completed step."""
        if not self.open.has_micro_batch:
            raise MisuseError("step() was called without a micro-batch: call it once for each `for batch in epoch`")
        if self.open.weight and not self.exchange.has_gradient():
            raise MisuseError(
                "step() was called before backward(): this micro-batch has no gradient"
                if self.open.loss is None
                else "backward() gave no trained parameter a gradient: compute the loss with trainer.model, and do not "
                "call zero_grad() before step()"
            )
        if self.open.loss is None and self.open.weight:
            if self.loss_scale is not None:
                raise MisuseError(
                    "precision='fp16' scales the loss before backward: call trainer.backward(loss) instead of "
                    "loss.backward() or your own GradScaler"
                )
            self.open.is_loss_known = False  # a bare loss.backward()
        self.open.has_micro_batch = False
        try:
            self.exchange.end_micro_batch(self.open.loss)
            self._stopwatch.mark()
            return self._finish_step() if self.open.is_last else None
        except (GenerationEnded, CommunicationError) as error:
            return self._recover(error)

    def _finish_step(self) -> StepRecord | None:
        """Exchange, update, and what follows a step. None: the step is repeated."""
        early: list[Number | None] = []  # the norm, if the update was queued before the host knew the numbers
        numbers = self.exchange_step(early)
        if numbers is None:
            return None
        # From here on every worker does the same. Code that may draw random numbers draws the same ones.
        self.step_to_seed = self.position.step
        if self.replica.may_draw:
            self._seed_for_all()
        for on_gradients in self.hooks.of_gradients:
            self.hooks.call(on_gradients, self.replica.parameters)
        norm = early[0] if early else self.update.clip() if self._has_norm else None
        is_valid = (numbers.is_ordinary and norm is None) or self._update_check.allows_update(
            self.position.step + 1, self.open.step.plan, numbers, norm
        )
        if is_valid:
            if not early:
                self.update.step()
            if self._average is not None:
                self._average.update()
            if self.replica.schedulers and self._config.optimization.scheduler_every == "step":
                self.replica.step_schedulers(lambda: self._known_loss(numbers))
        lost = None if self._divided is None else self._divided.share()
        record = self._complete_step(numbers, norm, is_skipped=not is_valid)
        if lost is not None:
            self._recover(lost)
            return record
        if record.step % checks.REPLICA_CHECK_STEPS == 0 and self.world.size > 1:
            self.replica_check.after_step(record.shares[0], numbers, record.step)
        if self.hooks.due or self.position.epoch != record.epoch:
            self._run_hooks()
        return record

    def exchange_step(self, early: list[Number | None], request: float | None = None) -> Numbers | None:
        """Exchange gradients and numbers with all workers. None: the step is repeated.

        request: of all workers, instead of the checkpointer's.
        """
        plan = self.open.step.plan
        timing = self._stopwatch.send(len(plan[self.world.rank]))
        digest = self.replica.digest() if self.world.size > 1 else 0
        if self._recovery is not None and self._recovery.is_change_pending:
            self.checkpointer.request_change()
        request = self.checkpointer.requested if request is None else request
        message = WorkerMessage(timing, request, digest, self._rates.requested)
        self.exchange.send(message)
        update_unless = self._update_unless(early) if self._may_update_early else None
        numbers = self.exchange.finish(self._accept, update_unless)
        self._stopwatch.mark()
        if numbers is None:
            if self._divided is not None:
                self._divided.void()
            if (added := self.parameter_changes.added) is not None:
                self.parameter_changes.use(added)
            return None
        self._rates.requested = None
        self.planner.observe(plan, numbers)
        if not numbers.is_ordinary:
            self.checkpointer.observe(numbers)
            if self.world.size == 1:  # its own: reading it from a GPU would wait
                self._rates.apply([message.learning_rate])
            elif self._rates.can_request(self.world):
                self._rates.apply(numbers.learning_rates)
        return numbers

    def _accept(self, numbers: Numbers) -> bool:
        """Whether the step counts. Raises on all workers if they disagree."""
        has_changes = self.parameter_changes.added is not None
        if has_changes or not numbers.is_ordinary:
            self._agreement.check(numbers, now=has_changes)
        if self._divided is not None and not has_changes:
            self._divided.agree()
        return not has_changes

    def _update_unless(self, norms: list[Number | None]) -> UpdateUnless | None:
        """Queues the update before the host waits for the exchange, if no code of the user runs in between."""
        has_changes = self.parameter_changes.added is not None or self._rates.requested is not None
        if self.hooks.of_gradients or has_changes or self.loss_scale is not None or not self.update.can_be_voided:
            return None
        return lambda is_void: norms.append(self.update.clip_and_step_unless(is_void))

    def _complete_step(self, numbers: Numbers, norm: Number | None, *, is_skipped: bool) -> StepRecord:
        """Note the step, and advance the position."""
        position, (plan, num_samples, _, _, after) = self.position, self.open.step
        self._stopwatch.mark()
        self.events.step = position.step + 1
        self.exchange.complete()
        self._stopwatch.completed(position.step + 1)
        self.times.add((plan, num_samples, numbers))
        self.last_record = record = StepRecord(
            position.step + 1,
            position.epoch,
            num_samples,
            self.replica.learning_rate,
            is_skipped,
            plan,
            numbers,
            norm,
        )
        self.position = after
        if self.hooks.of_steps:
            self.hooks.queue_step(record)
        return record

    # After a step

    def _run_hooks(self) -> None:
        """Run what is due after the last step: its hooks, then those of the epoch if it has ended.

        Can be called again after an interruption: it continues with the next hook.
        """
        record = self.last_record
        if record is not None:
            self._may_end_epoch = True
            try:
                self.hooks.run_due()
            finally:
                self._may_end_epoch = False
            if self.position.epoch != record.epoch and self.ended_epoch != record.epoch:
                self._note_epoch_end(record.epoch)
        self.hooks.run_due()

    def next_epoch(self) -> None:
        """Advance to the next epoch although this one may have further steps. Its hooks are due."""
        ended, self.position = self.position.epoch, self.position.next_epoch()
        self._note_epoch_end(ended)

    def _note_epoch_end(self, number: int) -> None:
        """An epoch's last step is done, on all workers."""
        self.ended_epoch = number
        self._timeline.event("epoch end", number=number)
        if self._config.optimization.scheduler_every == "epoch":
            self.replica.step_schedulers()
        self.hooks.queue_epoch(number)

    def _known_loss(self, numbers: Numbers) -> float:
        if not self.open.is_loss_known:
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
            self.events.emit("plan", shares=sizes(plan), before=sizes(usual))

    # Random numbers

    def _seed(self, purpose: Purpose, *numbers: int) -> None:
        seed = derive_seed(self._config.seed, purpose, *numbers)
        for generator in self._generators:
            generator.manual_seed(seed)

    def _seed_for_all(self) -> None:
        """Seed for what all workers do after the exchange, once per step."""
        if self.step_to_seed is not None:
            self._seed(Purpose.AFTER_STEP, self.step_to_seed)
            self.step_to_seed = None

    def _before_hook(self) -> None:
        self._seed_for_all()
        if self._recovery is not None:
            self._recovery.note(is_computing=False)

    # A worker is lost, or the world changes

    def abandon(self) -> None:
        """Drop the step under way, if any."""
        if self.open.is_under_way:
            self.open.has_micro_batch, self.open.is_last = False, True
            self.exchange.abandon()

    def recover_with(self, recovery: Rejoining) -> None:
        self._recovery = recovery
        if self._divided is not None:
            self._divided.resolver = recovery

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

    def regroup(self, planner_state: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        """Divide the work among the workers of the new world.

        planner_state: of a worker that knows the world before. previous_ranks: the ranks in it, by rank; None for a new
        worker.
        """
        self.world = self._communicator.world
        self.planner.regroup(planner_state, previous_ranks)
        self._usual_plan, self.open.step = (), NO_STEP
        self.replica_check.regroup()

    def reconnect(self) -> None:
        """Exchange with the workers of the new world. All of them call this together."""
        self.parameter_changes.use()
        self._feed.reconnect()

    # For users

    def set_learning_rate(self, rate: float, group: int = -1) -> None:
        """Set the learning rate of a parameter group, or of all, on all workers alike.

        In the loop's body it applies to the current step, and one worker's request is enough. Elsewhere it applies at
        once, on every worker that calls it.
        """
        self._rates.set(rate, group, self.world, in_loop=self.is_inside_epoch)

    def explain(self, error: BaseException) -> None:
        """Add a note with a remedy to an out-of-memory error."""
        if isinstance(error, torch.OutOfMemoryError):
            explain_out_of_memory(error, self._config, self.replica, self.world)

    def time_every_step(self) -> None:
        """For a profile: a single worker times few of its steps otherwise."""
        self._stopwatch = stopwatch_for(self.world.device, self._timeline)
