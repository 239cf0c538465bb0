"""What recording a timeline adds to a step of some milliseconds, on one worker.

Runs of the same training take turns in one process: with a timeline, without, and once more without, since what those
two differ by is what the machine's other work does to the figures. Each turn makes a new trainer, so that a recorder's
thread lives in its own turns only, and takes some seconds, since the recorder works once a second. The model is that
of `bench overhead`, widened; the batch is as large as the wanted length of a step needs. CPU time is that of all
threads of the process.

On a machine that others use too, such runs differ by more than a percent whatever is recorded. So the recording is also
measured by itself: steps that only sleep, with and without a recorder, and the CPU time that they differ by.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import paceline as pl
from bench.harness import Contestant, Result, Spread, alternate, isolated, ratios
from bench.models import mlp
from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.timeline.recorder import NoTimeline, Recorder, TimelineRecorder
from paceline.run.step.stopwatch import stopwatch_for

WIDTHS = (64, 512, 512, 10)
NUM_SAMPLES = 8192
WARMUP_STEPS = 30  # among them is the first full garbage collection, which takes longer than all of a turn's recording
ENDLESS = 1_000_000
WITHOUT, WITH, AGAIN = "without", "with timeline", "without, again"


class Training:
    """The run that is measured; `cpu` collects CPU microseconds per step, turn by turn."""

    def __init__(self, batch: int, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, WIDTHS[0], generator=generator)
        self.y = torch.randint(WIDTHS[-1], (NUM_SAMPLES,), generator=generator)
        self.batch = batch
        self.num_steps = num_steps
        self.cpu: dict[str, list[float]] = {}

    def steps(self, timeline: Path | None) -> Iterator[None]:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

        setup = pl.Trainer.setup(
            lambda: mlp(*WIDTHS),
            optimizer,
            data=(self.x, self.y),
            global_batch=self.batch,
            runtime=pl.Runtime(threads=1, quiet=True, timeline=timeline),
        )
        with setup as trainer:
            for epoch in trainer.epochs(ENDLESS):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
                    yield

    def contestant(self, name: str, folder: Path | None) -> Contestant:
        def turn() -> float:
            loop = self.steps(folder)
            try:
                for _ in itertools.islice(loop, WARMUP_STEPS):
                    pass
                start, cpu_start = time.perf_counter(), time.process_time()
                for _ in itertools.islice(loop, self.num_steps):
                    pass
                cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - start
            finally:
                loop.close()  # type: ignore[attr-defined]
            self.cpu.setdefault(name, []).append(cpu_s / self.num_steps * 1e6)
            return wall_s / self.num_steps * 1e6

        return turn


def batch_for(step_ms: float) -> int:
    """A power of two whose step takes at least half as long as wanted, and mostly about as long."""
    batch = 16
    while batch < NUM_SAMPLES // 4:
        training = Training(batch, 20)
        isolated(partial(training.contestant, "calibration", None))()
        if training.cpu["calibration"][0] >= 700 * step_ms:
            break
        batch *= 2
    return batch


def sleeping_steps(recorder: Recorder, step_ms: float, num_steps: int) -> float:
    """CPU microseconds per step of steps that do nothing but take the stopwatch's readings."""
    watch = stopwatch_for(torch.device("cpu"), recorder)
    start = time.process_time()
    for number in range(1, num_steps + 1):
        watch.begin_step()
        for _ in range(3):
            watch.mark()
        time.sleep(step_ms / 1e3)
        watch.mark()
        watch.send(1)
        watch.mark()
        watch.mark()
        watch.completed(number)
    return (time.process_time() - start) / num_steps * 1e6


def cost_by_itself(folder: Path, step_ms: float, num_turns: int) -> Spread:
    """What a recorder adds to the CPU time of a step, in microseconds, turn by turn."""
    num_steps = round(2000 / step_ms)

    def recorded() -> float:
        recorder = TimelineRecorder(folder, World(), Events())
        try:
            return sleeping_steps(recorder, step_ms, num_steps)
        finally:
            recorder.close()

    measured = alternate(
        {WITHOUT: partial(sleeping_steps, NoTimeline(), step_ms, num_steps), WITH: recorded}, num_turns
    )
    return Spread.of([ours - other for ours, other in zip(measured[WITH], measured[WITHOUT], strict=True)])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=15, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--turns-alone", type=int, default=7, help="of the recorder by itself (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    batch = batch_for(options.step_ms)
    training = Training(batch, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            WITHOUT: isolated(partial(training.contestant, WITHOUT, None)),
            WITH: isolated(partial(training.contestant, WITH, Path(folder))),
            AGAIN: isolated(partial(training.contestant, AGAIN, None)),
        }
        alternate(contestants, 1)
        training.cpu.clear()
        measurements = alternate(contestants, options.turns)
        num_bytes = Path(folder, "rank-0.jsonl").stat().st_size
        alone = cost_by_itself(Path(folder, "alone"), options.step_ms, options.turns_alone)
    result = Result.of(
        "timeline",
        "microseconds per step",
        measurements,
        ours=WITH,
        limit=WITHOUT,
        better="lower",
        settings={
            "model": "-".join(map(str, WIDTHS)),
            "batch": batch,
            "optimizer": "SGD with momentum",
            "steps_per_turn": options.steps,
            "threads": 1,
        },
    )
    cpu = {name: Spread.of(values) for name, values in training.cpu.items()}
    by_turn = {name: Spread.of(ratios(training.cpu[name], training.cpu[WITHOUT])) for name in (WITH, AGAIN)}
    num_recorded = (options.turns + 1) * (options.steps + WARMUP_STEPS)
    result.detail["cpu_us_per_step"] = {name: spread.median for name, spread in cpu.items()}
    result.detail["cpu_ratio_by_turn"] = {name: spread.median for name, spread in by_turn.items()}
    result.detail["recording_cpu_us_per_step"] = alone.median
    result.detail["notes"] += [
        f"CPU microseconds per step: {', '.join(f'{name} {spread.median:.0f}' for name, spread in cpu.items())}",
        *(
            f"CPU ratio by turn, {n} to {WITHOUT}: {s.median:.4f} ({s.q1:.4f} .. {s.q3:.4f})"
            for n, s in by_turn.items()
        ),
        f"recording by itself: {alone.median:.1f} CPU microseconds per step ({alone.q1:.1f} .. {alone.q3:.1f}), "
        f"{alone.median / (1e3 * options.step_ms):.2%} of a step of {options.step_ms:g} ms; "
        f"{num_bytes / num_recorded:.0f} bytes per step on the disk",
    ]
    return result
