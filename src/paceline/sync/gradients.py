"""The gradients strategy: every step, the weighted mean of all micro-batches' gradients, on every worker.

Lifecycle, once per step: `begin_step`, then for each micro-batch of this worker `begin_micro_batch` and
`end_micro_batch`, then `send` and `finish`, and after the optimizer's step `complete`. A step may be given up before
`send` with `abandon` and begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from paceline.comm.base import Communicator, Pending
from paceline.core.errors import GradientError, MisuseError
from paceline.core.timing import NOT_MEASURED, Timing
from paceline.plan.shares import Plan, owner
from paceline.sync.buckets import BUCKET_BYTES, Bucket, ExactBucket, assign, largest_magnitude, sum_dtype
from paceline.sync.buffers import Buffers
from paceline.sync.grid import Grid
from paceline.sync.numbers import Layout, Numbers, OneLoss, StepNumbers, pad


class GradientExchange(Protocol):
    """What the loop needs of it; see the module's docstring for the order of the calls."""

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        """`plan`: who runs which micro-batches. `total_weight`: what the step's weights will add up to, where that is
        known beforehand. `loss_scale`: what the losses are multiplied by before backward (fp16)."""

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        """`is_last`: this worker has no further micro-batch in this step, so exchanging may start during backward."""

    def end_micro_batch(self, loss: torch.Tensor | None) -> None: ...

    def has_gradient(self) -> bool:
        """Whether this micro-batch has produced any gradient yet."""

    def send(self, timing: Timing = NOT_MEASURED, wish: float = 0.0) -> None:
        """Start exchanging what has not left yet, and with it what this worker says about its time and asks of all."""

    def finish(self) -> Numbers | None:
        """Wait for the exchange: now every parameter has its mean gradient, and everybody the step's numbers.

        None: the sums did not fit their grid. Nothing was published, the grid is wider now; begin the step again.
        """

    def complete(self) -> None:
        """The optimizer has used the gradients."""

    def synchronize(self) -> None:
        """Make all replicas equal; they are already where every step exchanges. All workers call it together."""

    def abandon(self) -> None:
        """Drop the gradients and undo what the micro-batches did to the buffers."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs to know of earlier ones, between two steps of replicas that are equal."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of workers; the parameters already are those of then."""

    def close(self) -> None:
        """Leave the parameters as they were found."""


