"""The configuration of a run: plain settings and the groups of `paceline.run.settings`, checked together."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.core.settings import check, setting
from paceline.plan.cadence import Cadence
from paceline.plan.epoch import Steps
from paceline.run.settings import Balancing, Batching, Loading, Optimization, Precision, Runtime
from paceline.sync.averaging.settings import SLOW_LINK, Averaging
from paceline.sync.compression.settings import Gradients

Strategy: TypeAlias = Literal["gradients", "slow link"] | Gradients | Cadence | Averaging

_WHY_NOT_EXACT: dict[type, str] = {
    Averaging: "replicas differ between two averages",
    Gradients: "compressed sums are rounded by each worker, so the result depends on their number",
    Cadence: "with a cadence the size of a step depends on measured times",
}
_WHY_NOT_DIVIDED: dict[type, str] = {
    Averaging: "with Averaging every worker updates its own replica",
    Gradients: "compressed gradients are summed on every worker",
}


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run, after `data` was adopted: loading.feed and loading.readers have values.

    The constructor makes the checks that need no data and no workers, `check_workers` and `steps_of` the others.
    """

    global_batch: int | None = setting("samples per optimizer step, over all workers", None, course=True)
    micro_batch: int | None = setting("samples per forward and backward", None, course=True)
    seed: int = setting("seed of all random numbers", 0, course=True)
    shuffle: bool = setting("visit the samples in a new order in every epoch", True, course=True)
    precision: Precision = setting("what autocast casts to", "fp32", course=True)
    max_grad_norm: float | None = setting(
        "clip the norm of the mean gradient to this", None, course=True, least=0, finite=False
    )
    exact: bool = setting("weights are bit for bit the same on any number of workers", False, course=True)
    strategy: Strategy = "gradients"
    batching: Batching = Batching()
    loading: Loading = Loading()
    balancing: Balancing = Balancing()
    optimization: Optimization = Optimization()
    runtime: Runtime = Runtime()

    def __post_init__(self) -> None:
        check(self)
        if self.strategy == "slow link":
            object.__setattr__(self, "strategy", SLOW_LINK)
        if self.strategy == Gradients():
            object.__setattr__(self, "strategy", "gradients")
        if self.strategy != "gradients" and not isinstance(self.strategy, Gradients | Cadence | Averaging):
            raise ValueError(
                f"strategy={self.strategy!r} is unknown: choose 'gradients', 'slow link', Gradients(...), Cadence(...) "
                "or Averaging(...)"
            )
        self.optimization.check_shard()
        self._check_strategy()
        self._check_physical_batch()
        if self.balancing.shares != "measured" and replace(self.balancing, shares="measured") != Balancing():
            raise ValueError(
                "speed_hints, replan_after and replan_every would be ignored, since shares is not 'measured': leave "
                "them out, or choose shares='measured'"
            )

    def _check_strategy(self) -> None:
        if self.exact and (why := _WHY_NOT_EXACT.get(type(self.strategy))):
            raise ValueError(f"exact=True needs strategy='gradients': {why}")
        if self.optimization.shard is not None and (why := _WHY_NOT_DIVIDED.get(type(self.strategy))):
            raise ValueError(f"shard={self.optimization.shard!r} needs strategy='gradients' or a cadence: {why}")
        if self.optimization.ema is not None and isinstance(self.strategy, Averaging):
            raise ValueError(
                f"ema={self.optimization.ema} needs strategy='gradients' or a cadence: with Averaging the workers' "
                "weights differ between two averages"
            )
        if not isinstance(self.strategy, Cadence):
            if self.global_batch is None:
                raise ValueError("global_batch is missing: give the number of samples per optimizer step")
            return
        if self.micro_batch is None or self.global_batch is not None:
            raise ValueError(
                "a cadence decides how many micro-batches make a step: give micro_batch, and no global_batch"
            )
        if self.balancing != Balancing():
            raise ValueError("balancing would be ignored: a cadence has its own, such as Cadence(speed_hint=)")

    def _check_physical_batch(self) -> None:
        physical_batch = self.batching.physical_batch
        if physical_batch is None:
            return
        if self.exact:
            raise ValueError(
                "physical_batch cannot be combined with exact=True, where every micro-batch runs alone: "
                "leave it out, or choose a larger micro_batch"
            )
        micro_batch = self.micro_batch or self.global_batch or 1
        for size in physical_batch if isinstance(physical_batch, tuple) else (physical_batch,):
            if size < micro_batch or size % micro_batch:
                raise ValueError(
                    f"physical_batch={size!r} is not a multiple of micro_batch={micro_batch}: choose how many samples "
                    f"a device runs at once, such as {2 * micro_batch}"
                )

    def steps_of(self, num_samples: int) -> Steps:
        """How an epoch is cut into steps. With a cadence, whose steps vary, only its micro-batches are meaningful."""
        global_batch = self.global_batch if self.global_batch is not None else self.micro_batch
        assert global_batch is not None
        return Steps(num_samples, global_batch, self.micro_batch or global_batch, self.batching.drop_last)

    def steps_of_stream(self) -> Steps:
        """The steps of a stream, whose number of samples is not known: one full step."""
        if isinstance(self.strategy, Cadence):
            raise ValueError("a cadence needs data with numbered samples: a stream's steps must all have one size")
        if self.batching.drop_last:
            raise ValueError(
                "drop_last=True needs data with numbered samples: a stream's last step is not known in advance"
            )
        if self.loading.prefetch is not None:
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
        size = self.batching.physical_batch
        size = size[rank] if isinstance(size, tuple) else size
        return 1 if size is None else size // (self.micro_batch or self.global_batch or 1)

    def check_workers(self, num_workers: int) -> None:
        """Check the length of settings with one number per worker."""
        values = {
            "shares": self.balancing.shares,
            "speed_hints": self.balancing.speed_hints,
            "physical_batch": self.batching.physical_batch,
            "shard_by": self.optimization.shard_by,
        }
        for name, value in values.items():
            if isinstance(value, tuple) and len(value) != num_workers:
                raise ValueError(
                    f"{name}={list(value)} names {len(value)} workers, the world has {num_workers}: "
                    "give one number per worker"
                )
