"""The part of `bench scaling` about membership: what it costs an undisturbed run to be ready for the loss of a worker.

In workers of `launch(min_workers=1)` a trainer that is ready and one that is not take turns, of a few steps each and
very many of them: the machine's speed changes by more than what is measured, but hardly from one turn to the next. What
counts is the median of the ratios within a turn, and its 95% confidence interval (bootstrap): of the time of a step,
and of the CPU time that all workers spend in it. Two parts run all the time, also in the turns of the other trainer,
and are listed as fractions of a core: the thread of a worker that looks for losses, and the agent, which is another
process, beside that of a launch whose workers cannot change.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from bench.harness import isolated, ratios
from bench.workers import gloo_group
from paceline.core.processes import MEMBER_VARIABLE, MEMBERSHIP_VARIABLE
from paceline.run.membership.communicator import WATCHER_NAME

ON, OFF = "on", "off"
WARMUP_STEPS = 4
NUM_RESAMPLES = 2000

MakeLoop = Callable[[int], Iterator[None]]  # of a rank; yields after each optimizer step


@dataclass(frozen=True)
class Estimate:
    """A median, and its 95% confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        own = np.asarray(values)
        drawn = np.random.default_rng(0).choice(own, (NUM_RESAMPLES, len(own)))
        low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
        return cls(float(np.median(own)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} .. {self.high:.4f})"


@dataclass(frozen=True)
class Readings:
    """Of each contestant, turn by turn: seconds per step of the slowest worker, CPU seconds per step of all."""

    wall_s: Mapping[str, Sequence[float]]
    cpu_s: Mapping[str, Sequence[float]]
    watcher: float = 0.0  # the fraction of a core that a worker's watching thread takes


def measure_together(make_loop: MakeLoop, num_turns: int, seconds: float) -> Readings:
    """On every worker of a launch. The contestants of a turn change places from turn to turn."""
    with gloo_group():
        contestants = {ON: _build(make_loop, is_ready=True), OFF: _build(make_loop, is_ready=False)}
        step_s = max(turn(WARMUP_STEPS)[0] for turn in contestants.values())
        num_steps = max(2, round(seconds / step_s))
        watcher = next((each for each in threading.enumerate() if each.name == WATCHER_NAME), None)
        began_s, watcher_began_s = time.perf_counter(), _cpu_s(watcher)
        wall_s, cpu_s = ({name: [] for name in contestants} for _ in range(2))  # type: ignore[var-annotated]
        for number in range(num_turns):
            for name in (ON, OFF) if number % 2 else (OFF, ON):
                wall, cpu = contestants[name](num_steps)
                wall_s[name].append(wall)
                cpu_s[name].append(cpu)
        return Readings(wall_s, cpu_s, (_cpu_s(watcher) - watcher_began_s) / (time.perf_counter() - began_s))


def _cpu_s(thread: threading.Thread | None) -> float:
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _build(make_loop: MakeLoop, *, is_ready: bool) -> Callable[[int], tuple[float, float]]:
    with nullcontext() if is_ready else without_variables(MEMBERSHIP_VARIABLE, MEMBER_VARIABLE):
        loop = make_loop(distributed.get_rank())
        results: list[tuple[float, float]] = []
        num_steps = WARMUP_STEPS

        def turn() -> float:
            results.append(_time_steps(loop, num_steps))
            return 0.0

        own = isolated(lambda: turn() or turn)  # set-up, first allocations

    def run(count: int) -> tuple[float, float]:
        nonlocal num_steps
        num_steps = count
        own()
        return results.pop()

    return run


def _time_steps(loop: Iterator[None], num_steps: int) -> tuple[float, float]:
    distributed.barrier()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for _ in itertools.islice(loop, num_steps):
        pass
    wall = torch.tensor((time.perf_counter() - began_s) / num_steps, dtype=torch.float64)
    cpu = torch.tensor((time.process_time() - cpu_began_s) / num_steps, dtype=torch.float64)
    distributed.all_reduce(wall, distributed.ReduceOp.MAX)
    distributed.all_reduce(cpu)
    return wall.item(), cpu.item()


@contextmanager
def without_variables(*names: str) -> Iterator[None]:
    """In this block the environment does not have these variables."""
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def measure(make_loop: MakeLoop, num_workers: int, num_turns: int, seconds: float) -> dict[str, Any]:
    import paceline as pl

    shares = {}
    for name, options in ((OFF, {}), (ON, {"min_workers": 1})):
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        # Without membership only the agent counts, so a quarter of the turns is enough.
        count = num_turns if name == ON else max(1, num_turns // 4)
        found = pl.launch(measure_together, num_workers, args=(make_loop, count, seconds), **options)
        shares[name] = (time.process_time() - cpu_began_s) / (time.perf_counter() - began_s)
    readings: Readings = found
    estimates = {
        "wall": Estimate.of(ratios(readings.wall_s[ON], readings.wall_s[OFF])),
        "cpu": Estimate.of(ratios(readings.cpu_s[ON], readings.cpu_s[OFF])),
    }
    return {
        "turns": num_turns,
        "step_s": {name: float(np.median(own)) for name, own in readings.wall_s.items()},
        "on_over_off": {name: asdict(own) for name, own in estimates.items()},
        "agent_cpu": shares,
        "watcher_cpu": readings.watcher,
        "note": (
            f"membership on over off, medians of {num_turns} turns with 95% intervals: seconds per step "
            f"{estimates['wall']}, CPU seconds per step {estimates['cpu']}; the agent takes {shares[ON]:.2%} of a "
            f"core, {shares[OFF]:.2%} without, the watching thread {readings.watcher:.3%}"
        ),
    }
