"""Samples per second of two unequal workers that train one model together: one has 40% of a core.

The limit is what the two do alone: the same model, micro-batches and optimizer at the same time, without any exchange,
their rates summed. Everyone who trains together has the same global batch, 32 micro-batches per step; the peers divide
it equally and accumulate 16 per worker without exchange. The workers are started once and the contestants take turns
inside them, behind a barrier; a turn is whole steps of a run that goes on from turn to turn, and takes as long as its
slowest worker. Everyone has one intra-op thread, AdamW, and shuffled tokens in memory. A short run in exact mode shows
that measured shares change who computes, not what: the weights are those of an equal split and of one worker.

With --shift there is no limit at first, then it is cut to 40% of a core, then restored, while Paceline trains on.
How much of the present limit each step reaches shows how fast the shares follow.

The limit on a worker is a cgroup's quota, enforced in periods of 100 ms: steps should take a second or more.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader

from bench import scaling
from bench.cpu_quota import CpuQuota, cpu_quota, missing_cpu_quota
from bench.harness import Contestant, Result, Spread, alternate, circumstances, isolated, missing_package
from bench.models import LanguageModel
from bench.scaling import ENDLESS, LENGTH, VOCABULARY, make_model, make_optimizer
from bench.workers import gloo_group, run_workers

if TYPE_CHECKING:
    from paceline.run.loop import StepRecord

NUM_WORKERS, FREE_RANK, LIMITED_RANK = 2, 0, 1
STEPS_PER_EPOCH = 64
SETTLING_STEPS = 6  # of untimed training: first allocations, and measured shares find their level
EXACT_STEPS = 4

ALONE, DDP, ACCELERATE, OURS, EQUAL = "alone", "torch DDP", "Accelerate", "paceline", "paceline, equal shares"
PEERS: dict[str, tuple[str, ...]] = {DDP: (), ACCELERATE: ("accelerate",)}  # with the packages they need

GOAL = 0.9  # of the present limit, to be reached within so many steps after a change
GOAL_STEPS = 6

Loop = Iterator[Any]  # yields after each optimizer step


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
        least = math.ceil(2 * (1 + self.quota) / self.quota)
        if self.num_micro_batches < least:  # a worker without a share completes its steps unseen
            raise ValueError(
                f"micro-batches={self.num_micro_batches} may leave a worker with {self.quota} of a core none: "
                f"choose at least {least + least % NUM_WORKERS}"
            )

    @property
    def cores(self) -> float | None:
        """The limit as a cgroup has it."""
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


def accelerate(task: Task) -> Loop:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.num_micro_batches // NUM_WORKERS)
    assert accelerator.num_processes == NUM_WORKERS, accelerator.state
    module = make_model()
    loader: DataLoader[Any] = DataLoader(task.tokens(), batch_size=task.micro_batch, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, batches = accelerator.prepare(module, make_optimizer(module.parameters()), loader)
    while True:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield


def paceline(task: Task, *, shares: Literal["measured", "equal"] = "measured") -> Iterator[StepRecord]:
    import paceline as pl

    with pl.Trainer.setup(
        make_model,
        make_optimizer,
        data=task.tokens(),
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        shares=shares,
        threads=1,
    ) as trainer:
        for epoch in trainer.epochs(ENDLESS):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                if record := trainer.step():
                    yield record


def noting_shares(loop: Iterator[StepRecord], shares: list[tuple[int, ...]]) -> Loop:
    for record in loop:
        shares.append(record.shares)
        yield


def together(task: Task, make_loop: Callable[[], Loop]) -> Contestant:
    """Seconds per step of this worker over a turn, started together with the other."""
    loop = make_loop()

    def measure(num_steps: int) -> float:
        distributed.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(loop, num_steps):
            pass
        return (time.perf_counter() - start) / num_steps

    step_s = torch.tensor([measure(1) for _ in range(SETTLING_STEPS)][-1])
    distributed.all_reduce(step_s, distributed.ReduceOp.MAX)  # so that all workers agree on the number of steps
    return partial(measure, max(1, round(task.seconds / step_s.item())))


def alone(task: Task) -> Contestant:
    """Samples per second of this worker by itself, while the other works by itself.

    Both work equally long, to the next micro-batch, so that neither has the machine's memory to itself for a while.
    """
    per_step = task.num_micro_batches // NUM_WORKERS
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    batches = scaling.shuffled(scaling.make_tokens(), task.equal_split, distributed.get_rank())

    def micro_batches() -> Loop:
        for number, batch in enumerate(batches, start=1):
            (model(batch) / per_step).backward()
            if number % per_step == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            yield

    loop = micro_batches()

    def measure() -> float:
        distributed.barrier()
        start = now = time.perf_counter()
        for num_done in itertools.count(1):
            next(loop)
            now = time.perf_counter()
            if now - start >= task.seconds:
                break
        return num_done * task.micro_batch / (now - start)

    measure()  # first allocations
    return measure


@dataclass(frozen=True)
class ExactRun:
    """What a short run in exact mode ended with, and how its steps were divided."""

    weights_sha256: str
    shares: list[tuple[int, ...]]


def exact_run(task: Task, shares: Literal["measured", "equal"]) -> ExactRun:
    """Train a small model for some steps in the world this process is in."""
    import paceline as pl

    seen: list[tuple[int, ...]] = []
    with pl.Trainer.setup(
        partial(LanguageModel, vocabulary=VOCABULARY, length=LENGTH, width=64, num_layers=2),
        make_optimizer,
        data=task.tokens()[: EXACT_STEPS * task.global_batch],
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        shares=shares,
        exact=True,
    ) as trainer:
        trainer.every(1, lambda record: seen.append(record.shares))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                trainer.step()
        return ExactRun(sha256_of(trainer.model), seen)


def sha256_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class Measured:
    """One worker's turns: samples/s alone, else seconds per step. And what came by the way."""

    turns: dict[str, list[float]]
    shares: list[tuple[int, ...]]
    exact: dict[str, ExactRun]


