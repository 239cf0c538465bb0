"""The gradients strategy: every step, the weighted mean of all micro-batches' gradients, on every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.base import Communicator, Pending
from paceline.core.errors import GradientError, MisuseError
from paceline.core.timing import NOT_MEASURED, Timing
from paceline.plan.shares import Plan, owner
from paceline.sync import terms
from paceline.sync.autograd_sums import AutogradSums
from paceline.sync.buckets import (
    BUCKET_BYTES,
    Bucket,
    ExactBucket,
    OneTermBucket,
    assign,
    in_layout_of,
    sum_dtype,
)
from paceline.sync.buffers import Buffers
from paceline.sync.fused import WAITING_BYTES, Arrival, fused_addition
from paceline.sync.grid import Grid
from paceline.sync.numbers import Layout, StepNumbers
from paceline.sync.tail import Tail
from paceline.sync.terms import TermBucket


class BucketedGradients:
    """Hooks move each gradient, as soon as backward has it, into flat buckets that are summed over the workers.

    A model that fits one bucket has none that could leave early. On a CPU, where such a model's steps are short, its
    gradients are moved all together after backward, which takes less time than as many hooks. In a step of several
    micro-batches autograd adds up most of them by itself, see `autograd_sums`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        communicator: Communicator,
        buffers: Buffers,
        *,
        max_micro_batches: int,
        exact: bool = False,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._communicator = communicator
        self._buffers = buffers
        groups = assign(parameters, bucket_bytes)
        self._overlap = overlap and communicator.world.size > 1 and len(groups) > 1
        layout = Layout(
            max_micro_batches,
            len(groups) + 1 if exact else 0,
            communicator.world.size,
            len(parameters),
            buffers.num_unmanaged,
        )
        is_rounded = exact and max_micro_batches > 1
        self._groups = groups
        self._grids = [Grid() for _ in range(len(groups) + 1)] if is_rounded else []
        self._terms: list[TermBucket] = []
        self._sums: list[Bucket] = []
        num_numbers = buffers.numel + layout.total
        if exact and terms.are_possible(communicator, parameters, max_micro_batches):
            self._terms = terms.buckets(groups, communicator, self._grids)
            self._apart: torch.Tensor | None = communicator.empty(num_numbers, torch.float64, communicator.world.device)
            numbers = self._apart.zero_()
        else:
            bucket_type = ExactBucket if is_rounded else OneTermBucket if exact else Bucket
            self._sums = self._make(bucket_type, num_numbers)
            self._apart = None  # they ride with the last bucket
            numbers = self._sums[-1].tail
        self._buckets: Sequence[Bucket] = self._terms or self._sums
        self._tail = Tail(layout, numbers[buffers.numel :], communicator.world.rank)
        buffers.accumulate_in(numbers[: buffers.numel], self._grids[-1] if is_rounded else None)
        self._has_peaks = exact
        self._fused = fused_addition(self._tail.device) if exact else None
        self._held: list[tuple[_Slot, torch.Tensor, bool]] = []
        self._held_bytes = 0

        self._slots_by_bucket = [
            [_Slot(bucket, number, i) for i in range(len(bucket.views))] for number, bucket in enumerate(self._buckets)
        ]
        self._slots = [slot for slots in self._slots_by_bucket for slot in slots]
        self._parameters = [slot.parameter for slot in self._slots]
        is_small = len(self._buckets) == 1 and self._buckets[0].flat.nbytes <= BUCKET_BYTES
        self._takes_together = is_small and self._tail.device.type == "cpu" and not exact
        self._autograd_sums = AutogradSums(self._slots, self._buckets, exact=exact, max_micro_batches=max_micro_batches)
        self._on_gradient = [self._hook(slot) for slot in self._slots]
        self._hooks: list[RemovableHandle] = []
        self._listen()
        self._is_open = False
        self._was_left_exchanging = False
        self._comes_in_parts = False
        self._pending: list[Pending] = []

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        if self._was_left_exchanging:
            raise MisuseError(
                "the epoch was left between backward() and step() of a step's last micro-batch, when its exchange had "
                "begun: leave it after step(), or pass overlap=False"
            )
        num_micro_batches = plan[-1].stop
        self._plan = plan
        if self._terms:
            self._use(self._terms if terms.are_single(plan) and not self._comes_in_parts else self._sums_made())
        # Dividing by a known total while adding saves a pass over all gradients afterwards.
        self._must_divide = total_weight is None
        self._scale = loss_scale * (total_weight or 1)
        self._autograd_sums.begin_step(len(plan[self._communicator.world.rank]))
        self._pending = []
        self._num_taken = 0
        self._num_in_parts = 0
        self._tail.clear()
        self._buffers.begin_step(num_micro_batches)
        for slot in self._slots:
            slot.is_used = False

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        for slot in self._slots:
            slot.parameter.grad = None
            slot.firings = 0
        self._number = number
        self._tail.set_weight(number, weight)
        self._may_send = is_last and self._overlap
        self._held, self._held_bytes = [], 0
        self._factor = self._autograd_sums.begin_micro_batch(weight / self._scale, by_hooks=self._may_send)
        if not self._autograd_sums.is_possible:
            self._listen()
        self._is_open = True

    def backward(self, run: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        if self._autograd_sums.is_possible:
            self._ignore()
            self._autograd_sums.backward(run, loss)
        else:
            run(loss)

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        self._may_send = False
        if not (self._takes_together and self._take_all()):
            for slot in self._slots:
                # A gradient that no hook saw: the user computed it with autograd.grad and put it there.
                if slot.parameter.grad is not None:
                    self._take(slot)
                slot.expected = max(slot.expected, slot.firings)
        self._add_held()
        self._is_open = False
        if loss is not None and self._factor:
            self._tail.set_loss(self._number, loss)
        peak = self._buffers.end_micro_batch(self._number)
        if peak is not None and self._has_peaks:
            self._tail.peaks[-1][self._number].copy_(peak)

    def has_gradient(self) -> bool:
        if self._autograd_sums.have_grown:
            return True
        for slot in self._slots:  # noqa: SIM110 - `any` takes longer to begin than the first slot to answer
            if slot.firings or slot.parameter.grad is not None:
                return True
        return False

    def send(self, timing: Timing = NOT_MEASURED, wish: float = 0.0) -> None:
        self._used = [slot.is_used for slot in self._slots]
        changed = self._buffers.changed_unmanaged()
        self._tail.write(timing, wish, self._used, changed, parts=self._num_in_parts > 0)
        while len(self._pending) < len(self._buckets):
            self._send_next()
        if self._apart is not None:
            self._numbers_on_way = self._communicator.all_reduce(self._apart)

    def finish(self) -> StepNumbers | None:
        if self._apart is not None:
            self._numbers_on_way.wait()
            if self._buckets is self._terms:
                self._weigh_terms()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        numbers = self._tail.numbers()
        # Before looking at the peaks: while the host waits for them, a GPU has this to do.
        self._publish(numbers)
        if self._buckets is self._terms and numbers.num_in_parts:
            self._comes_in_parts = True  # no term was whole: from now on, and in this step again, they are added up
            is_valid = False
        else:
            is_valid = not self._grids or self._fit_grids(numbers)
        if not is_valid:
            self.complete()
            self._buffers.restore()
            return None
        if self._buffers.num_unmanaged or self._buffers.numel:
            last = self._plan[-1].stop - 1
            self._buffers.finish(numbers.changed_buffers, owner(self._plan, last))
        return numbers

    def complete(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def synchronize(self) -> None:
        return

    def abandon(self) -> None:
        # Others may still be computing: waiting for them here would keep an error that ended this step from showing.
        self._was_left_exchanging = bool(self._pending)
        self._is_open = False
        self._buffers.restore()
        self.complete()

    def state_dict(self) -> dict[str, Any]:
        return {"grid_tops": [grid.top for grid in self._grids]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for grid, top in zip(self._grids, state.get("grid_tops", ()), strict=False):
            grid.top = top

    def close(self) -> None:
        self._ignore()

    def _listen(self) -> None:
        if not (self._hooks or self._takes_together):
            self._hooks = [
                slot.parameter.register_post_accumulate_grad_hook(hook)
                for slot, hook in zip(self._slots, self._on_gradient, strict=True)
            ]

    def _ignore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not self._is_open:
                return  # a backward of the user's own, between micro-batches
            self._take(slot)
            if self._may_send:
                self._send_finished()

        return hook

    def _take_all(self) -> bool:
        """All gradients at once; False where that cannot be, and they must be taken one by one."""
        is_first = self._num_taken == 0
        self._num_taken += 1
        if not self._factor or (not is_first and not all(slot.is_used for slot in self._slots)):
            return False
        gradients = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                return False
            gradients.append(gradient)
        self._buckets[0].add_all(gradients, self._factor, first=is_first)
        self.complete()
        if is_first:
            for slot in self._slots:
                slot.is_used = True
        return True

    def _take(self, slot: _Slot) -> None:
        gradient, slot.parameter.grad = slot.parameter.grad, None
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise GradientError(
                f"parameter {slot.name!r} has a sparse gradient, which cannot be averaged in a flat buffer: "
                "build its layer with sparse=False"
            )
        if slot.bucket_number < len(self._pending):
            raise GradientError(
                f"parameter {slot.name!r} got a gradient after its exchange had begun: this micro-batch ran backward "
                "through it more often than any before. Pass overlap=False, which exchanges after the last backward"
            )
        slot.firings += 1
        if not self._factor:
            return  # a micro-batch without weight adds nothing, not even 0 * NaN
        is_again = slot.firings > 1
        self._num_in_parts += is_again
        if self._fused is not None and not is_again and self._fused.takes(gradient):
            self._hold(slot, gradient)
        else:
            self._add_held()
            self._add(slot, gradient, first=not slot.is_used, is_again=is_again)
        slot.is_used = True

    def _add(self, slot: _Slot, gradient: torch.Tensor, *, first: bool, is_again: bool = False) -> None:
        if self._has_peaks:
            self._tail.note_peak(slot.bucket_number, self._number, gradient, is_again=is_again)
        slot.bucket.add(slot.index, gradient, self._factor, first=first)

    def _hold(self, slot: _Slot, gradient: torch.Tensor) -> None:
        """Let it wait for others, to be added with them."""
        self._held.append((slot, gradient, not slot.is_used))
        self._held_bytes += gradient.numel() * gradient.element_size()
        if self._held_bytes >= WAITING_BYTES:
            self._add_held()

    def _add_held(self) -> None:
        if not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        assert self._fused is not None
        if torch.cuda.is_current_stream_capturing():
            # The graph would fetch the addresses again at every replay, from memory that has others' by then.
            for slot, gradient, first in held:
                self._add(slot, gradient, first=first)
            return
        arrivals = [
            Arrival(
                in_layout_of(slot.view, gradient),
                slot.view,
                self._tail.peaks[slot.bucket_number],
                slot.bucket.grid.anchor if isinstance(slot.bucket, ExactBucket) else None,
                first,
            )
            for slot, gradient, first in held
        ]
        self._fused.add(arrivals, self._factor, self._number)

    def _send_finished(self) -> None:
        """Start the exchange of every bucket that is complete, in the one order all workers share.

        The last bucket waits for `send`: it carries the step's numbers.
        """
        while len(self._pending) < len(self._buckets) - 1:
            if not all(0 < slot.expected <= slot.firings for slot in self._slots_by_bucket[len(self._pending)]):
                return
            self._add_held()
            self._send_next()

    def _send_next(self) -> None:
        number = len(self._pending)
        for slot in self._slots_by_bucket[number]:
            if not slot.is_used:
                slot.view.zero_()
        bucket = self._buckets[number]
        self._autograd_sums.weigh(bucket)
        self._pending.append(bucket.exchange())

    def _fit_grids(self, numbers: StepNumbers) -> bool:
        """Whether every sum stayed on its grid. Moves the grids either way: to repeat the step, or for the next."""
        m, fits = self._plan[-1].stop, True
        for i, grid in enumerate(self._grids):
            peaks = self._peaks(numbers, i) if i < len(self._buckets) else numbers.peaks(i)[:m]
            fits = grid.fits(peaks) and fits
            grid.follow(peaks)
        return fits

    def _peaks(self, numbers: StepNumbers, bucket: int) -> list[float]:
        """The largest magnitude of each micro-batch's term. What the numbers have was taken before weighting."""
        peaks = numbers.peaks(bucket)[: self._plan[-1].stop]
        return [peak * (weight / self._scale) for peak, weight in zip(peaks, numbers.weights, strict=False)]

    def _publish(self, numbers: StepNumbers) -> None:
        # A parameter this worker used is used. Only for the others must the host look at the exchanged numbers.
        used = self._used
        if not all(used):
            used = [count > 0 for count in numbers.used]
        divisor, first = self._divisor(), 0
        for bucket in self._buckets:
            stop = first + len(bucket.views)
            bucket.publish(used[first:stop], divisor)
            first = stop

    def _divisor(self) -> torch.Tensor | None:
        """What the sums are to be divided by, after the exchange: the total weight, if it was not known before."""
        return self._tail.total_weight() if self._must_divide else None

    def _weigh_terms(self) -> None:
        """Whoever adds up the workers' terms must know all their weights, which have just come."""
        numbers = self._tail.numbers()
        weights = terms.weights_by_rank(self._plan, numbers.weights)
        divisor = self._divisor()
        for i, bucket in enumerate(self._terms):
            bucket.weigh([weight / self._scale for weight in weights], divisor, self._peaks(numbers, i))

    def _make(self, bucket_type: type[Bucket], tail_numel: int) -> list[Bucket]:
        tails = [0] * (len(self._groups) - 1) + [tail_numel]
        buckets = [
            bucket_type(group, sum_dtype(next(iter(group.values()))), self._communicator, tail)
            for group, tail in zip(self._groups, tails, strict=True)
        ]
        for bucket, grid in zip(buckets, self._grids, strict=False):
            if isinstance(bucket, ExactBucket):
                bucket.grid = grid
        return buckets

    def _sums_made(self) -> Sequence[Bucket]:
        """Those in which workers add up several terms. Most runs of single terms never need them."""
        if not self._sums:
            self._sums = self._make(ExactBucket, 0)
        return self._sums

    def _use(self, buckets: Sequence[Bucket]) -> None:
        if buckets is not self._buckets:
            self._buckets = buckets
            for slot in self._slots:
                slot.move_to(buckets[slot.bucket_number])


class _Slot:
    """One parameter's place in a bucket, and what happened to it in this step."""

    def __init__(self, bucket: Bucket, bucket_number: int, index: int) -> None:
        self.bucket = bucket
        self.bucket_number = bucket_number
        self.index = index
        self.name = bucket.names[index]
        self.parameter = bucket.parameters[index]
        self.view = bucket.views[index]
        self.is_used = False
        self.firings = 0  # gradients in this micro-batch
        self.expected = 0  # the most in any micro-batch so far

    def move_to(self, bucket: Bucket) -> None:
        """Into another bucket of the same parameters."""
        self.bucket = bucket
        self.view = bucket.views[self.index]
