"""Steps per second of models so small that everything beside the arithmetic counts.

one: `dp_train` with one replica on the irises (4-32-3, one sample per replica and step, Adam), against a loop
written by hand in torch with its fused Adam.
two: two replicas on two workers, against the sequential loop by hand: the gradients of both samples one after the
other, their mean, one step.
mlp: a 32-64-64-10 MLP on two workers, 32 samples each, against torch DDP over Gloo.

Contestants take turns; workers are started once, and who needs one only leaves the other waiting at a barrier. The
clock is read where a step ends, after some untimed ones. One intra-op thread each.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench import overhead, scaling
from bench.harness import Contestant, Result, alternate, circumstances, isolated
from bench.models import mlp
from bench.parts import Goal, Parts, to_limit
from bench.workers import gloo_group, run_workers

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTHS = (4, 32, 3)
LR = 1e-3
WARMUP_STEPS = 50
NUM_WORKERS = 2
OURS, FUSED, BY_HAND, DDP = "dp_train", "dp_train, fused Adam", "by hand", "torch DDP"
TRAINER = "paceline"

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    num_turns: int
    num_steps: int  # timed, per turn
    seconds: float  # of a turn of the part `mlp`


def flowers() -> list[Sample]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        iris = importlib.import_module("iris")
    finally:
        sys.path.remove(str(EXAMPLES))
    measurements, labels = map(torch.from_numpy, iris.load_iris())
    return list(zip(measurements, labels, strict=True))


def make_model() -> nn.Module:
    return mlp(*WIDTHS)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR, fused=True)


class StepClock:
    """Steps per second between the end of the last untimed step and that of the last one."""

    def __init__(self, task: Task) -> None:
        self._num_timed = task.num_steps
        self._num_seen = 0
        self._start_s = self._end_s = math.nan
        self.last_step = WARMUP_STEPS + task.num_steps

    def step(self) -> None:
        """A step has ended. To `dp_train` this is a scheduler: that is stepped once per step, on every worker."""
        self._num_seen += 1
        if self._num_seen == WARMUP_STEPS:
            self._start_s = time.perf_counter()
        elif self._num_seen == self.last_step:
            self._end_s = time.perf_counter()

    @property
    def steps_per_s(self) -> float:
        return self._num_timed / (self._end_s - self._start_s)


def by_hand(task: Task, num_replicas: int) -> Contestant:
    """The fastest plain loop: one model stands for all replicas, since their weights are the same."""
    samples = flowers()
    model = make_model()
    optimizer = fused_adam(model.parameters())
    parameters = list(model.parameters())

    def turn() -> float:
        clock = StepClock(task)
        losses = []
        for step in range(clock.last_step):
            optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for replica in range(num_replicas):
                x, y = samples[(step * num_replicas + replica) % len(samples)]
                own = functional.cross_entropy(model(x), y)
                own.backward()
                loss += own.item()
            if num_replicas > 1:
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.grad.div_(num_replicas)
            optimizer.step()
            losses.append(loss / num_replicas)
            clock.step()
        return clock.steps_per_s

    return turn


def dp_train(task: Task, num_replicas: int, optimizer: Callable[[Any], torch.optim.Optimizer] | None) -> Contestant:
    """Ours; in a worker of several, with its part of the replicas. Every turn is one call."""
    import paceline as pl

    samples = flowers()

    def turn() -> float:
        clock = StepClock(task)
        pl.dp_train(
            make_model,
            samples,
            loss_fn=functional.cross_entropy,
            forward_fn=lambda model, sample: model(sample[0]),
            target_fn=lambda sample: sample[1],
            n_gpu=num_replicas,
            n_iter=clock.last_step,
            verbose=False,
            optimizer=optimizer,
            scheduler=lambda _: clock,
        )
        return clock.steps_per_s

    return turn


def one_replica(task: Task) -> dict[str, list[float]]:
    builders: dict[str, Callable[[], Contestant]] = {
        BY_HAND: partial(by_hand, task, 1),
        OURS: partial(dp_train, task, 1, None),
        FUSED: partial(dp_train, task, 1, fused_adam),
    }
    return _alternate(builders, task)


def two_replicas(task: Task) -> dict[str, list[float]]:
    """In a worker of two: rank 0's measurements are those that count."""
    with gloo_group():
        builders: dict[str, Callable[[], Contestant]] = {
            BY_HAND: partial(_only_on_rank_0, partial(by_hand, task, NUM_WORKERS)),
            OURS: partial(dp_train, task, NUM_WORKERS, None),
            FUSED: partial(dp_train, task, NUM_WORKERS, fused_adam),
        }
        return _alternate(builders, task)


