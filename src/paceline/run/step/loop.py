"""The training loop: a step, from top to bottom.

The loop hands out this worker's micro-batches and is told when each is done. So one loop serves a user who writes
`for batch in epoch: ...` and an entry point that runs a function over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError, NonFiniteError
from paceline.core.events import Events
from paceline.core.seeding import Purpose, StepSeeding
from paceline.core.timing import Timing
from paceline.data.feeds.base import Feed, Step
from paceline.data.feeds.sharded import passes
from paceline.observe.timeline.recorder import Recorder
from paceline.plan.shares import Plan, sizes
from paceline.plan.steps import Position
from paceline.run.config import RunConfig
from paceline.run.report import Account, Report
from paceline.run.step.agreement import Agreement
from paceline.run.step.backward import Backward
from paceline.run.step.ema import Average
from paceline.run.step.finite import FiniteWatch
from paceline.run.step.gc_policy import Collector
from paceline.run.step.out_of_memory import explain_out_of_memory
from paceline.run.step.planner import Planner
from paceline.run.step.replica import Replica, share_weights
from paceline.run.step.replica_check import ReplicaCheck
from paceline.run.step.stopwatch import stopwatch_for
from paceline.run.step.update import Number, Update
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.buffers import Buffers
from paceline.sync.loss_scale import LossScale
from paceline.sync.step_numbers import LEFT, LocalNumbers, Numbers, WorkerMessage, left_error
from paceline.sync.strategy import GradientExchange

# From how many steps one is measured where nothing depends on it.
SELDOM_MEASURED = 16
NO_STEP = Step((), 0, None, is_cut=False)  # before the first


class Keeper(Protocol):
    """Keeps the run's state safe, and ends the run when asked to: always between two steps, on all workers alike."""

    @property
    def wish(self) -> float:
        """What this worker asks all to do; it travels with the step's exchange. 0 for nothing."""

    def observe(self, numbers: Numbers) -> None:
        """What was exchanged in a step; called with every step in turn."""

    def between_steps(self, loop: Loop) -> None:
        """The next step is about to begin: the moment to save, or to leave by an exception."""


