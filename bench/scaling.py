"""Samples per second of equal workers on one machine that train one model together.

The limit is as many independent processes: the same model and loop at the same time, without any exchange, their
rates summed. They are processes of their own, in which nobody else trains.

The workers are started once and the contestants take turns inside them, behind a barrier; the time of a turn is that
of the slowest worker. Turns are short and many, so that a burst of other work on the machine meets all contestants of a
turn or spoils one of many. Everyone has one intra-op thread, AdamW, and shuffled tokens in memory.

Paceline has torch's fused kernel do AdamW's arithmetic, keeps freed memory and has it on huge pages. Independent loops
inside its processes that ask for that kernel, too, are listed beside: so what the exchange costs can be told from what
else is saved.

What it costs to be ready for the loss of a worker is measured after that, see `bench/readiness.py`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench import readiness
from bench.harness import Contestant, Result, isolated
from bench.models import LanguageModel
from bench.teams import Team, Turns, run_teams
from bench.workers import gloo_group

VOCABULARY, LENGTH = 1000, 64
NUM_SAMPLES = 4096
LR = 1e-3
WARMUP_STEPS = 2
ENDLESS = 1_000_000

INDEPENDENT, DDP, OURS = "independent processes", "torch DDP", "paceline"
INDEPENDENT_FUSED = "in our processes, fused AdamW"
EQUAL, EXACT = "paceline, equal shares", "paceline exact"

Loop = Iterator[None]  # yields after each optimizer step


@dataclass(frozen=True)
class Task:
    """One worker's part of a step: `num_micro_batches` of `micro_batch` samples."""

    num_workers: int
    micro_batch: int
    num_micro_batches: int
    num_turns: int
    seconds: float

    @property
    def samples_per_worker(self) -> int:
        return self.micro_batch * self.num_micro_batches


def make_tokens() -> Tensor:
    return torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    return LanguageModel(vocabulary=VOCABULARY, length=LENGTH)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR)


def shuffled(tokens: Tensor, task: Task, rank: int) -> Iterator[Tensor]:
    """Micro-batches without end, the workers' parts of an epoch's order disjoint."""
    generator = torch.Generator().manual_seed(1)
    while True:
        mine = torch.randperm(NUM_SAMPLES, generator=generator)[rank :: task.num_workers]
        for first in range(0, len(mine) - task.micro_batch + 1, task.micro_batch):
            yield tokens[mine[first : first + task.micro_batch]]


def independent(task: Task, rank: int, *, fused: bool | None = None) -> Loop:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    batches = shuffled(make_tokens(), task, rank)
    while True:
        optimizer.zero_grad(set_to_none=True)
        for batch in itertools.islice(batches, task.num_micro_batches):
            (model(batch) / task.num_micro_batches).backward()
        optimizer.step()
        yield


def torch_ddp(task: Task, rank: int) -> Loop:
    # static_graph asserts that the first backward is synchronised, which accumulation under no_sync is not.
    model = DistributedDataParallel(
        make_model(), gradient_as_bucket_view=True, static_graph=task.num_micro_batches == 1
    )
    optimizer = make_optimizer(model.parameters())
    batches = shuffled(make_tokens(), task, rank)
    while True:
        optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(itertools.islice(batches, task.num_micro_batches), start=1):
            with nullcontext() if number == task.num_micro_batches else model.no_sync():
                (model(batch) / task.num_micro_batches).backward()
        optimizer.step()
        yield


def paceline(
    task: Task,
    rank: int,  # noqa: ARG001 - it knows its rank
    *,
    data: Any = None,
    tokens_of: Callable[[Any], Tensor] = lambda batch: batch,
    prepare: Callable[[Any], None] = lambda trainer: None,  # noqa: ARG005
    shares: Any = "measured",
    quiet: bool = False,
    **settings: Any,
) -> Loop:
    """Ours, over tokens in memory unless other data is given.

    Asked for one step at a time: a worker without a micro-batch in a step takes part in it all the same, and must not
    go on to the next, in which the others, whose turn is over, would leave it waiting.
    """
    import paceline as pl

    with pl.Trainer.setup(
        make_model,
        make_optimizer,
        data=make_tokens() if data is None else data,
        global_batch=task.samples_per_worker * task.num_workers,
        micro_batch=task.micro_batch,
        balancing=pl.Balancing(shares=shares),
        runtime=pl.Runtime(threads=1, quiet=quiet),
        **settings,
    ) as trainer:
        prepare(trainer)
        while True:
            for epoch in trainer.epochs(max_steps=trainer.position.step + 1):
                for batch in epoch:
                    trainer.backward(trainer.model(tokens_of(batch)))
                    trainer.step()
            yield


