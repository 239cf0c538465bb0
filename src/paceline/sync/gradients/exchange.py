"""The mean gradient over all workers: weighted sums, exchanged bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.base import Communicator, Pending, Settled
from paceline.core.errors import CommunicationError, GenerationEnded, GradientError, MisuseError
from paceline.plan.predict import BUCKET_BYTES, GPU_BUCKET_BYTES
from paceline.plan.shares import Plan, owner
from paceline.sync.buffers import Buffers
from paceline.sync.gradients.grids import Grids, misfit
from paceline.sync.gradients.layout import BucketLayout, cut_into_buckets, sum_dtype
from paceline.sync.gradients.rounding import ExactSums, Workspace
from paceline.sync.gradients.rounding_gpu import exact_sums
from paceline.sync.gradients.sums import OneTermSums, PlainSums
from paceline.sync.gradients.watch import GradientWatch
from paceline.sync.numbers import NO_MESSAGE, WorkerMessage
from paceline.sync.step_numbers import Layout, StepNumbers, StepNumbersWriter
from paceline.sync.strategy import Accept, UpdateUnless

# Marks a parameter that only micro-batches without weight used: its gradient is zero, or None if the whole step has no
# weight.
WITHOUT_WEIGHT = 2.0**-10
# Give up on a step that does not fit its grids after this many repetitions.
MAX_REPETITIONS = 8
_gradient = attrgetter("grad")
Sums: TypeAlias = ExactSums | PlainSums


class MeanGradients:
    """Adds the gradients of each micro-batch to sums that are exchanged once per step.

    `parameter.grad` is this micro-batch's gradient until `end_micro_batch` adds it. After `finish` it is the mean over
    the global batch, after `complete` None.

    With several buckets and workers, the exchange of a bucket starts during a worker's last backward, as soon as the
    bucket is complete.
    """

    averages = None

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        communicator: Communicator,
        buffers: Buffers,
        *,
        max_micro_batches: int,
        exact: bool = False,
        overlap: bool = True,
        bucket_bytes: float | None = None,
    ) -> None:
        self._communicator = communicator
        self._max_micro_batches = max_micro_batches
        # A sum of one term needs no rounding: only zeros are added to it.
        self._is_exact = exact and max_micro_batches > 1
        self._is_one_term = exact and not self._is_exact
        self._overlap = overlap
        self._bucket_bytes = bucket_bytes
        self._grid_state: dict[str, int] = {}
        self._num_repetitions = 0
        self._hooks: list[RemovableHandle] = []
        self._workspaces: dict[torch.dtype, Workspace] = {}
        self._world = communicator.world
        self._memory: list[torch.Tensor] = []  # on CPUs: all that was allocated in this world
        self._lay_out(parameters, buffers)

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._grid_state.update(self._grids.state())
        self.close()
        self._lay_out(parameters, self._buffers.renewed())

    def _lay_out(self, parameters: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        world = self._communicator.world
        if world is not self._world:
            self._world, self._memory = world, []
        self._unused = [*self._memory]
        self._is_alone = world.size == 1
        self._pending: list[Pending] = []
        self._was_left_exchanging = False
        layouts = self._cut(parameters)
        ordered = {name: parameters[name] for layout in layouts for name in layout.names}
        self._names, self._parameters = list(ordered), list(ordered.values())
        self._grids = Grids([*self._names, *buffers.names_of_statistics] if self._is_exact else [])
        self._grids.load(self._grid_state)
        numbers = Layout(
            self._max_micro_batches,
            self._is_exact or self._is_one_term,
            len(self._grids.names),
            world.size,
            len(self._names),
            buffers.num_unmanaged,
        )
        space = self._make_sums(buffers.numel + numbers.total)
        self._writer = StepNumbersWriter(numbers, space[buffers.numel :], world.rank)
        self._buffers = buffers
        self._has_buffers = bool(buffers.numel or buffers.num_unmanaged)
        buffers.accumulate_in(space[: buffers.numel], exact=self._is_exact)
        self._set_anchors()
        self._watch = GradientWatch(self._names, self._parameters)
        self._fired = [0] * len(self._names)  # gradients that each parameter got in this micro-batch
        self._expected = [0] * len(self._names)  # the largest number in any micro-batch so far
        # A parameter may continue in the next bucket.
        first_of = {name: number for number, layout in reversed([*enumerate(layouts)]) for name in layout.names}
        self._bucket_of = [first_of[name] for name in self._names]
        if self._overlap and not self._is_alone and len(layouts) > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._hook(index))
                for index, parameter in enumerate(self._parameters)
            ]
        self._is_open = self._may_send = False
        self._used = [0.0] * len(self._names)
        self._num_unreported = 0
        # By bucket: the micro-batches whose peaks are not in the step's numbers yet.
        self._with_peaks: dict[ExactSums, list[int]] = {}

    def _cut(self, parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
        world = self._communicator.world
        usual_bytes = GPU_BUCKET_BYTES if world.device.type == "cuda" else BUCKET_BYTES
        self._layouts = cut_into_buckets(
            parameters, self._bucket_bytes or (math.inf if world.size == 1 else usual_bytes)
        )
        return self._layouts

    def _make_sums(self, tail_numel: int) -> torch.Tensor:
        """Make the sums of all buckets. Returns the space for other numbers, at the end of the last one."""
        tails = [0] * (len(self._layouts) - 1) + [tail_numel]
        self._sums: list[Sums] = [
            self._sums_in(
                layout,
                self._empty(layout.numel + tail, self._dtype_of(layout), layout.device),
                in_place=self._is_alone,
            )
            for layout, tail in zip(self._layouts, tails, strict=True)
        ]
        return self._sums[-1].flat[self._layouts[-1].numel :]

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an exchange. An earlier set of parameters leaves some: shared memory is not freed during a run."""
        for number, memory in enumerate(self._unused):
            if (memory.numel(), memory.dtype) == (numel, dtype):
                return self._unused.pop(number)
        memory = self._communicator.empty(numel, dtype, device)
        if device.type == "cpu" and not self._is_alone:
            self._memory.append(memory)
        return memory

    def _sums_in(self, layout: BucketLayout, flat: torch.Tensor, *, in_place: bool = False) -> Sums:
        flat.zero_()
        if self._is_exact:
            return exact_sums(layout, flat, self._workspaces.get(layout.dtype))
        return OneTermSums(layout, flat, in_place=in_place) if self._is_one_term else PlainSums(layout, flat)

    def _all_sums(self) -> Sequence[Sums]:
        return self._sums

    def _dtype_of(self, layout: BucketLayout) -> torch.dtype:
        return torch.float64 if self._is_exact else sum_dtype(layout.parameters)

    @property
    def hooks_per_parameter(self) -> int:
        return self._watch.hooks_per_parameter + bool(self._hooks)

    # A step, from top to bottom

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        if self._was_left_exchanging:
            raise MisuseError(
                "the epoch was left between backward() and step() of a step's last micro-batch, whose exchange had "
                "begun: leave it after step(), or pass overlap=False"
            )
        self._plan = plan
        # A total known in advance is part of the weights, which saves a pass over all gradients.
        self._must_divide = total_weight is None
        self._scale = loss_scale * (total_weight or 1)
        self._pending = []
        self._is_first = True  # nothing was added yet
        self._used = [0.0] * len(self._names)
        self._num_unreported = 0
        self._with_peaks.clear()
        self._writer.clear()
        if self._has_buffers:
            self._buffers.begin_step(plan[-1].stop)

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self.complete()  # the user may have called backward() between micro-batches
        self._watch.forget()
        self._number = number
        self._writer.set_weight(number, weight)
        self._factor = weight / self._scale
        self._completes_sums = is_last and self._is_alone and not self._must_divide
        self._may_send = is_last and bool(self._hooks) and self._factor > 0 and self._is_calibrated
        if self._hooks:
            self._fired = [0] * len(self._names)
        self._is_open = True

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._watch.backward(loss, retain_graph)

    def has_gradient(self) -> bool:
        for parameter in self._parameters:  # noqa: SIM110 - faster than any()
            # One that is frozen now has none: the step is repeated with the new set of parameters.
            if parameter.grad is not None or not parameter.requires_grad:
                return True
        return False

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        self._may_send = self._is_open = False
        gradients = list(map(_gradient, self._parameters))
        self._watch.check()
        self._refuse(0, gradients)
        change = self._buffers.change(self._number) if self._has_buffers else None
        if self._factor:  # without weight nothing is added, not even 0 * NaN
            if not self._is_calibrated:
                self._calibrate(gradients, change)
            for sums in self._sums[len(self._pending) :]:
                self._add(sums, gradients[sums.layout.slice])
            self._is_first = False
            if loss is None:
                self._num_unreported += 1
            else:
                self._writer.set_loss(self._number, loss)
        elif not self._is_calibrated:
            self._calibrate([], None)
        if self._factor and all(map(is_not, gradients, repeat(None))):
            self._used = [1.0] * len(gradients)
        else:
            self._record_use(gradients)
        if self._hooks:
            self._expected = list(map(max, self._expected, self._fired))
        if change is not None and (peaks := self._buffers.add(change)) is not None:
            self._writer.note_peaks([self._number], len(self._names), peaks[None])

    def send(self, message: WorkerMessage = NO_MESSAGE) -> None:
        if not self._is_calibrated:
            self._calibrate([], None)
        if self._is_first:
            for sums in self._sums:
                sums.clear()
        if self._with_peaks:
            self._note_peaks()
        changed = self._buffers.changed_unmanaged() if self._has_buffers else ()
        self._writer.write(message, self._used, changed, num_unreported=self._num_unreported)
        for sums in self._sums[len(self._pending) :]:
            self._pending.append(self._start(sums))

    def _start(self, sums: Sums) -> Pending:
        return self._communicator.all_reduce(sums.flat)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> StepNumbers | None:
        self._wait()
        numbers = self._writer.numbers()
        # Before the peaks are read: a GPU is busy with this while the host waits for them.
        self._publish(numbers)
        if update_unless is not None and self._is_exact:
            is_void = misfit(self._writer.peaks_of_all(), self._plan[-1].stop, self._grid_limits)
            update_unless(is_void.to(torch.float32))
        if not accept(numbers) or (self._is_exact and not self._fits(numbers)):
            self.complete()
            if self._has_buffers:
                self._buffers.restore()
            return None
        self._num_repetitions = 0
        if self._has_buffers:
            last = self._plan[-1].stop - 1
            self._buffers.finish(numbers.changed_buffers, owner(self._plan, last))
        return numbers

    def complete(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def synchronize(self) -> None:
        return

    def abandon(self) -> None:
        # Do not wait for workers that still compute: that would delay the error that ended this step.
        self._was_left_exchanging = bool(self._pending)
        self._is_open = self._may_send = False
        self._watch.forget()
        if self._has_buffers:
            self._buffers.restore()
        self.complete()

    def state_dict(self) -> dict[str, Any]:
        return {"grids": {**self._grid_state, **self._grids.state()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._grid_state = dict(state.get("grids", {}))
        self._grids.load(self._grid_state)
        self._set_anchors()

    def close(self) -> None:
        self._watch.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Sums

    def _add(self, sums: Sums, gradients: list[torch.Tensor | None]) -> None:
        if isinstance(sums, ExactSums):
            sums.add(gradients, self._factor, first=self._is_first, last=self._completes_sums)
            numbers = [*self._with_peaks.get(sums, ()), self._number]
            self._with_peaks[sums] = numbers
            if len(numbers) == sums.peaks_capacity:
                self._note_peaks()
            return
        sums.add(gradients, self._factor, first=self._is_first)
        if isinstance(sums, OneTermSums) and not sums.are_known_finite():
            self._writer.note_largest(self._number, sums.largest())

    def _note_peaks(self) -> None:
        for sums, numbers in self._with_peaks.items():
            self._writer.note_peaks(numbers, sums.layout.first, sums.take_peaks())
        self._with_peaks.clear()

    def _refuse(self, first: int, gradients: list[torch.Tensor | None]) -> None:
        """Raise for a gradient that cannot be summed. first: the index of the first one's parameter."""
        for index, gradient in enumerate(gradients, first):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise GradientError(
                    f"parameter {self._names[index]!r} has a sparse gradient, which cannot be averaged in a flat "
                    "buffer: build its layer with sparse=False"
                )
            if gradient.requires_grad:
                raise MisuseError(
                    "backward(create_graph=True) leaves gradients that require grad, which cannot be exchanged: for a "
                    "gradient penalty use torch.autograd.grad(..., create_graph=True) and add it to the loss"
                )

    def _record_use(self, gradients: list[torch.Tensor | None]) -> None:
        """Note which parameters this micro-batch used."""
        use = 1.0 if self._factor else WITHOUT_WEIGHT
        pairs = zip(self._used, gradients, strict=True)
        self._used = [used if gradient is None else max(used, use) for used, gradient in pairs]

    def _publish(self, numbers: StepNumbers) -> None:
        used = self._used_by_all(numbers)
        divisor = self._writer.total_weight() if self._must_divide else None
        for sums in self._sums:
            pairs = zip(sums.layout.parameters, sums.means(divisor), used[sums.layout.slice], strict=True)
            for parameter, mean, is_used in pairs:
                parameter.grad = mean if is_used else None

    def _used_by_all(self, numbers: StepNumbers) -> Sequence[bool]:
        """By parameter: whether any micro-batch of the step used it."""
        # Only for parameters that this worker did not use must the host read the exchanged numbers.
        if min(self._used) == 1:
            return [True] * len(self._used)
        least = 0.0 if numbers.total_weight else 1 - WITHOUT_WEIGHT
        return [count > least for count in numbers.used]

    # Buckets that leave during backward

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        number = self._bucket_of[index]

        def hook(_: torch.Tensor) -> None:
            if not self._is_open:
                return  # a backward() between micro-batches
            self._fired[index] += 1
            if not self._may_send:
                return
            if number < len(self._pending):
                raise GradientError(
                    f"parameter {self._names[index]!r} got a gradient after its exchange had begun: this micro-batch "
                    "ran backward through it more often than any before. Pass overlap=False, which exchanges after the "
                    "last backward"
                )
            self._send_complete()

        return hook

    def _send_complete(self) -> None:
        """Start the exchange of every complete bucket, in the same order on all workers.

        The last bucket waits for `send`, since it carries the step's numbers.
        """
        while len(self._pending) < len(self._sums) - 1:
            sums = self._sums[len(self._pending)]
            own = sums.layout.slice
            if not all(0 < n <= fired for n, fired in zip(self._expected[own], self._fired[own], strict=True)):
                return
            gradients = list(map(_gradient, self._parameters[own]))
            self._refuse(sums.layout.first, gradients)
            self._add(sums, gradients)
            try:
                self._pending.append(self._start(sums))
            except (CommunicationError, GenerationEnded) as error:
                # Not inside the user's backward(): raised by `finish`, where the loop can go on without a lost worker.
                self._pending.append(Settled(error))

    # Grids

    def _calibrate(self, gradients: list[torch.Tensor | None], change: torch.Tensor | None) -> None:
        """Choose the grids that are not known yet from the step's first micro-batch; all workers take part."""
        device = self._communicator.world.device
        peaks = torch.zeros(len(self._grids.names), dtype=torch.float64, device=device)
        if gradients and self._number == 0 and self._factor:
            for sums in self._sums:
                assert isinstance(sums, ExactSums)
                own = peaks[sums.layout.slice]
                torch.maximum(own, self._peaks_of(sums, gradients[sums.layout.slice]), out=own)
            if change is not None:
                peaks[len(self._names) :] = self._buffers.peaks_of(change)
        self._communicator.all_reduce(peaks).wait()
        self._grids.calibrate(peaks.cpu().numpy(), self._plan[-1].stop)
        self._set_anchors()

    def _peaks_of(self, sums: ExactSums, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        return sums.peaks_of(gradients, self._factor)

    def _fits(self, numbers: StepNumbers) -> bool:
        """Whether every sum stayed on its grid. Moves the grids, for a repetition or for the next step."""
        num_terms = self._plan[-1].stop
        if self._grids.are_comfortable(numbers.peaks, num_terms):
            return True
        peaks = np.array(numbers.peaks)
        fits = self._grids.fit(peaks, num_terms)
        if self._grids.follow(peaks, num_terms):
            self._set_anchors()
        if fits:
            return True
        self._num_repetitions += 1
        if self._num_repetitions == MAX_REPETITIONS:
            raise GradientError(
                f"exact sums do not fit their grids after {MAX_REPETITIONS} repetitions of a step: repeating a "
                "micro-batch gives gradients that differ by orders of magnitude"
            )
        return False

    def _set_anchors(self) -> None:
        self._is_calibrated = self._grids.are_known
        if not self._is_exact:
            return
        anchors = self._grids.anchors
        for sums in self._all_sums():
            assert isinstance(sums, ExactSums)
            sums.set_anchors(anchors[sums.layout.slice])
        self._buffers.set_anchors(anchors[len(self._names) :])
        device = self._communicator.world.device
        self._grid_limits = [torch.from_numpy(limits).to(device) for limits in self._grids.limits]
