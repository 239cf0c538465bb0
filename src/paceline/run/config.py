"""What a run is: the settings that, with the seed, decide its course, and those that only decide how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.data.feeds.make_feed import FeedKind
from paceline.plan.cadence import Cadence
from paceline.plan.steps import Steps
from paceline.run.step.gc_policy import GarbageCollection
from paceline.sync.averaging.strategy import Averaging

Precision = Literal["fp32", "bf16", "fp16"]
SchedulerInterval = Literal["step", "epoch"]
Capture = Literal["auto", "on", "off"]
Strategy: TypeAlias = Literal["gradients"] | Cadence | Averaging


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run; the batch sizes are checked against the data when the run is put together.

    Course: global_batch, micro_batch, seed, shuffle, shuffle_buffer, num_shards, drop_last, precision, max_grad_norm,
    scheduler_every, fused_optimizers, strategy, exact (and then threads), and physical_batch where the model draws
    random numbers.
    Speed only: shares, speed_hints, feed, readers, prefetch, resident, overlap, backend, timeout_s,
    garbage_collection, capture, and threads outside of exact mode.
    """

    global_batch: int | None = None
    micro_batch: int | None = None
    physical_batch: int | tuple[int, ...] | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    scheduler_every: SchedulerInterval = "step"
    fused_optimizers: bool = True
    exact: bool = False
    strategy: Strategy = "gradients"
    shares: tuple[float, ...] | Literal["measured", "equal"] = "measured"
    speed_hints: tuple[float, ...] | None = None
    feed: FeedKind = "sharded"
    readers: int = 0
    prefetch: int | None = None
    num_shards: int | None = None
    shuffle_buffer: int = 0
    resident: bool = False
    overlap: bool = True
    backend: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    threads: int | None = None
    garbage_collection: GarbageCollection = "between steps"
    capture: Capture = "auto"

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} is a {type(self.seed).__name__}: choose an int")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r} is unknown: choose one of {', '.join(get_args(Precision))}")
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} is no bound: choose a number >= 0, or None not to clip"
            )
        if self.scheduler_every not in get_args(SchedulerInterval):
            raise ValueError(f"scheduler_every={self.scheduler_every!r} is unknown: choose 'step' or 'epoch'")
        if self.strategy != "gradients" and not isinstance(self.strategy, Cadence | Averaging):
            raise ValueError(
                f"strategy={self.strategy!r} is unknown: choose 'gradients', Cadence(...) or Averaging(...)"
            )
        self._check_batches()
        if self.exact and isinstance(self.strategy, Averaging):
            raise ValueError(
                "exact=True needs strategy='gradients': replicas that differ between averages have no one course"
            )
        if self.exact and isinstance(self.strategy, Cadence):
            raise ValueError(
                "exact=True needs strategy='gradients': with a cadence the size of a step follows measured times"
            )
        if isinstance(self.shares, str) and self.shares not in ("measured", "equal"):
            raise ValueError(
                f"shares={self.shares!r} is unknown: choose 'measured', 'equal', or one relative speed per worker"
            )
        if self.speed_hints is not None and self.shares != "measured":
            raise ValueError("speed_hints would be ignored, since shares is not 'measured': leave one of them out")
        if not (0 < self.timeout_s < math.inf):
            raise ValueError(f"timeout_s={self.timeout_s} is no time-out: choose a finite number of seconds > 0")
        if self.feed not in get_args(FeedKind):
            raise ValueError(f"feed={self.feed!r} is unknown: choose one of {', '.join(get_args(FeedKind))}")
        if type(self.shuffle_buffer) is not int or self.shuffle_buffer < 0:
            raise ValueError(
                f"shuffle_buffer={self.shuffle_buffer!r}: choose how many samples of a stream it holds, >= 0"
            )
        if type(self.readers) is not int or self.readers < 0:
            raise ValueError(f"readers={self.readers!r}: choose how many processes read for each worker, 0 for none")
        if self.prefetch is not None and (type(self.prefetch) is not int or self.prefetch < 1):
            raise ValueError(f"prefetch={self.prefetch!r}: choose how many micro-batches to read ahead, at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}: choose at least 1 thread per worker, or None")
        if self.capture not in get_args(Capture):
            raise ValueError(f"capture={self.capture!r} is unknown: choose 'auto', 'on' or 'off'")
        if self.garbage_collection not in get_args(GarbageCollection):
            raise ValueError(
                f"garbage_collection={self.garbage_collection!r} is unknown: choose 'between steps' or 'as usual'"
            )

    def _check_batches(self) -> None:
        if isinstance(self.strategy, Cadence):
            if self.micro_batch is None or self.global_batch is not None:
                raise ValueError(
                    "a cadence decides how many micro-batches make a step: give micro_batch, and no global_batch"
                )
            if self.shares != "measured" or self.speed_hints is not None:
                raise ValueError("shares and speed_hints would be ignored: a cadence has its own, Cadence(speed_hint=)")
        elif self.global_batch is None:
            raise ValueError("global_batch is missing: give the number of samples per optimizer step")
        if self.physical_batch is None:
            return
        if self.exact:
            raise ValueError(
                "physical_batch cannot be chosen with exact=True, where every micro-batch is run by itself: "
                "leave it out, or choose a larger micro_batch"
            )
        micro_batch = self.micro_batch or self.global_batch or 1
        sizes = self.physical_batch if isinstance(self.physical_batch, tuple) else (self.physical_batch,)
        for size in sizes:
            if type(size) is not int or size < micro_batch or size % micro_batch:
                raise ValueError(
                    f"physical_batch={size!r} is not a multiple of micro_batch={micro_batch}: choose how many samples "
                    f"a device runs at once, such as {2 * micro_batch}"
                )

    def steps_of(self, num_samples: int) -> Steps:
        """How an epoch is cut. With a cadence, whose steps vary, only its micro-batches count."""
        global_batch = self.global_batch if self.global_batch is not None else self.micro_batch
        assert global_batch is not None
        return Steps(num_samples, global_batch, self.micro_batch or global_batch, self.drop_last)

    def steps_of_stream(self) -> Steps:
        """Where nobody knows the number of samples: a step's size is all there is to know."""
        if isinstance(self.strategy, Cadence):
            raise ValueError("a cadence needs data with numbered samples: a stream's steps must all have one size")
        if self.drop_last:
            raise ValueError(
                "drop_last=True needs data with numbered samples: nobody knows which step of a stream is last"
            )
        if self.prefetch is not None:
            raise ValueError("prefetch would be ignored: a stream is read ahead by steps; choose readers instead")
        assert self.global_batch is not None
        return self.steps_of(self.global_batch)

    def max_micro_batches(self, num_workers: int) -> int:
        """Micro-batches of the largest step."""
        if isinstance(self.strategy, Cadence):
            return self.strategy.max_batches(num_workers)
        assert self.global_batch is not None
        return self.global_batch // (self.micro_batch or self.global_batch)

    def micro_batches_at_once(self, rank: int) -> int:
        """How many micro-batches this worker's device runs as one batch."""
        size = self.physical_batch[rank] if isinstance(self.physical_batch, tuple) else self.physical_batch
        return 1 if size is None else size // (self.micro_batch or self.global_batch or 1)

    def check_workers(self, num_workers: int) -> None:
        """Whether what names workers names as many as the world has."""
        for name in ("shares", "speed_hints", "physical_batch"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_workers:
                raise ValueError(
                    f"{name}={list(value)} names {len(value)} workers, the world has {num_workers}: "
                    "give one number per worker"
                )
