"""Finds the fastest micro-batch that fits: tries sizes on this worker's device, and agrees with the other workers."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.core.settings import check_value
from paceline.core.world import World
from paceline.data.feeds.device import to_device
from paceline.data.sources.base import Source
from paceline.plan.epoch import divisors
from paceline.plan.shares import shares
from paceline.run.determinism import process_settings
from paceline.run.evaluation.collect import gather
from paceline.run.run import autocast
from paceline.run.settings import Precision, Runtime
from paceline.run.step.replica import OptimizerFactory, Replica

# A size is timed twice for about this long; the better time counts.
TURN_S = 0.05
# In each round, sizes whose best reading is within this factor of the fastest are timed again: a burst of other load
# can spoil a single reading.
ROUNDS = (2.0, 1.5, 1.2, 1.15, 1.15)
# A smaller micro-batch that is at most this much slower is preferred: it leaves memory and divides more finely.
TOLERANCE = 1.02
# Larger sizes are not tried after two consecutive ones that are this much slower than the fastest, measured again.
TOO_SLOW = 1.5
# The part of a GPU's memory that training needs besides: fragments, buckets of the exchange.
RESERVE = 0.05

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class FoundMicroBatch:
    """micro_batch: the fastest for all workers together. step_s: estimated seconds per step, by size that fits all.

    sample_s: by rank, seconds per sample of each size; None for a size that does not fit that worker's device.
    """

    micro_batch: int
    step_s: Mapping[int, float]
    sample_s: tuple[Mapping[int, float | None], ...]

    def __str__(self) -> str:
        sizes = sorted({size for own in self.sample_s for size in own})
        lines = [f"{'micro_batch':>11} " + " ".join(f"{f'rank {rank}':>12}" for rank in range(len(self.sample_s)))]
        for size in sizes:
            cells = [_cell(own.get(size, 0.0)) for own in self.sample_s]
            mark = "  <- fastest" if size == self.micro_batch else ""
            lines.append(f"{size:>11} " + " ".join(f"{cell:>12}" for cell in cells) + mark)
        return "\n".join(lines)


def candidates(global_batch: int) -> list[int]:
    """Divisors of the global batch, each at least a third larger than the one before: of a power of two, all."""
    check_value("global_batch", global_batch, int, least=1)
    sizes = [1]
    for divisor in divisors(global_batch):
        if 3 * divisor >= 4 * sizes[-1]:
            sizes.append(divisor)
    return sizes


def choose(global_batch: int, sample_s: Sequence[Mapping[int, float | None]]) -> FoundMicroBatch:
    """The size with the shortest step, its micro-batches divided by speed among the workers."""
    fitting = [size for size in sample_s[0] if all(own.get(size) is not None for own in sample_s)]
    if not fitting:
        raise torch.OutOfMemoryError(
            "not even one sample fits every worker's device: choose a smaller model, precision='bf16', or gradient "
            "checkpointing"
        )
    step_s: dict[int, float] = {}
    for size in sorted(fitting):
        seconds = [size * (own[size] or 0.0) for own in sample_s]
        counts = shares(global_batch // size, [1 / each for each in seconds])
        step_s[size] = max(count * each for count, each in zip(counts, seconds, strict=True))
    best_s = min(step_s.values())
    best = next(size for size, each in step_s.items() if each <= TOLERANCE * best_s)
    return FoundMicroBatch(best, step_s, tuple(sample_s))


class Trials:
    """Forward and backward of real samples in batches of any size, on one device.

    The replica's optimizer state exists as in training. After an out-of-memory error the failed attempt's memory is
    free again.
    """

    def __init__(self, replica: Replica, loss_of: Loss, source: Source, device: torch.device) -> None:
        self._replica = replica
        self._loss_of = loss_of
        self._source = source
        self._device = device
        self._has_state = False

    def seconds_per_sample(self, size: int) -> float | None:
        """Of one turn; None if the batch does not fit."""
        try:
            return self._turn(size)
        except RuntimeError as error:
            # The CPU's allocator raises a plain RuntimeError.
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
        # Outside of `except`, where the error would keep the failed attempt's tensors alive.
        self._free()
        return None

    def _turn(self, size: int) -> float:
        if self._device.type == "cuda":
            # Blocks cached for other sizes do not fit this one: near the limit, passes would wait for them to be freed.
            torch.cuda.empty_cache()
        indices = np.arange(size, dtype=np.int64) % len(self._source)
        batch = to_device(self._source.read(indices, 0, 0), self._device)
        self._timed(batch, 1)  # allocations, compilation
        if not self._has_state:
            self._replica.step_optimizers()
            self._has_state = True
            self._timed(batch, 1)
        if not self._leaves_reserve():
            raise torch.OutOfMemoryError(f"{size} samples leave less than {RESERVE:.0%} of the memory")
        once_s = self._timed(batch, 1)
        num_passes = max(1, math.ceil(TURN_S / once_s))
        return min(once_s, *(self._timed(batch, num_passes) for _ in range(2 if num_passes > 1 else 1))) / size

    def _timed(self, batch: Any, num_passes: int) -> float:
        """Seconds per pass. As in training, the host does not wait for a GPU between two micro-batches."""
        start = perf_counter()
        for _ in range(num_passes):
            self._loss_of(self._replica.model, batch).backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (perf_counter() - start) / num_passes

    def _leaves_reserve(self) -> bool:
        if self._device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
        return free + max(unused, 0) >= RESERVE * total

    def _free(self) -> None:
        for parameter in self._replica.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def replica_for_trials(
    model: Callable[[], Any], optimizer: OptimizerFactory, world: World, exact: bool, runtime: Runtime
) -> Iterator[tuple[Replica, Communicator]]:
    """A new replica, as in a run, and the workers' communicator. Both are closed after the block."""
    with ExitStack() as stack:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        stack.enter_context(process_settings(world, exact=exact, threads=runtime.threads))
        communicator = connect(world, runtime.backend, runtime.timeout_s)
        stack.callback(communicator.close)
        replica = Replica(model, optimizer, None, communicator, seed=0)
        stack.callback(replica.close)
        yield replica, communicator