def contestant(task: Task, rank: int, make_loop: Callable[[Task, int], Loop]) -> Contestant:
    """Seconds per step of this worker over a turn, started together with the others."""
    loop = make_loop(task, rank)

    def measure(num_steps: int) -> float:
        distributed.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        return (time.perf_counter() - start) / num_steps

    measure(WARMUP_STEPS)  # set-up, first allocations, DDP's second bucket layout
    step_s = torch.tensor(measure(WARMUP_STEPS))
    distributed.all_reduce(step_s, distributed.ReduceOp.MAX)  # so that all workers agree on the number of steps
    return partial(measure, max(1, round(task.seconds / step_s.item())))


def work_alone(task: Task, turns: Turns) -> dict[str, list[float]]:
    return _work(task, {INDEPENDENT: independent}, turns)


def work_together(task: Task, turns: Turns) -> dict[str, list[float]]:
    loops: dict[str, Callable[[Task, int], Loop]] = {
        INDEPENDENT_FUSED: partial(independent, fused=True),
        DDP: torch_ddp,
        OURS: paceline,
        EQUAL: partial(paceline, shares="equal"),
        EXACT: partial(paceline, exact=True),
    }
    return _work(task, loops, turns)


def _work(task: Task, loops: Mapping[str, Callable[[Task, int], Loop]], turns: Turns) -> dict[str, list[float]]:
    """One worker's measurements, in seconds per step."""
    with gloo_group():
        rank = distributed.get_rank()

        def build() -> dict[str, Contestant]:
            return {name: isolated(partial(contestant, task, rank, loop)) for name, loop in loops.items()}

        return turns.alternate(build, task.num_turns)


def samples_per_s(name: str, step_s: tuple[float, ...], task: Task) -> float:
    """Of all workers, from each one's seconds per step in the same turn."""
    if name in (INDEPENDENT, INDEPENDENT_FUSED):
        return sum(task.samples_per_worker / own for own in step_s)
    return task.num_workers * task.samples_per_worker / max(step_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=41, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a turn (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="per worker and step (default: %(default)s)")
    parser.add_argument(
        "--membership-turns", type=int, default=200, help="with and without membership (default: %(default)s)"
    )
    parser.add_argument("--membership-seconds", type=float, default=0.1, help="length of such a turn (%(default)s)")


def run(options: argparse.Namespace) -> Result:
    task = Task(options.workers, options.micro_batch, options.micro_batches, options.turns, options.seconds)
    by_team = run_teams(*(Team(work, task.num_workers, (task,)) for work in (work_alone, work_together)))
    measurements = {
        name: [samples_per_s(name, step_s, task) for step_s in zip(*(own[name] for own in by_rank), strict=True)]
        for by_rank in by_team
        for name in by_rank[0]
    }
    result = Result.of(
        "scaling",
        "samples/s",
        measurements,
        ours=OURS,
        limit=INDEPENDENT,
        better="higher",
        settings={
            **asdict(task),
            "model": "transformer, 4 layers, width 256",
            "parameters": sum(parameter.numel() for parameter in make_model().parameters()),
            "vocabulary": VOCABULARY,
            "length": LENGTH,
            "optimizer": "AdamW",
            "backend": "shared memory; DDP: gloo",
            "threads_per_worker": 1,
        },
        not_peers=(EQUAL, EXACT, INDEPENDENT_FUSED),
    )
    result.detail["ratio_to_ddp"] = result.ours / result.peers[DDP]
    # What measuring and dividing by speed costs where there is nothing to gain: by turn, for the machine's drift.
    result.detail["ratio_to_equal_shares"] = result.detail["ours_over_by_turn"][EQUAL]["median"]
    if task.num_workers > 1 and options.membership_turns:
        # Not among the contestants, who took their turns at another time: only its own ratio means anything.
        found = readiness.measure(
            partial(paceline, task), task.num_workers, options.membership_turns, options.membership_seconds
        )
        result.detail["notes"].append(found.pop("note"))
        result.detail["membership"] = found
    return result
