"""The longest step of a turn, in milliseconds: what Python's garbage collector costs a program with many objects.

The process holds millions of lists, as a tokenizer or a data set in Python objects does, and every step reads some
more and keeps them. The time of a step goes from its end to the end of the next, so that whatever a tool does between
two steps counts. The limit is the bare loop with the collector switched off, which no program could afford for long.
Every turn trains from the start: set-up and the first steps, in which ours sets aside what is there, are not timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.nn import functional

import paceline as pl
from bench.harness import Contestant, Result, alternate
from bench.models import mlp

WIDTHS = (32, 64, 64, 10)
BATCH = 32
NUM_SAMPLES = 8192
UNTIMED_STEPS = 30
ENDLESS = 1_000_000


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def bare(x: torch.Tensor, y: torch.Tensor) -> Iterator[None]:
    model = mlp(*WIDTHS)
    optimizer = make_optimizer(model.parameters())
    while True:
        order = torch.randperm(NUM_SAMPLES)
        for first in range(0, NUM_SAMPLES, BATCH):
            indices = order[first : first + BATCH]
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            yield


def bare_without_collector(x: torch.Tensor, y: torch.Tensor) -> Iterator[None]:
    with collector_off():
        yield from bare(x, y)


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def paceline(x: torch.Tensor, y: torch.Tensor, garbage_collection: Any = "between steps") -> Iterator[None]:
    setup = pl.Trainer.setup(
        lambda: mlp(*WIDTHS),
        make_optimizer,
        data=(x, y),
        global_batch=BATCH,
        device="cpu",
        runtime=pl.Runtime(threads=1, quiet=True, garbage_collection=garbage_collection),
    )
    with setup as trainer:
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
                yield


LOOPS: dict[str, Callable[..., Iterator[None]]] = {
    "collector off": bare_without_collector,
    "bare loop": bare,
    "paceline": paceline,
    "paceline, as usual": partial(paceline, garbage_collection="as usual"),
}


def contestant(
    loop: Callable[..., Iterator[None]], num_steps: int, num_kept: int, medians_ms: list[float]
) -> Contestant:
    """A turn's longest step; its median step is added to `medians_ms`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, WIDTHS[0], generator=generator)
    y = torch.randint(WIDTHS[-1], (NUM_SAMPLES,), generator=generator)

    def turn() -> float:
        kept: list[list[int]] = []
        steps = loop(x, y)
        times_ms = []
        before = 0.0
        try:
            for number, _ in enumerate(islice(steps, UNTIMED_STEPS + num_steps)):
                kept.extend([i] for i in range(num_kept))
                now = time.perf_counter()
                if number >= UNTIMED_STEPS:
                    times_ms.append((now - before) * 1e3)
                before = now
        finally:
            steps.close()  # type: ignore[attr-defined]
        medians_ms.append(statistics.median(times_ms))
        return max(times_ms)

    return turn


def full_collection_ms() -> float:
    def once() -> float:
        start = time.perf_counter()
        gc.collect()
        return (time.perf_counter() - start) * 1e3

    return statistics.median(once() for _ in range(5))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=5, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--objects", type=int, default=2_000_000, help="lists that live throughout (%(default)s)")
    parser.add_argument("--kept", type=int, default=1000, help="lists that a step adds (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    living = [[i] for i in range(options.objects)]
    medians_ms: dict[str, list[float]] = {name: [] for name in LOOPS}
    contestants = {
        name: contestant(loop, options.steps, options.kept, medians_ms[name]) for name, loop in LOOPS.items()
    }
    collection_ms = full_collection_ms()
    measurements = alternate(contestants, options.turns)
    result = Result.of(
        "pauses",
        "milliseconds of a turn's longest step",
        measurements,
        ours="paceline",
        limit="collector off",
        better="lower",
        settings={
            "model": "-".join(map(str, WIDTHS)),
            "batch": BATCH,
            "steps_per_turn": options.steps,
            "living_lists": len(living),
            "lists_kept_per_step": options.kept,
            "threads": 1,
        },
    )
    medians = {name: statistics.median(values) for name, values in medians_ms.items()}
    result.detail["median_step_ms"] = medians
    result.detail["full_collection_ms"] = collection_ms
    result.detail["notes"] += [
        "median step, ms: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()),
        f"one full collection, ms: {collection_ms:.0f}",
    ]
    return result