class Loop:
    """One worker's way through the run."""

    def __init__(
        self,
        config: RunConfig,
        communicator: Communicator,
        replica: Replica,
        exchange: GradientExchange,
        feed: Feed,
        planner: Planner,
        events: Events,
        keeper: Keeper,
        average: Average,
        timeline: Recorder,
        collector: Collector,
    ) -> None:
        world = communicator.world
        self.position = Position()
        self.max_steps: int | None = None
        self.replica = replica
        self._config = config
        self._world = world
        self._planner = planner
        replica.note_schedulers()  # which may have been loaded
        self._usual_plan: Plan = ()
        self._step = NO_STEP
        self._at_once = config.micro_batches_at_once(world.rank)
        self._exchange = exchange
        self._feed = feed
        self._seed_micro_batch = StepSeeding(world.device, config.seed, Purpose.MICRO_BATCH)
        self._seed_after_step = StepSeeding(world.device, config.seed, Purpose.AFTER_STEP)
        self._backward = Backward()
        self._watch = FiniteWatch()
        # The plan of one worker needs no times.
        is_planned = world.size > 1 or config.strategy != "gradients"
        self._stopwatch = stopwatch_for(world.device, timeline, 1 if is_planned else SELDOM_MEASURED)
        self._timeline = timeline
        self._account = Account(world.size)
        self._events = events
        self._keeper = keeper
        self._average = average
        self._collector = collector
        self._loss_scale = LossScale() if config.precision == "fp16" else None
        # fp16 looks at the norm even where nothing is clipped.
        limit = math.inf if config.max_grad_norm is None and self._loss_scale else config.max_grad_norm
        self.update = Update(replica, limit)
        self._hooks: list[tuple[int, Callable[[StepRecord], object]]] = []
        self._epoch_hooks: list[tuple[int, Callable[[int], object]]] = []
        self._gradient_hooks: list[Callable[[Mapping[str, torch.Tensor]], object]] = []
        self._parameter_hooks: list[Callable[[], object]] = []
        self._agreement = Agreement(replica, communicator)
        # Replicas that are averaged differ in between.
        check_of = communicator if not isinstance(config.strategy, Averaging) else None
        self._replica_check = ReplicaCheck(replica, check_of)
        self._communicator = communicator
        self._added: list[torch.Tensor] | None = None  # parameters that are trained once all workers have them
        self._requested_rate: tuple[float, int] | None = None
        # Who asks for a rate in the loop's body is heard with the exchange, whose numbers a GPU has late.
        self._may_request_rates = world.size == 1 or (world.device.type == "cpu" and check_of is not None)
        self._loss: torch.Tensor | None = None
        self.weight = 0  # of the open micro-batch
        self._is_open = False
        self._is_last = True  # of this worker's micro-batches of the step
        self.is_inside_epoch = self.is_in_hook = self.is_closed = False
        self._may_end_epoch = False
        self._left_epoch: int | None = None  # left by `break`, and the next one has not begun
        self._is_left_open = False  # and what ends every epoch is still to be done
        self.is_repeating = False  # exact mode had to begin this step again
        self.last_record: StepRecord | None = None

    def micro_batches(self, epoch: int) -> Iterator[Any]:
        """This worker's micro-batches until this epoch ends; `step` must be called after each.

        A worker without a share in a step still takes part: the step is completed here. A step that exact mode has
        to repeat leaves the position where it was, and its micro-batches come again.
        """
        self.is_inside_epoch = True
        self._timeline.event("epoch begin", number=epoch)
        self._collector.begin_epoch(self.position.step)
        begun_at: Position | None = None
        try:
            while self.position.epoch == epoch and not self.is_over:
                self._keeper.between_steps(self)
                self._collector.between_steps(self.position.step)
                mine = self._begin_step()
                if mine is None:
                    break
                self.is_repeating, begun_at = begun_at == self.position, self.position
                for numbers in passes(mine, self._at_once):
                    batch = self._begin_micro_batch(numbers, is_last=numbers.stop == mine.stop)
                    if batch is not None:
                        yield batch
                    else:
                        self.step()  # every sample of it was bad
                    if self._is_open:
                        raise MisuseError("the next micro-batch was asked for before step() was called for this one")
                if not mine:
                    self._finish_step()
            self._complete_epoch()
        except GeneratorExit:  # left by `break`, or by an exception in the loop's body: here it cannot be told which
            self._left_epoch, self._is_left_open = epoch, True
            raise
        finally:
            self._collector.end_epoch()
            self.is_inside_epoch = False
            # On several workers the step stays as it is until the others are told.
            if self._is_step_under_way and (self._world.size == 1 or self._left_epoch is None):
                self.abandon()

    def abandon(self) -> None:
        """Drop the step that is under way, if one is."""
        if self._is_step_under_way:
            self._is_open, self._is_last = False, True
            self._exchange.abandon()

    def end_epoch(self) -> None:
        """Let the epoch end after the step whose hook calls this."""
        if not self._may_end_epoch or self.last_record is None:
            raise MisuseError(
                "end_epoch() ends an epoch on all workers after the same step: call it in a hook of trainer.every, "
                "such as trainer.every(100, lambda record: trainer.end_epoch())"
            )
        if self.position.epoch == self.last_record.epoch:  # else that was the epoch's last step
            self.position = self.position.next_epoch()

    def settle(self) -> None:
        """An epoch's loop may have been left by `break`: do now what the end of every epoch needs.

        One worker may leave an epoch before its end. Of several none may: on each the loop's body runs for other
        micro-batches, so they would leave at different steps. That is an error, on all of them.
        """
        if not self._is_left_open:
            return
        self._is_left_open = False
        if self.position.epoch == self._left_epoch and not self.is_over and self._world.size > 1:
            self._tell_left()
        self._complete_epoch()

    def begin_next_epoch(self) -> bool:
        """After a `break`, go to the next epoch; False if there was none."""
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
        """Whether this worker has begun micro-batches of a step that it did not exchange yet."""
        return self._is_open or not self._is_last

    def _tell_left(self) -> None:
        """Take part in the others' steps, without a gradient, until all have read that this worker left."""
        if self._world.device.type != "cpu":  # they read it steps later, and would go on without this worker's part
            raise left_error([self._world.rank])
        is_under_way = self._is_step_under_way
        if self._is_open:
            self._exchange.end_micro_batch(None)
        self._is_open, self._is_last = False, True
        while self.position.epoch == self._left_epoch and not self.is_over:
            if not is_under_way:
                self._keeper.between_steps(self)
                mine = self._begin_step()
                if mine is None:
                    break
                if mine:
                    self._exchange.begin_micro_batch(mine[-1], 0, is_last=True)
                    self._exchange.end_micro_batch(None)
            is_under_way = False
            self._exchange.send(WorkerMessage(wish=LEFT, digest=self._agreement.digest()))
            if (numbers := self._exchange.finish()) is not None:
                self._keeper.observe(numbers)  # an error, as soon as all have read it
                self._exchange.complete()
                self.position = self._feed.after_step(self.position)
        self._exchange.synchronize()
        raise left_error([self._world.rank])

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Backward of this micro-batch's loss, a mean over its samples. Several calls add up."""
        if not self._is_open:
            raise MisuseError("backward() was called outside of a micro-batch: call it inside `for batch in epoch`")
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor with one number")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number, such as loss.mean()")
        try:
            run = partial(self._backward, retain_graph=True) if retain_graph else self._backward
            self._exchange.backward(run, loss if self._loss_scale is None else loss * self._loss_scale.value)
        except torch.OutOfMemoryError as error:
            self.explain(error)
            raise
        reported = loss.detach()
        self._loss = reported if self._loss is None else self._loss + reported

    def replayed(self, loss: torch.Tensor | None) -> None:
        """A graph has run this micro-batch's forward and backward and left its loss there. None: nothing has."""
        self._loss = loss

    def step(self) -> StepRecord | None:
        """End this micro-batch, and the step if it was this worker's last; returns the record of a completed step."""
        if not self._is_open:
            raise MisuseError("step() was called without a micro-batch: call it once for each `for batch in epoch`")
        if self.weight and not self._exchange.has_gradient():
            raise MisuseError(
                "step() was called before backward(): this micro-batch has no gradient"
                if self._loss is None
                else "backward() gave none of the run's parameters a gradient: compute the loss with trainer.model, "
                "and do not call zero_grad() before step()"
            )
        if self._loss is None and self.weight:
            if self._loss_scale is not None:
                raise MisuseError(
                    "precision='fp16' scales the loss before backward: call trainer.backward(loss) instead of "
                    "loss.backward() or a GradScaler of your own, whose gradients would be taken for scaled ones"
                )
            self._is_loss_known = False  # a bare loss.backward()
        self._is_open = False
        self._exchange.end_micro_batch(self._loss)
        self._stopwatch.stop(self._num_open)
        return self._finish_step() if self._is_last else None

    @property
    def has_gradient_hooks(self) -> bool:
        return bool(self._gradient_hooks)

    @property
    def is_over(self) -> bool:
        """Whether as many steps are done as the run is to have."""
        return self.max_steps is not None and self.position.step >= self.max_steps

    def synchronize(self) -> None:
        """Make all replicas equal, where the strategy lets them differ."""
        self._exchange.synchronize()

    def every(self, steps: int, hook: Callable[[StepRecord], object]) -> None:
        """Call `hook(record)` after every so-many steps, on all workers together."""
        if steps < 1:
            raise ValueError(f"every({steps}, ...): choose at least 1 step")
        self._hooks.append((steps, hook))

    def every_epoch(self, epochs: int, hook: Callable[[int], object]) -> None:
        """Call `hook(number)` at the end of every so-many epochs, on all workers together."""
        if epochs < 1:
            raise ValueError(f"every_epoch({epochs}, ...): choose at least 1 epoch")
        self._epoch_hooks.append((epochs, hook))

    def on_parameters(self, hook: Callable[[], object]) -> None:
        """Call `hook()` when other parameters are trained than before."""
        self._parameter_hooks.append(hook)

    def set_learning_rate(self, rate: float, group: int = -1) -> None:
        """Set the learning rate of a parameter group, or of all, on all workers alike.

        In the loop's body: for the step under way, whoever of the workers asks for it. Elsewhere: at once, on every
        worker that calls it.
        """
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr={rate}: choose a finite number >= 0")
        if not self.is_inside_epoch:
            self.replica.set_learning_rate(rate, group)
            return
        if not self._may_request_rates:
            raise MisuseError(
                "set_lr() was called in an epoch's loop, which a worker without a share skips: with several GPUs, or "
                "replicas that are averaged, call it in a hook, trainer.every(1, lambda record: trainer.set_lr(...))"
            )
        self._requested_rate = (rate, group)

    def check_replicas(self) -> None:
        """Raise on all workers if their weights differ. All call it together, between two steps."""
        self._replica_check.look(self.position.step)

    def on_gradients(self, hook: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        """Call `hook(parameters)` in every step, when they have the mean gradients and nothing was clipped yet."""
        self._gradient_hooks.append(hook)

    def explain(self, error: BaseException) -> None:
        """Tell in a note what to change, where that can be told from the error."""
        if isinstance(error, torch.OutOfMemoryError):
            explain_out_of_memory(error, self._config, self.replica, self._world)

    def report(self) -> Report:
        """Where the workers' time went so far."""
        return self._account.report()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, and what its next step needs to know beside weights and optimizer."""
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
        """Go on from there. What was learned about the workers counts only for as many of them."""
        self.position = Position.from_dict(state["position"])
        self._events.step = self.position.step
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])
        if "trained" in state:
            self.replica.set_trained(state["trained"])
            if self.replica.take_changes() is not None:
                self._use_parameters([])
        self._exchange.load_state_dict(state["exchange"])
        if state["num_workers"] == self._world.size:
            self._planner.load_state_dict(state["planner"])

    def _begin_step(self) -> range | None:
        """This worker's micro-batches of the next step; None if the epoch is over."""
        self._stopwatch.begin_step()
        step = self._feed.begin_step(self.position)
        self._stopwatch.ready()
        if step is None:
            ended, self.position = self.position.epoch, self.position.next_epoch()
            self._end_epoch(ended)
            return None
        if step is not self._step:
            self._step = step
            self._note_plan(step)
        self._is_loss_known = True
        self._take_parameter_changes()
        self._exchange.begin_step(
            step.plan,
            total_weight=step.total_weight,
            loss_scale=self._loss_scale.value if self._loss_scale else 1.0,
        )
        return step.plan[self._world.rank]

    def _begin_micro_batch(self, numbers: range, *, is_last: bool) -> Any:
        """The batch of these micro-batches of the step: one of them, or several that this device runs as one."""
        self._stopwatch.start()
        position, self._num_open = self.position, len(numbers)
        batch, self.weight = self._feed.micro_batch(numbers)
        self._stopwatch.ready()
        # The last of several stands for all: the step's last micro-batch is then found where it is looked for.
        self._exchange.begin_micro_batch(numbers[-1], self.weight, is_last=is_last)
        # Dropout belongs to the micro-batch, not to the rank.
        self._seed_micro_batch(position.step, numbers[0])
        self._loss = None
        self._is_last = is_last
        self._is_open = True
        return batch

    def _finish_step(self) -> StepRecord | None:
        position = self.position
        message = WorkerMessage(
            self._stopwatch.send(), self._keeper.wish, self._agreement.digest(), self._requested_rate
        )
        self._requested_rate = None
        self._exchange.send(message)
        numbers = self._exchange.finish(self._accept)
        self._stopwatch.received()
        if numbers is None:
            if self._added is not None:
                self._use_parameters(self._added)
            return None
        plan, num_samples = self._step.plan, self._step.num_samples
        self._planner.observe(plan, numbers)
        self._keeper.observe(numbers)
        # From here on every worker does the same, drawing the same random numbers.
        self._seed_after_step(position.step)
        # A worker alone knows what it asked for; asking a GPU would wait for it.
        if self._world.size > 1:
            if self._may_request_rates:
                self._set_requested_rate(numbers.learning_rates)
        elif message.learning_rate is not None:
            self.replica.set_learning_rate(*message.learning_rate)
        for on_gradients in self._gradient_hooks:
            self._run_hook(on_gradients, self.replica.parameters)
        norm = self.update.clip()
        if self._is_step_valid(numbers, norm):
            self.update.step()
            self._average.update()
            if self.replica.schedulers and self._config.optimization.scheduler_every == "step":
                self.replica.step_schedulers(lambda: self._told_loss(numbers))
            is_skipped = False
        else:
            is_skipped = True
        self._stopwatch.end_step()
        self._events.step = position.step + 1
        self._exchange.complete()
        self._stopwatch.completed(position.step + 1)
        self._account.add(plan, num_samples, numbers)
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
        if self._world.size > 1:
            self._replica_check.after_step(len(plan[0]), numbers, record.step)
        self._may_end_epoch = True
        for steps, hook in self._hooks:
            if record.step % steps == 0:
                self._run_hook(hook, record)
        self._may_end_epoch = False
        if self.position.epoch != position.epoch:
            self._end_epoch(position.epoch)
        return record

    def _end_epoch(self, number: int) -> None:
        """Its last step is done: on all workers, also on one that leaves its loop by `break` now."""
        self._timeline.event("epoch end", number=number)
        if self._config.optimization.scheduler_every == "epoch":
            self.replica.step_schedulers()
        for epochs, hook in self._epoch_hooks:
            if (number + 1) % epochs == 0:
                self._run_hook(hook, number)

    def _take_parameter_changes(self) -> None:
        """The user may freeze, unfreeze and add parameters between two steps.

        One worker uses them at once. Several must know of each other that all have done it, which this step's exchange
        tells: if so, the step is begun again with the new ones.
        """
        added = self.replica.take_changes()
        if added is None:
            return
        self._added = [*(self._added or []), *added]
        if self._world.size == 1:
            self._use_parameters(self._added)

    def _accept(self, numbers: Numbers) -> bool:
        """Whether the step counts. Workers that differ in what must be the same raise, all of them."""
        has_changes = self._added is not None
        self._agreement.check(numbers, now=has_changes)
        return not has_changes

    def _use_parameters(self, added: Sequence[torch.Tensor]) -> None:
        """Train what the replica trains now; all workers get rank 0's values of what is new."""
        self._added = None
        if added:
            share_weights(self.replica.model, self.replica.parameters, self._communicator)
        self._exchange.set_parameters(self.replica.parameters, Buffers(self.replica.model, self._communicator))
        self._average.set_parameters(self.replica)
        for hook in self._parameter_hooks:
            hook()

    def _set_requested_rate(self, by_rank: Sequence[tuple[float, int] | None]) -> None:
        requests = {rank: rate for rank, rate in enumerate(by_rank) if rate is not None}
        if not requests:
            return
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
                "ReduceLROnPlateau follows the loss, which a bare loss.backward() keeps from the run: call "
                "trainer.backward(loss)"
            )
        return numbers.loss

    def _note_plan(self, step: Step) -> None:
        """A change of the plan is an event, unless it is the epoch's end that makes the step smaller."""
        plan, usual = step.plan, self._usual_plan
        if plan != usual and not step.is_cut:
            self._usual_plan = plan
            self._events.emit("plan", shares=sizes(plan), before=sizes(usual))

    def _is_step_valid(self, numbers: Numbers, norm: Number | None) -> bool:
        """Whether to take the step. False: fp16 overflowed, skip it. Not finite without fp16 is an error."""
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

    def _run_hook(self, hook: Callable[[Any], object], subject: Any) -> None:
        is_inside, self.is_inside_epoch, self.is_in_hook = self.is_inside_epoch, False, True
        try:
            hook(subject)
        finally:
            self.is_inside_epoch, self.is_in_hook = is_inside, False