def worker(task: Task, quota: CpuQuota, peers: Sequence[str]) -> Measured:
    with gloo_group():
        if distributed.get_rank() == LIMITED_RANK:
            quota.add(os.getpid())
        exact = {
            "2 workers, measured shares": exact_run(task, "measured"),
            "2 workers, equal shares": exact_run(task, "equal"),
        }
        shares: list[tuple[int, ...]] = []
        loops: dict[str, Callable[[], Loop]] = {
            DDP: lambda: scaling.torch_ddp(task.equal_split, distributed.get_rank()),
            ACCELERATE: lambda: accelerate(task),
            OURS: lambda: noting_shares(paceline(task), shares),
            EQUAL: lambda: paceline(task, shares="equal"),
        }
        contestants = {ALONE: isolated(partial(alone, task))}
        contestants |= {
            name: isolated(partial(together, task, make_loop))
            for name, make_loop in loops.items()
            if name in (*peers, OURS, EQUAL)
        }
        turns = alternate(contestants, task.num_turns)
        contestants.clear()  # the loops end here, while the group they talk over is still there
        return Measured(turns, shares, exact)


def samples_per_s(name: str, values: Sequence[float], task: Task) -> float:
    """Of all workers, from what each one measured in the same turn."""
    return sum(values) if name == ALONE else task.global_batch / max(values)