def try_sizes(sizes: Sequence[int], seconds_per_sample: Callable[[int], float | None]) -> dict[int, float | None]:
    """Seconds per sample of each tried size, in ascending order, up to the first that does not fit or is too slow."""
    readings: dict[int, list[float]] = {}
    too_large: list[int] = []

    def take_turns(turn: Sequence[int]) -> None:
        for size in turn:
            if (seconds := seconds_per_sample(size)) is None:
                too_large.append(size)
            else:
                readings.setdefault(size, []).append(seconds)

    def best(size: int) -> float:
        return min(readings[size])

    num_too_slow = 0
    for size in sizes:
        take_turns([size])
        if too_large:
            break
        fastest = min(readings, key=best)
        if best(size) > TOO_SLOW * best(fastest):
            take_turns([fastest, size])
        is_too_slow = best(size) > TOO_SLOW * statistics.median(readings[fastest])
        num_too_slow = num_too_slow + 1 if is_too_slow else 0
        if num_too_slow == 2:
            break
    for number, limit in enumerate(ROUNDS if readings else ()):
        least_s = min(map(best, readings))
        close = [size for size in readings if best(size) <= limit * least_s]
        take_turns(close[:: 1 if number % 2 else -1])
    # The lower quartile: other work makes readings longer, never shorter.
    return {size: sorted(each)[len(each) // 4] for size, each in readings.items()} | dict.fromkeys(too_large)


def find_micro_batch(
    model: Callable[[], Any],
    optimizer: OptimizerFactory,
    loss_fn: Loss,
    source: Source,
    global_batch: int,
    *,
    precision: Precision,
    exact: bool,
    world: World,
    runtime: Runtime,
) -> FoundMicroBatch:
    """All workers call it together; each tries sizes on its own device at the same time as the others."""
    if not callable(optimizer) or isinstance(model, torch.nn.Module):
        raise ValueError("find_micro_batch trains a copy: give functions that build the model and its optimizer")
    with replica_for_trials(model, optimizer, world, exact, runtime) as (replica, communicator):
        device = communicator.world.device

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            with autocast(precision, device):
                return loss_fn(model, batch)

        trials = Trials(replica, loss_of, source, device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            own = try_sizes(candidates(global_batch), trials.seconds_per_sample)
        by_rank = gather({str(size): -1.0 if each is None else each for size, each in own.items()}, communicator)
    sample_s = [{int(size): None if each < 0 else each for size, each in values.items()} for values in by_rank]
    return choose(global_batch, sample_s)


def _cell(seconds: float | None) -> str:
    if seconds is None:
        return "out of memory"
    return f"{1 / seconds:.1f}/s" if seconds else "-"