@dataclass(slots=True)  # not frozen: that would take a microsecond of every step
class StepRecord:
    """A completed step. Numbers are read from the device when they are asked for.

    `step` counts completed steps, `epoch` from 0. `num_samples` is the size of the global batch. `lr` is the rate for
    the next step. `is_skipped`: fp16 overflowed.
    """

    step: int
    epoch: int
    num_samples: int
    lr: float
    is_skipped: bool
    _plan: Plan
    _numbers: Numbers
    _norm: Number | None

    @property
    def loss(self) -> float:
        """The mean over the global batch, before the update; the same on every worker.

        NaN if no sample had weight, and where a bare `loss.backward()` kept it from the run. With `Averaging` workers
        exchange nothing between two meetings: then it is the mean over all workers' steps up to the last meeting,
        since the one before; NaN until the first.
        """
        return self._numbers.loss

    @property
    def weight(self) -> float:
        """What the mean was taken over: samples, or what weight_fn counted. With `Averaging`, per step of its mean."""
        return self._numbers.total_weight

    def part_of(self, rank: int) -> tuple[float, float]:
        """What a worker adds to a sum over steps and workers: its weighted loss, and its weight.

        Of a step that was exchanged rank 0 has it all; the others have nothing.
        """
        if self.is_skipped:
            return 0.0, 0.0
        if isinstance(self._numbers, LocalNumbers):
            return self._numbers.own_part
        return (self.loss * self.weight, self.weight) if rank == 0 and self.weight else (0.0, 0.0)

    @property
    def shares(self) -> tuple[int, ...]:
        """How many of the step's micro-batches each worker took, by rank."""
        return sizes(self._plan)

    @property
    def timings(self) -> Sequence[Timing]:
        """What each worker said about its time, by rank."""
        return self._numbers.timings

    @property
    def grad_norm(self) -> float | None:
        """The mean gradient's norm before clipping; None unless `max_grad_norm` is set (math.inf only measures)."""
        return None if self._norm is None else self._norm.item()