class DirectGradients:
    """A world of one with one micro-batch per step, plainly: autograd's own gradient is the mean already."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = list(parameters.values())

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        return

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._drop()  # of a backward of the user's own, between micro-batches
        self._weight = weight

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        self._loss = loss

    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def send(self, timing: Timing = NOT_MEASURED, wish: float = 0.0) -> None:
        self._timing = timing
        self._wish = wish

    def finish(self) -> OneLoss:
        if not self._weight:
            self._drop()
        return OneLoss(self._loss, self._weight, self._timing, self._wish)

    def complete(self) -> None:
        self._drop()

    def synchronize(self) -> None:
        return

    def abandon(self) -> None:
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class BucketedGradients:
    """Hooks move each gradient, as soon as backward has it, into flat buckets that are summed over the workers."""

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
        self._overlap = overlap and communicator.world.size > 1
        groups = assign(parameters, bucket_bytes)
        self._layout = Layout(
            max_micro_batches,
            len(groups) + 1 if exact else 0,
            communicator.world.size,
            len(parameters),
            buffers.num_unmanaged,
        )
        bucket_type = ExactBucket if exact else Bucket
        tails = [0] * (len(groups) - 1) + [buffers.numel + self._layout.total]
        self._buckets = [
            bucket_type(group, sum_dtype(next(iter(group.values()))), communicator, tail)
            for group, tail in zip(groups, tails, strict=True)
        ]
        self._tail = self._buckets[-1].tail[buffers.numel :]
        self._grids = [b.grid for b in self._buckets if isinstance(b, ExactBucket)]
        if exact:
            self._grids.append(Grid())
        buffers.accumulate_in(self._buckets[-1].tail[: buffers.numel], self._grids[-1] if exact else None)

        self._slots_by_bucket = [
            [_Slot(bucket, number, i) for i in range(len(bucket.views))] for number, bucket in enumerate(self._buckets)
        ]
        self._slots = [slot for slots in self._slots_by_bucket for slot in slots]
        self._hooks = [slot.parameter.register_post_accumulate_grad_hook(self._hook(slot)) for slot in self._slots]
        self._is_open = False
        self._was_left_exchanging = False
        self._pending: list[Pending] = []

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        if self._was_left_exchanging:
            raise MisuseError(
                "the epoch was left between backward() and step() of a step's last micro-batch, when its exchange had "
                "begun: leave it after step(), or pass overlap=False"
            )
        num_micro_batches = plan[-1].stop
        self._plan = plan
        # Dividing by a known total while adding saves a pass over all gradients afterwards.
        self._must_divide = total_weight is None
        self._scale = loss_scale * (total_weight or 1)
        self._weights = [0.0] * num_micro_batches
        self._pending = []
        self._tail.zero_()
        self._buffers.begin_step(num_micro_batches)
        for slot in self._slots:
            slot.is_used = False

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        for slot in self._slots:
            slot.parameter.grad = None
            slot.firings = 0
        self._number = number
        self._weights[number] = weight
        self._factor = weight / self._scale
        self._may_send = is_last and self._overlap
        self._is_open = True

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        self._may_send = False
        for slot in self._slots:
            # A gradient that no hook saw: the user computed it with autograd.grad and put it there.
            if slot.parameter.grad is not None:
                self._take(slot)
            slot.expected = max(slot.expected, slot.firings)
        self._is_open = False
        if loss is not None and self._factor:
            self._tail[self._number].copy_(loss.reshape(()))
        peak = self._buffers.end_micro_batch(self._number)
        if peak is not None and self._grids:
            self._peak(len(self._buckets)).copy_(peak)

    def has_gradient(self) -> bool:
        return any(slot.firings or slot.parameter.grad is not None for slot in self._slots)

    def send(self, timing: Timing = NOT_MEASURED, wish: float = 0.0) -> None:
        self._write_host_numbers(timing, wish)
        while len(self._pending) < len(self._buckets):
            self._send_next()

    def finish(self) -> StepNumbers | None:
        for pending in self._pending:
            pending.wait()
        self._pending = []
        numbers = StepNumbers(self._layout, self._tail)
        if self._grids and not self._fit_grids(numbers):
            self._buffers.restore()
            return None
        self._publish(numbers)
        if self._buffers.num_unmanaged or self._buffers.numel:
            last = self._plan[-1].stop - 1
            self._buffers.finish(numbers.changed_buffers, owner(self._plan, last))
        return numbers

    def complete(self) -> None:
        for slot in self._slots:
            slot.parameter.grad = None

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
        for hook in self._hooks:
            hook.remove()

    def _hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not self._is_open:
                return  # a backward of the user's own, between micro-batches
            self._take(slot)
            if self._may_send:
                self._send_finished()

        return hook

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
        if self._grids:
            self._note_peak(slot, gradient)
        slot.bucket.add(slot.index, gradient, self._factor, first=not slot.is_used)
        slot.is_used = True

    def _peak(self, grid_number: int) -> torch.Tensor:
        """This micro-batch's slot for the largest magnitude on this grid."""
        m = self._layout.num_micro_batches
        return self._tail[m + grid_number * m + self._number]

    def _note_peak(self, slot: _Slot, gradient: torch.Tensor) -> None:
        peak = self._peak(slot.bucket_number)
        largest = largest_magnitude(gradient)
        if slot.firings == 1:
            torch.maximum(peak, largest, out=peak)
        else:
            peak.add_(largest)  # two parts of one term: no more than the sum of both

    def _send_finished(self) -> None:
        """Start the exchange of every bucket that is complete, in the one order all workers share.

        The last bucket waits for `send`: it carries the step's numbers.
        """
        while len(self._pending) < len(self._buckets) - 1:
            if not all(0 < slot.expected <= slot.firings for slot in self._slots_by_bucket[len(self._pending)]):
                return
            self._send_next()

    def _send_next(self) -> None:
        number = len(self._pending)
        for slot in self._slots_by_bucket[number]:
            if not slot.is_used:
                slot.view.zero_()
        self._pending.append(self._communicator.all_reduce(self._buckets[number].flat))

    def _write_host_numbers(self, timing: Timing, wish: float) -> None:
        layout, rank = self._layout, self._communicator.world.rank
        by_worker = [0.0] * (len(timing) * layout.num_workers)
        by_worker[rank * len(timing) : (rank + 1) * len(timing)] = timing
        wishes = [0.0] * layout.num_workers
        wishes[rank] = wish
        values = [
            *pad(self._weights, layout.num_micro_batches),
            *by_worker,
            *wishes,
            *(float(slot.is_used) for slot in self._slots),
            *map(float, self._buffers.changed_unmanaged()),
        ]
        self._tail[layout.num_device :].copy_(torch.tensor(values, dtype=self._tail.dtype))

    def _fit_grids(self, numbers: StepNumbers) -> bool:
        """Whether every sum stayed on its grid. Moves the grids either way: to repeat the step, or for the next."""
        m, fits = self._plan[-1].stop, True
        for i, grid in enumerate(self._grids):
            peaks = numbers.peaks(i)[:m]
            if i < len(self._buckets):
                # Peaks were taken before weighting.
                peaks = [p * (w / self._scale) for p, w in zip(peaks, numbers.weights, strict=False)]
            fits = grid.fits(peaks) and fits
            grid.follow(peaks)
        return fits

    def _publish(self, numbers: StepNumbers) -> None:
        # A parameter this worker used is used. Only for the others must the host look at the exchanged numbers.
        used = [slot.is_used for slot in self._slots]
        if not all(used):
            used = [count > 0 for count in numbers.used]
        m, start = self._layout.num_micro_batches, self._layout.num_device
        total_weight = self._tail[start : start + m].sum() if self._must_divide else None
        flags = iter(used)
        for bucket in self._buckets:
            bucket.publish([next(flags) for _ in bucket.views], total_weight)


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
