"""This tree against an earlier commit: what a step costs on one worker, and what several workers do together.

Each turn starts a process with the one or the other `paceline` and measures it there against its limit: a bare loop,
two processes that never talk, or, for twice as many workers as cores, one worker per core. So what is compared are
ratios to a limit of the same moment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import crowded, overhead, scaling
from bench.harness import Result, alternate, isolated
from bench.workers import gloo_group, run_workers

ROOT = Path(__file__).parents[1]
NOW, THEN = "this tree", "then"
QUESTIONS = ("overhead", "scaling", "exact", "crowded")


def overhead_ratio(num_turns: int) -> float:
    """Step time over the bare loop's."""
    import torch

    torch.set_num_threads(1)
    task = overhead.Task.make(128, by_sample=False, folder="")
    contestants = {
        "bare": isolated(partial(overhead.bare, task)), "ours": isolated(partial(overhead.paceline, task)),
    }  # fmt: skip
    alternate(contestants, 1)
    taken = alternate(contestants, num_turns)
    return median(ours / bare for ours, bare in zip(taken["ours"], taken["bare"], strict=True))


def scaling_ratio(num_turns: int, *, exact: bool = False) -> float:
    """Step time over that of independent processes."""
    task = scaling.Task(2, 8, 1, num_turns, 0.4)
    by_rank: list[dict[str, list[float]]] = run_workers(_two_loops, 2, task, exact)
    alone, ours = (
        [max(step_s) for step_s in zip(*(own[name] for own in by_rank), strict=True)]
        for name in (scaling.INDEPENDENT, scaling.OURS)
    )
    return float(median(ours_s / alone_s for ours_s, alone_s in zip(ours, alone, strict=True)))


def exact_ratio(num_turns: int) -> float:
    """The same in exact mode."""
    return scaling_ratio(num_turns, exact=True)


def crowded_ratio(num_turns: int) -> float:
    """Time per sample of two workers per core over that of one."""
    few = scaling.Task(2, 8, 1, num_turns, 0.8)
    many = replace(few, num_workers=crowded.CROWDING * few.num_workers)
    samples_per_s = crowded.measure([few], [many], [scaling.OURS])
    turns = zip(*(samples_per_s[crowded.name_of(scaling.OURS, task)] for task in (few, many)), strict=True)
    return median(of_few / of_many for of_few, of_many in turns)


def _two_loops(task: scaling.Task, exact: bool) -> dict[str, list[float]]:
    from torch import distributed

    loops = {scaling.INDEPENDENT: scaling.independent, scaling.OURS: partial(_equal_shares, exact=exact)}
    with gloo_group():
        rank = distributed.get_rank()
        contestants = {name: isolated(partial(scaling.contestant, task, rank, loop)) for name, loop in loops.items()}
        measurements = alternate(contestants, task.num_turns)
        contestants.clear()
        return measurements


def _equal_shares(task: scaling.Task, rank: int, *, exact: bool) -> scaling.Loop:  # noqa: ARG001 - it knows its rank
    """As in `bench scaling`, with what every commit knows; equal, so that every worker has a part in every step."""
    import paceline as pl

    with pl.Trainer.setup(
        scaling.make_model,
        scaling.make_optimizer,
        data=scaling.make_tokens(),
        global_batch=task.samples_per_worker * task.num_workers,
        micro_batch=task.micro_batch,
        runtime=pl.Runtime(threads=1),
        balancing=pl.Balancing(shares="equal"),
        exact=exact,
    ) as trainer:
        for epoch in trainer.epochs(scaling.ENDLESS):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                if trainer.step() is not None:
                    yield


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", default="HEAD", help="what to compare with, such as HEAD~5 (default: %(default)s)")
    parser.add_argument("--question", choices=QUESTIONS, default="overhead", help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=9, help="processes of each (default: %(default)s)")
    parser.add_argument("--inner-turns", type=int, default=15, help="alternations in a process (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.commit, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        sources = {NOW: ROOT / "src", THEN: Path(folder) / "src"}
        measurements: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(options.turns):
            for name in sorted(sources, reverse=bool(turn % 2)):
                measurements[name].append(_measured(sources[name], options.question, options.inner_turns))
    return Result.of(
        f"against {options.commit}: {options.question}",
        "times the limit",
        measurements,
        ours=NOW,
        limit=THEN,
        better="lower",
        settings={"commit": options.commit, "question": options.question, "inner_turns": options.inner_turns},
    )


def _measured(source: Path, question: str, num_turns: int) -> float:
    code = f"from bench.against import {question}_ratio; print({question}_ratio({num_turns}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))