def _only_on_rank_0(build: Callable[[], Contestant]) -> Contestant:
    contestant = build()

    def turn() -> float:
        value = contestant() if distributed.get_rank() == 0 else 1.0
        distributed.barrier()
        return value

    return turn


def _alternate(builders: dict[str, Callable[[], Contestant]], task: Task) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    contestants = {name: isolated(build) for name, build in builders.items()}
    alternate(contestants, 1)  # lazy imports and first allocations happen here
    return alternate(contestants, task.num_turns)


def tiny_mlp(task: Task) -> dict[str, list[float]]:
    """In a worker of two: seconds per step."""
    division = scaling.Task(NUM_WORKERS, overhead.BATCH, 1, task.num_turns, task.seconds)
    with gloo_group():
        loops = {DDP: torch_ddp, TRAINER: paceline}
        rank = distributed.get_rank()
        contestants = {n: isolated(partial(scaling.contestant, division, rank, loop)) for n, loop in loops.items()}
        measured = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        return measured


def _mlp_samples() -> overhead.Task:
    return overhead.Task.make(0, by_sample=False, folder="")


def torch_ddp(division: scaling.Task, rank: int) -> Iterator[None]:
    data = _mlp_samples()
    model = DistributedDataParallel(overhead.make_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = overhead.make_optimizer(model.parameters())
    while True:
        for rows in torch.randperm(len(data.x))[rank :: division.num_workers].split(division.micro_batch):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
            yield


def paceline(division: scaling.Task, rank: int) -> Iterator[None]:  # noqa: ARG001 - it knows its rank
    import paceline as pl

    data = _mlp_samples()
    with pl.Trainer.setup(
        overhead.make_model,
        overhead.make_optimizer,
        data=(data.x, data.y),
        global_batch=division.num_workers * division.micro_batch,
        micro_batch=division.micro_batch,
        balancing=pl.Balancing(
            shares="equal"
        ),  # a worker without a share would not be asked for its step, which all count here
        runtime=pl.Runtime(threads=1, quiet=True),
    ) as trainer:
        for epoch in trainer.epochs(scaling.ENDLESS):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                if trainer.step():
                    yield


def measure_one(task: Task) -> Result:
    (measured,) = run_workers(one_replica, 1, task)
    return _result("one", measured, task, ours=OURS, limit=BY_HAND, not_peers=(FUSED,))


def measure_two(task: Task) -> Result:
    measured = run_workers(two_replicas, NUM_WORKERS, task)[0]
    return _result("two", measured, task, ours=OURS, limit=BY_HAND, not_peers=(FUSED,))


def measure_mlp(task: Task) -> Result:
    by_rank = run_workers(tiny_mlp, NUM_WORKERS, task)
    measured = {
        name: [1 / max(step_s) for step_s in zip(*(own[name] for own in by_rank), strict=True)] for name in by_rank[0]
    }
    return _result("mlp", measured, task, ours=TRAINER, limit=DDP)


def _result(part: str, measured: dict[str, list[float]], task: Task, **roles: Any) -> Result:
    settings = {**asdict(task), "threads_per_worker": 1}
    return Result.of(part, "steps/s", measured, better="higher", settings=settings, **roles)


PARTS: dict[str, tuple[Callable[[Task], Result], Goal]] = {
    "one": (measure_one, Goal("steps/s over the loop by hand, at least", to_limit(OURS), 0.97)),
    "two": (measure_two, Goal("steps/s over the sequential loop, at least", to_limit(OURS), 1.3)),
    "mlp": (measure_mlp, Goal("steps/s over torch DDP, at least", to_limit(TRAINER), 5.0)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--turns", type=int, default=21, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn of `mlp` (default: %(default)s)")


def run(options: argparse.Namespace) -> Parts:
    task = Task(options.turns, options.steps, options.seconds)
    results = {name: PARTS[name][0](task) for name in options.parts}
    goals = {name: goal for name, (_, goal) in PARTS.items()}
    return Parts("dp_train", results, goals, circumstances(asdict(task)))
