"""What it costs to look whether everything is right: steps with these checks and without them, in turns.

In every micro-batch: whether somebody changed gradients between backward and step. In every exchange: whether
hyper-parameters and trained parameters are the same on all workers. Every hundred steps: whether weights are.

overhead: microseconds per step of the tiny MLP of `bench overhead`, one worker.
scaling: samples/s of the transformer of `bench scaling`, two workers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from bench import overhead, scaling
from bench.harness import Result, circumstances, isolated
from bench.parts import Goal, Parts, to_limit
from bench.workers import gloo_group, run_workers

CHECKED, UNCHECKED = "paceline", "paceline, unchecked"
MAX_COST = 1.005
NUM_TRAINERS = 5

GOALS = {
    "overhead": Goal("at most, of the step without checks", to_limit(CHECKED), MAX_COST, is_upper=True),
    "scaling": Goal("at most, of the step without checks", to_limit(CHECKED), MAX_COST, is_upper=True),
}


class _Unwatched:
    """In place of a `GradientWatch`."""

    hooks_per_parameter = 0

    def forget(self) -> None:
        return

    def backward(self, loss: Any, retain_graph: bool) -> None:
        loss.backward(retain_graph=retain_graph)

    def check(self) -> None:
        return

    def close(self) -> None:
        return


class _Silent:
    """In place of `Agreement` and `ReplicaCheck`."""

    def check(self, numbers: Any, *, now: bool) -> None:
        return

    def after_step(self, *_: Any) -> None:
        return


def without_checks(trainer: Any) -> None:
    """Take the checks out of a trainer. There is no such setting: they cost next to nothing."""
    loop = trainer.run.loop
    loop.exchange._watch.close()
    loop.exchange._watch = _Unwatched()
    loop._agreement = loop.replica_check = _Silent()
    loop.replica.digest = lambda: 0


def tiny(task: overhead.Task, prepare: Callable[[Any], None]) -> Any:
    """Several trainers take turns: two of a kind can differ by a hundredth, by where their tensors happen to lie."""
    import paceline as pl

    def loop() -> Any:
        with pl.Trainer.setup(
            overhead.make_model,
            overhead.make_optimizer,
            data=(task.x, task.y),
            global_batch=overhead.BATCH,
            runtime=pl.Runtime(threads=1, quiet=True),
        ) as trainer:
            prepare(trainer)
            for epoch in trainer.epochs(overhead.ENDLESS):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
                    yield

    trainers = itertools.cycle([task.timed(loop()) for _ in range(NUM_TRAINERS)])
    return lambda: next(trainers)()


def together(task: scaling.Task) -> dict[str, list[float]]:
    """One worker's measurements, in seconds per step."""
    from bench.harness import alternate

    loops = {
        CHECKED: partial(scaling.paceline, quiet=True),
        UNCHECKED: partial(scaling.paceline, quiet=True, prepare=without_checks),
    }
    with gloo_group():
        rank = distributed.get_rank()
        contestants = {name: isolated(partial(scaling.contestant, task, rank, loop)) for name, loop in loops.items()}
        measured = alternate(contestants, task.num_turns)
        contestants.clear()
        return measured


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=155, help="alternations (default: %(default)s)")
    parser.add_argument("--part", nargs="+", choices=list(GOALS), default=list(GOALS), help="default: all")


def run(options: argparse.Namespace) -> Parts:
    torch.set_num_threads(1)
    results = {}
    if "overhead" in options.part:
        task = overhead.Task.make(256, by_sample=False, folder="")
        builders = {CHECKED: partial(tiny, task, lambda _: None), UNCHECKED: partial(tiny, task, without_checks)}
        results["overhead"] = _result("overhead", overhead.measure(builders, options.turns), {"steps_per_turn": 256})
    if "scaling" in options.part:
        shared = scaling.Task(2, 8, 2, options.turns, 0.6)
        by_rank = run_workers(together, 2, shared)
        step_us = {
            name: [1e6 * max(step_s) for step_s in zip(*(own[name] for own in by_rank), strict=True)]
            for name in by_rank[0]
        }
        results["scaling"] = _result("scaling", step_us, {"workers": 2, "micro_batches_per_worker": 2})
    return Parts("checks", results, GOALS, circumstances({"parts": options.part, "turns": options.turns}))


def _result(name: str, measurements: dict[str, list[float]], settings: dict[str, Any]) -> Result:
    return Result.of(
        f"checks, {name}",
        "microseconds per step",
        measurements,
        ours=CHECKED,
        limit=UNCHECKED,
        better="lower",
        settings=settings,
    )