def whole_number_limit(speeds: Sequence[float], num_micro_batches: int) -> float:
    """How much of the summed speed the best division into whole micro-batches can reach."""
    from paceline.plan.shares import shares

    seconds = max(count / speed for count, speed in zip(shares(num_micro_batches, speeds), speeds, strict=True))
    return num_micro_batches / seconds / sum(speeds)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shift", action="store_true", help="cut the quota in the middle of a run and restore it")
    parser.add_argument("--quota", type=float, default=0.4, help="cores of the limited worker (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=32, help="per step, of all workers (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=11, help="alternations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument(
        "--steps", type=int, default=20, help="with --shift: steps before and after a change (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> Result:
    task = Task(options.quota, options.micro_batch, options.micro_batches, options.turns, options.seconds)
    if reason := missing_cpu_quota():
        raise SystemExit(f"bench hetero: {reason}")
    return run_shift(task, options.steps) if options.shift else run_contest(task, options.peers)


def settings(task: Task) -> dict[str, Any]:
    return {
        "workers": NUM_WORKERS,
        **asdict(task),
        "model": "transformer, 4 layers, width 256",
        "parameters": sum(parameter.numel() for parameter in make_model().parameters()),
        "vocabulary": VOCABULARY,
        "length": LENGTH,
        "optimizer": "AdamW",
        "backend": "gloo",
        "threads_per_worker": 1,
    }


def run_contest(task: Task, peers: Sequence[str]) -> Result:
    skipped = {name: reason for name in peers if (reason := missing_package(*PEERS[name]))}
    taking_part = [name for name in peers if name not in skipped]
    with cpu_quota(task.cores) as quota:
        by_rank: list[Measured] = run_workers(worker, NUM_WORKERS, task, quota, taking_part)
    turns = {name: list(zip(*(own.turns[name] for own in by_rank), strict=True)) for name in by_rank[0].turns}
    result = Result.of(
        "hetero",
        "samples/s",
        {name: [samples_per_s(name, values, task) for values in by_turn] for name, by_turn in turns.items()},
        ours=OURS,
        limit=ALONE,
        better="higher",
        settings=settings(task),
        packages=("accelerate",),
        skipped=skipped,
        not_peers=(EQUAL,),
    )
    alone_by_rank = [statistics.median(own.turns[ALONE]) for own in by_rank]
    result.detail["alone_samples_per_s"] = alone_by_rank
    result.detail["whole_number_limit"] = whole_number_limit(alone_by_rank, task.num_micro_batches)
    result.detail["shares"] = by_rank[FREE_RANK].shares
    (one_worker,) = run_workers(exact_run, 1, task, "measured")
    result.detail.update(compare_exact([own.exact for own in by_rank], one_worker))
    result.notes.append(
        f"alone {' + '.join(f'{rate:.2f}' for rate in alone_by_rank)} samples/s; "
        f"whole micro-batches reach {result.detail['whole_number_limit']:.3f} of it; "
        f"last shares {by_rank[FREE_RANK].shares[-1]}"
    )
    equal = "equal those" if result.detail["exact_weights_equal"] else "DIFFER FROM those"
    result.notes.append(f"exact mode: weights with measured shares {equal} with equal shares and of one worker")
    return result


def compare_exact(by_rank: Sequence[Mapping[str, ExactRun]], one_worker: ExactRun) -> dict[str, Any]:
    """Whether all replicas of all runs ended with the same weights, the hashes and how steps were divided."""
    hashes = {name: [runs[name].weights_sha256 for runs in by_rank] for name in by_rank[0]}
    hashes["1 worker"] = [one_worker.weights_sha256]
    return {
        "exact_weights_equal": len(set(itertools.chain(*hashes.values()))) == 1,
        "exact_weights_sha256": hashes,
        "exact_shares": {name: run.shares for name, run in by_rank[0].items()},
    }


@dataclass(frozen=True)
class Trained:
    """One worker's run under a shifting quota. Times are of the machine's clock, the same for all workers."""

    alone: dict[str, list[float]]  # samples/s
    start_s: float
    ends_s: list[float]  # of its steps
    shares: list[tuple[int, ...]]


@dataclass(frozen=True)
class Phase:
    """Steps under one limit. `change` says what began it."""

    change: str
    cores: float | None


def phases(task: Task) -> list[Phase]:
    return [Phase("start", None), Phase("cut", task.cores), Phase("restored", None)]


def shift_worker(task: Task, num_steps: int, quota: CpuQuota) -> Trained:
    """Train `num_steps` in each phase; the speeds alone are taken before and after."""
    with gloo_group():
        is_free = distributed.get_rank() == FREE_RANK
        if not is_free:
            quota.add(os.getpid())

        def limit(cores: float | None) -> None:
            if is_free:  # the other might be halted at this moment
                quota.limit(cores)

        measure = isolated(partial(alone, task))

        def alone_under(cores: float | None) -> float:
            limit(cores)
            return measure()

        contestants = {limit_name(cores): partial(alone_under, cores) for cores in (None, task.cores)}
        num_turns = math.ceil(task.num_turns / 2)
        before = alternate(contestants, num_turns)
        ends_s: list[float] = []
        shares: list[tuple[int, ...]] = []
        limit(None)
        distributed.barrier()
        loop = paceline(task)
        start_s = time.monotonic()
        for phase in phases(task):
            limit(phase.cores)
            for record in itertools.islice(loop, num_steps):
                ends_s.append(time.monotonic())
                shares.append(record.shares)
        del loop
        after = alternate(contestants, num_turns)
        return Trained({name: before[name] + after[name] for name in before}, start_s, ends_s, shares)


def limit_name(cores: float | None) -> str:
    return "no limit" if cores is None else f"{cores:g} cores"


@dataclass(frozen=True)
class Step:
    """A step under a shifting quota. `relative`: its throughput, the present limit being 1."""

    step: int
    limit: str
    seconds: float
    shares: tuple[int, ...]
    relative: float


def step_table(task: Task, by_rank: Sequence[Trained], sums: Mapping[str, float], num_steps: int) -> list[Step]:
    """A step takes from the end of the one before to its own, each being that of the last worker."""
    ends_s = [max(ends) for ends in zip(*(own.ends_s for own in by_rank), strict=True)]
    seconds = [end - begin for begin, end in itertools.pairwise([max(own.start_s for own in by_rank), *ends_s])]
    limits = [limit_name(phase.cores) for phase in phases(task) for _ in range(num_steps)]
    return [
        Step(number, limit, step_s, shares, task.global_batch / step_s / sums[limit])
        for number, (limit, step_s, shares) in enumerate(
            zip(limits, seconds, by_rank[FREE_RANK].shares, strict=True), start=1
        )
    ]


@dataclass(frozen=True)
class Recovery:
    """How throughput followed a change of the limit.

    `steps`: after how many it was above the goal for the first time; None if never. `median` and `share_above` (the
    goal) are of those after the sixth. `first`: the first six.
    """

    change: str
    limit: str
    steps: int | None
    median: float
    share_above: float
    first: list[float]

    @classmethod
    def of(cls, change: str, limit: str, relative: Sequence[float]) -> Recovery:
        """From the throughput of the steps since the change."""
        later = relative[GOAL_STEPS:]
        return cls(
            change,
            limit,
            next((number for number, value in enumerate(relative, start=1) if value > GOAL), None),
            statistics.median(later),
            sum(value > GOAL for value in later) / len(later),
            list(relative[:GOAL_STEPS]),
        )


def run_shift(task: Task, num_steps: int) -> Result:
    if task.cores is None:
        raise ValueError("quota=1 is no limit, so nothing would shift: choose quota < 1")
    if num_steps <= GOAL_STEPS:
        raise ValueError(f"steps={num_steps} shows no step after the first {GOAL_STEPS}: choose more")
    with cpu_quota() as quota:
        by_rank: list[Trained] = run_workers(shift_worker, NUM_WORKERS, task, num_steps, quota)
    sums = {
        name: statistics.median(map(sum, zip(*(own.alone[name] for own in by_rank), strict=True)))
        for name in by_rank[0].alone
    }
    steps = step_table(task, by_rank, sums, num_steps)
    recoveries = []
    for number, phase in enumerate(phases(task)[1:], start=1):
        since = [step.relative for step in steps[number * num_steps : (number + 1) * num_steps]]
        recoveries.append(Recovery.of(phase.change, limit_name(phase.cores), since))
    worse = min(recoveries, key=lambda recovery: recovery.median)
    limit = sums[worse.limit]
    detail = {
        "changes": [asdict(recovery) for recovery in recoveries],
        "alone_samples_per_s": {
            name: [asdict(Spread.of(own.alone[name])) for own in by_rank] for name in by_rank[0].alone
        },
        "steps": [asdict(step) for step in steps],
        **circumstances(settings(task) | {"steps_per_phase": num_steps}),
    }
    return ShiftResult("hetero --shift", "samples/s", worse.median * limit, limit, {}, detail)
