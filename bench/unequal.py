"""Two unequal workers: the step that they share, and what each does alone."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed

from bench import scaling
from bench.cpu_quota import CpuQuota
from bench.harness import Contestant
from bench.scaling import ENDLESS, LENGTH, VOCABULARY, make_model, make_optimizer

if TYPE_CHECKING:
    from paceline.run.step.record import StepRecord

NUM_WORKERS, FREE_RANK, LIMITED_RANK = 2, 0, 1
STEPS_PER_EPOCH = 64

Shares = Literal["measured", "equal"]


@dataclass(frozen=True)
class Task:
    """A step of `num_micro_batches` for all workers together. The limited worker has `quota` cores; 1 is no limit."""

    quota: float
    micro_batch: int
    num_micro_batches: int
    num_turns: int
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.quota <= 1:
            raise ValueError(f"quota={self.quota} is no part of a core: choose 0 < quota <= 1, where 1 is no limit")
        if self.num_micro_batches % NUM_WORKERS:
            raise ValueError(
                f"micro-batches={self.num_micro_batches} cannot be divided equally: choose a multiple of {NUM_WORKERS}"
            )
        # A worker without a share completes its steps unseen, and turns count the steps that are seen.
        least = math.ceil(2 * (1 + self.quota) / self.quota)
        if self.num_micro_batches < least:
            raise ValueError(
                f"micro-batches={self.num_micro_batches} may leave none to a worker with {self.quota} of a core: "
                f"choose at least {least + least % NUM_WORKERS}"
            )

    @property
    def cores(self) -> float | None:
        """The quota as a cgroup has it."""
        return self.quota if self.quota < 1 else None

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.num_micro_batches

    @property
    def equal_split(self) -> scaling.Task:
        """The same step as equal workers would share it."""
        per_worker = self.num_micro_batches // NUM_WORKERS
        return scaling.Task(NUM_WORKERS, self.micro_batch, per_worker, self.num_turns, self.seconds)

    def tokens(self) -> Tensor:
        """An epoch of whole steps."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(VOCABULARY, (STEPS_PER_EPOCH * self.global_batch, LENGTH), generator=generator)

    def settings(self) -> dict[str, Any]:
        """What a result says about how it came about."""
        return {
            "workers": NUM_WORKERS,
            **asdict(self),
            "model": "transformer, 4 layers, width 256",
            "parameters": sum(parameter.numel() for parameter in make_model().parameters()),
            "vocabulary": VOCABULARY,
            "length": LENGTH,
            "optimizer": "AdamW",
            "backend": "shared memory; peers: gloo",
            "threads_per_worker": 1,
        }


def join(quota: CpuQuota) -> int:
    """Put this process under the quota if it is the one to be limited; its rank."""
    rank = distributed.get_rank()
    if rank == LIMITED_RANK:
        quota.add(os.getpid())
    return rank


def paceline(task: Task, *, shares: Shares = "measured") -> Generator[StepRecord, None, None]:
    """Train without end; yields after each step."""
    import paceline as pl

    with pl.Trainer.setup(
        make_model,
        make_optimizer,
        data=task.tokens(),
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        balancing=pl.Balancing(shares=shares),
        runtime=pl.Runtime(threads=1),
    ) as trainer:
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                if record := trainer.step():
                    yield record


def alone(task: Task) -> Contestant:
    """Samples per second of this worker by itself, while the other works by itself.

    Both work equally long, to the next micro-batch, so that neither has the machine to itself at the end.
    """
    per_step = task.num_micro_batches // NUM_WORKERS
    batches = scaling.shuffled(scaling.make_tokens(), task.equal_split, distributed.get_rank())
    model = make_model()
    optimizer = make_optimizer(model.parameters())

    def micro_batches() -> Iterator[None]:
        for number, batch in enumerate(batches, start=1):
            (model(batch) / per_step).backward()
            if number % per_step == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            yield

    loop = micro_batches()

    def measure() -> float:
        distributed.barrier()
        start = time.perf_counter()
        num_done, elapsed_s = 0, 0.0
        while elapsed_s < task.seconds:
            next(loop)
            num_done += 1
            elapsed_s = time.perf_counter() - start
        return num_done * task.micro_batch / elapsed_s

    measure()  # first allocations
    return measure
