"""The settings of a run, in frozen groups. A setting is declared here and nowhere else.

Fields with course=True determine the course of a run, together with the seed; the others only its speed.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal

from paceline.core.settings import check, setting
from paceline.core.timing import DEFAULT_TIMEOUT_S

Precision = Literal["fp32", "bf16", "fp16"]
SchedulerInterval = Literal["step", "epoch"]
Capture = Literal["auto", "on", "off"]
FeedKind = Literal["sharded", "dispatched"]
GarbageCollection = Literal["between steps", "as usual"]
Shard = Literal["optimizer", "gradients"]
ShardBy = tuple[float, ...] | Literal["auto", "equal", "memory", "speed"]


@dataclass(frozen=True)
class Batching:
    """How an epoch is cut into steps and micro-batches, besides global_batch and micro_batch."""

    physical_batch: int | tuple[int, ...] | None = setting(
        "samples that a device runs at once, a multiple of micro_batch: one number, or one per worker",
        None,
        course=True,
        least=1,
    )
    batches_per_step: int | None = setting(
        "for data that consists of whole batches: how many of them make a step", None, course=True, least=1
    )
    drop_last: bool = setting("drop an epoch's last step if it is smaller", False, course=True)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Loading:
    """How samples are read."""

    feed: FeedKind | None = setting(
        "sharded: every worker reads its own samples; dispatched: rank 0 reads for all, the default for a stream that "
        "cannot be divided",
        None,
    )
    readers: int | None = setting("processes per worker that read ahead", None, least=0, most=256)
    prefetch: int | None = setting("number of micro-batches to read ahead", None, least=1)
    num_shards: int | None = setting("number of shards a stream is divided into", None, course=True, least=1)
    shuffle_buffer: int = setting("samples of a stream to draw the next one from", 0, course=True, least=0)
    resident: bool = setting("keep all of the data on the device", False)
    skip_bad_samples: bool | Callable[[Any], None] = setting("skip samples that cannot be read", False)
    collate_fn: Callable[[list[Any]], Any] | None = setting("joins a list of samples into a batch", None)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Balancing:
    """How workers divide a step. Nothing here changes the result."""

    shares: tuple[float, ...] | Literal["measured", "equal"] = setting(
        "measured: by measured speed; equal; or one relative speed per worker", "measured", least=0
    )
    speed_hints: tuple[float, ...] | None = setting(
        "one relative speed per worker, used until speeds are measured", None, above=0
    )
    replan_after: int = setting("steps until measured speeds are used for the first time", 1, least=1)
    replan_every: int = setting("steps between changes of the shares after that", 1, least=1)

    def __post_init__(self) -> None:
        _take_floats(self, "shares", "speed_hints")
        check(self)


@dataclass(frozen=True)
class Optimization:
    """Details of the model's update."""

    scheduler_every: SchedulerInterval = setting("when the scheduler is stepped", "step", course=True)
    fused: bool = setting("use PyTorch's fused kernels for optimizers that are made by a factory", True, course=True)
    ema: float | None = setting(
        "decay of an exponential moving average of the weights, such as 0.999", None, course=True, above=0, below=1
    )
    train_mode: bool = setting("put the model into training mode", True, course=True)
    shard: Shard | None = setting(
        "divide among the workers: optimizer, the optimizer's state and the sums of gradients; gradients, also a "
        "worker's own sums, which are then exchanged after every micro-batch",
        None,
    )
    shard_by: ShardBy = setting(
        "how much of it each worker gets: auto, by memory if that differs; equal; memory; speed; or one number per "
        "worker",
        "auto",
        least=0,
    )
    redundancy: int = setting(
        "workers that hold each part of the divided state; with 2 or more, a run with min_workers continues without a "
        "lost worker",
        1,
        least=1,
    )
    master_weights: bool = setting(
        "update float32 masters of weights in bf16, which are part of the divided state", False, course=True
    )

    def __post_init__(self) -> None:
        _take_floats(self, "shard_by")
        check(self)
        if not isinstance(self.shard_by, str) and not any(self.shard_by):
            raise ValueError(f"shard_by={list(self.shard_by)}: at least one worker must get a part")
        if self.redundancy > 1 and not isinstance(self.shard_by, str):
            raise ValueError(
                f"redundancy={self.redundancy} needs shard_by='auto', 'equal', 'memory' or 'speed': "
                f"{list(self.shard_by)} gives no division for the workers that remain after a loss"
            )

    def check_shard(self) -> None:
        """Called when `shard` is known, which may be given apart from the group."""
        if self.shard is not None:
            return
        if self.shard_by != "auto":
            raise ValueError(f"shard_by={self.shard_by!r} would be ignored: give shard='optimizer' too")
        if self.redundancy > 1:
            raise ValueError(f"redundancy={self.redundancy} would be ignored: give shard='optimizer' too")
        if self.master_weights:
            raise ValueError("master_weights=True would be ignored: give shard='optimizer' too")


@dataclass(frozen=True)
class Runtime:
    """How a worker runs. Nothing here changes the result, except `threads` in exact mode."""

    backend: str | None = setting("torch.distributed backend; by default chosen by the device", None)
    timeout_s: float = setting("seconds a worker waits for the others", DEFAULT_TIMEOUT_S, above=0)
    threads: int | None = setting("CPU threads per worker", None, least=1)
    overlap: bool = setting("exchange gradients during the backward pass", True)
    capture: Capture = setting("replay steps as CUDA graphs: auto does so if it is faster", "auto")
    garbage_collection: GarbageCollection = setting("when Python's garbage collector runs", "between steps")
    timeline: str | PathLike[str] | None = setting("folder to record a timeline of the run in", None)
    quiet: bool = setting("print no summary line on stderr, and none when a signal stops the run", False)

    def __post_init__(self) -> None:
        check(self)


def _take_floats(group: Any, *names: str) -> None:
    """Settings with one number per worker may be given as ints, in lists or arrays."""
    for name in names:
        value = getattr(group, name)
        if isinstance(value, Iterable) and not isinstance(value, str):
            object.__setattr__(group, name, tuple(map(float, value)))


GROUPS: dict[str, type] = {
    "batching": Batching,
    "loading": Loading,
    "balancing": Balancing,
    "optimization": Optimization,
    "runtime": Runtime,
}


def check_unused(group: Any, used: Collection[str], by: str) -> None:
    """Refuse settings of a group that an entry point would ignore."""
    for declared in fields(group):
        value = getattr(group, declared.name)
        if declared.name not in used and value != declared.default:
            raise ValueError(f"{declared.name}={value!r} has no effect in {by}: leave it out of {type(group).__name__}")
