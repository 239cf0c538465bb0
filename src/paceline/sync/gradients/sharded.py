"""Mean gradients of which each worker gets only its own pieces.

A bucket is summed in the memory of its owner as soon as it is complete. Besides its own sums a worker needs memory for
the buckets in flight; with several micro-batches per step also for its sums of other workers' pieces, unless each
micro-batch is exchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.comm.base import Pending
from paceline.core.errors import CommunicationError, GenerationEnded, MisuseError
from paceline.plan.shares import Plan
from paceline.sync.buffers import Buffers
from paceline.sync.gradients.exchange import MeanGradients, Sums
from paceline.sync.gradients.layout import BucketLayout
from paceline.sync.gradients.rounding import ExactSums, Workspace
from paceline.sync.gradients.shards import Bucket, Shards
from paceline.sync.numbers import NO_MESSAGE, WorkerMessage
from paceline.sync.step_numbers import StepNumbers


class _InFlight(NamedTuple):
    bucket: Bucket
    pending: Pending


class ShardedGradients(MeanGradients):
    """After `finish`, the pieces that this worker owns have their mean gradient as `.grad`. Parameters have none.

    every_micro_batch: exchange each micro-batch, instead of summing a worker's own ones first. This needs less memory
    and more exchanges.
    """

    def __init__(self, *args: Any, shards: Shards, every_micro_batch: bool = False, **settings: Any) -> None:
        self._shards = shards
        self._every_micro_batch = every_micro_batch
        self._in_flight: deque[_InFlight] = deque()
        self._sent: list[int] = []  # parameters whose gradient was sent and dropped during backward
        super().__init__(*args, **settings)

    # The layout

    def _cut(self, parameters: Mapping[str, torch.Tensor]) -> list[BucketLayout]:
        self._shards.train(parameters)
        return [bucket.layout for bucket in self._shards.buckets]

    def _make_sums(self, tail_numel: int) -> torch.Tensor:
        buckets = self._shards.buckets
        self._rank = self._communicator.world.rank
        self._in_flight.clear()  # exchanges that the loss of a worker interrupted
        self._bucket_by_layout = {id(bucket.layout): bucket for bucket in buckets}
        largest = max(bucket.layout.numel for bucket in buckets)
        dtypes = {bucket.layout.dtype for bucket in buckets}
        device = self._communicator.world.device
        self._workspaces = {dtype: Workspace(largest, dtype, device) for dtype in dtypes} if self._is_exact else {}
        self._shards.allocate(self._dtype_of)
        self._sums = [self._sums_in(bucket.layout, bucket.memory.tensor) for bucket in buckets]
        # This worker's own sums of several micro-batches, by bucket that another worker owns.
        self._local: dict[int, Sums] = {}
        self._begun: set[int] = set()  # own buckets whose memory has sums of this step
        self._owned = {
            bucket.number: _OwnSums(bucket.layout, total, self._shards.division.update_dtype(bucket.layout.dtype))
            for bucket in buckets
            if (total := bucket.memory.total) is not None
        }
        self._numbers_space = self._empty(tail_numel, self._dtype_of(buckets[-1].layout), device).zero_()
        return self._numbers_space

    # A step

    def begin_step(self, plan: Plan, **weights: Any) -> None:
        super().begin_step(plan, **weights)
        self._failure: CommunicationError | GenerationEnded | None = None  # of an exchange during backward
        self._num_rounds = max(len(share) for share in plan) if self._every_micro_batch else 1
        self._num_done = 0  # rounds
        self._begun.clear()

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        self._is_sent_now = is_last or self._every_micro_batch
        super().begin_micro_batch(number, weight, is_last=self._is_sent_now)
        self._completes_sums = False  # an owner has other sums
        self._sent = []

    def _send_complete(self) -> None:
        before = len(self._pending)
        super()._send_complete()
        # Dropping a gradient before the others are computed saves memory. After a bare loss.backward() it is kept for
        # the check that it was not changed.
        if len(self._pending) > before and not self._watch.hooks_per_parameter:
            next_bucket = self._sums[len(self._pending)].layout.slice
            for index in range(self._sums[before].layout.slice.start, next_bucket.start):
                self._parameters[index].grad = None
                self._sent.append(index)

    def has_gradient(self) -> bool:
        return bool(self._sent) or super().has_gradient()

    def end_micro_batch(self, loss: torch.Tensor | None) -> None:
        if self._failure is not None:
            self.abandon()
            raise self._failure
        super().end_micro_batch(loss)
        for index in self._sent:
            self._used[index] = 1.0
        if self._every_micro_batch:
            self._end_round()

    def send(self, message: WorkerMessage = NO_MESSAGE) -> None:
        if not self._is_calibrated:
            self._calibrate([], None)
        while self._num_done < self._num_rounds:  # other workers have more micro-batches, or this one has no weight
            self._end_round()
        changed = self._buffers.changed_unmanaged() if self._has_buffers else ()
        self._writer.write(message, self._used, changed, num_unreported=self._num_unreported)
        self._sent_numbers = self._communicator.all_reduce(self._numbers_space)

    def _end_round(self) -> None:
        """Send the buckets that were not sent yet."""
        for sums in self._sums[len(self._pending) :]:
            bucket = self._bucket_of_sums(sums)
            self._make_room(bucket)
            if bucket.owner == self._rank:
                if bucket.number not in self._begun:
                    sums.flat.zero_()
                    self._begun.add(bucket.number)
            elif bucket.number not in self._local or self._is_first or self._every_micro_batch:
                sums.flat.zero_()
            else:
                sums.flat.copy_(self._local[bucket.number].flat)
            self._pending.append(self._start(sums))
        self._pending.clear()
        self._num_done += 1

    def _wait(self) -> None:
        while self._in_flight:
            self._land(self._in_flight.popleft())
        self._sent_numbers.wait()

    def abandon(self) -> None:
        is_exchanging = bool(self._in_flight)
        super().abandon()
        self._was_left_exchanging |= is_exchanging

    def complete(self) -> None:
        super().complete()
        for bucket in self._shards.buckets:
            if bucket.number in self._owned:
                for piece in bucket.layout.parameters:
                    self._shards.division.updated(piece).grad = None

    def _publish(self, numbers: StepNumbers) -> None:
        if self._shards.division.copies > 1 and self._has_buffers and Buffers.have_changed(numbers.changed_buffers):
            raise MisuseError(
                "the model's forward changes a buffer that is not a statistic of BatchNorm. Only one worker has its "
                "value, so a step could not be completed without that worker: leave redundancy= out"
            )
        used = self._used_by_all(numbers)
        self._shards.used = {id(p) for p, is_used in zip(self._parameters, used, strict=True) if is_used}
        divisor = self._writer.total_weight() if self._must_divide else None
        super().complete()
        for bucket in self._shards.buckets:
            if (owned := self._owned.get(bucket.number)) is not None:
                means = owned.means(divisor, is_one_term=self._is_one_term)
                for piece, mean, is_used in zip(
                    bucket.layout.parameters, means, used[bucket.layout.slice], strict=True
                ):
                    self._shards.division.updated(piece).grad = mean if is_used else None

    # Buckets

    def _bucket_of_sums(self, sums: Sums) -> Bucket:
        return self._bucket_by_layout[id(sums.layout)]

    def _add(self, sums: Sums, gradients: list[torch.Tensor | None]) -> None:
        bucket = self._bucket_of_sums(sums)
        pieces = bucket.pieces_of(gradients, self._parameters[bucket.layout.slice])
        target, is_first = sums, True
        if bucket.owner == self._rank:
            self._make_room(bucket)
            is_first = bucket.number not in self._begun
            self._begun.add(bucket.number)
        elif self._every_micro_batch or (self._is_sent_now and self._is_first):
            self._make_room(bucket)
        else:
            target, is_first = self._local_sums(bucket), self._is_first
        was_first, self._is_first = self._is_first, is_first
        try:
            super()._add(target, pieces)
        finally:
            self._is_first = was_first
        if self._is_sent_now:
            if target is not sums:
                self._make_room(bucket)
                sums.flat.copy_(target.flat)
            if not self._may_send:  # else the caller does it
                self._pending.append(self._start(sums))

    def _local_sums(self, bucket: Bucket) -> Sums:
        if bucket.number not in self._local:
            layout = bucket.layout
            flat = torch.zeros(layout.numel, dtype=self._dtype_of(layout), device=layout.device)
            self._local[bucket.number] = self._sums_in(layout, flat)
            self._set_anchors()
        return self._local[bucket.number]

    def _peaks_of(self, sums: ExactSums, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        bucket = self._bucket_of_sums(sums)
        return super()._peaks_of(sums, bucket.pieces_of(gradients, self._parameters[bucket.layout.slice]))

    def _all_sums(self) -> list[Sums]:
        return [*self._sums, *self._local.values()]

    def _start(self, sums: Sums) -> Pending:
        bucket = self._bucket_of_sums(sums)
        sums.settle()
        pending = bucket.memory.reduce()
        self._in_flight.append(_InFlight(bucket, pending))
        return pending

    def _make_room(self, bucket: Bucket) -> None:
        """Wait until no exchange uses the bucket's memory on this worker."""
        address = bucket.memory.tensor.data_ptr()
        while any(each.bucket.memory.tensor.data_ptr() == address for each in self._in_flight):
            self._land(self._in_flight.popleft())

    def _land(self, arrived: _InFlight) -> None:
        try:
            arrived.pending.wait()
        except (CommunicationError, GenerationEnded) as error:
            if not self._is_open:
                raise
            self._failure = error  # not inside the user's backward(): raised by `end_micro_batch`


class _OwnSums:
    """The sums over all workers of a bucket that this worker holds, and their means in `mean_dtype`."""

    def __init__(self, layout: BucketLayout, total: torch.Tensor, mean_dtype: torch.dtype) -> None:
        self.total = total
        is_same = mean_dtype == total.dtype
        self._means = total if is_same else torch.zeros(layout.numel, dtype=mean_dtype, device=layout.device)
        self._views = layout.views(self._means)

    def means(self, divisor: torch.Tensor | None, *, is_one_term: bool) -> list[torch.Tensor]:
        if divisor is not None:
            self.total.div_(divisor)
        if is_one_term:
            self.total.add_(0.0)  # turns -0.0 into 0.0
        if self._means is not self.total:
            self._means.copy_(self.total)
        return self._views
