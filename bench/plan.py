"""Predictions of `paceline plan` against runs: everything is predicted first, then measured, in one run.

Profiles: each model is trained for some steps by one worker alone, by one worker with each quota, and by two workers
together, which shows what sharing the machine and exchanging costs. Nothing else is known to the predictions but the
speed that a link is set to. Then each combination is trained: one to four workers on two cores, quotas of 100/40 and
100/70/40, three sizes of model, links of 1 Gbit/s and 100 Mbit/s between network namespaces, all strategies, plain and
exact. `ratio` is the median of predicted over measured; the error of a combination is how far its ratio is from 1.

A machine's speed drifts: here the same passes of one worker on an idle core take 24 to 34 ms, for seconds or minutes at
a time. So there are rounds, in which all take turns: a model is profiled, its combinations are predicted from this
profile alone, and each of them is trained for a second. The ratio of a combination is the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bench.cpu_quota import CpuQuota, cpu_quota, missing_cpu_quota
from bench.harness import Result, Unavailable, circumstances, isolated
from bench.models import LanguageModel
from bench.namespaces import NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.workers import Worker, results_of, working

if TYPE_CHECKING:
    from paceline import Trainer
    from paceline.plan.predict import Device, Hardware, Prediction, Workload
    from paceline.plan.profile import Profile, StepTimes

T = TypeVar("T")

VOCABULARY, LENGTH = 1000, 64
MICRO_BATCH = 4
MODELS = {"small": (64, 2), "medium": (128, 4), "large": (256, 4)}  # width and layers of a transformer
AVERAGE_EVERY = 8
PROFILE_MICRO_BATCHES = 8  # per worker
SETTLING_STEPS = {"gradients": 5, "averaging": AVERAGE_EVERY, "cadence": 4}
LEAST_STEPS = {"gradients": 1, "averaging": AVERAGE_EVERY, "cadence": 1}
SIMULATED_S = 600.0
NORMAL = 1.4826  # a normal distribution's standard deviation over half of its interquartile range
MOST_WORKERS = 4


@dataclass(frozen=True)
class Case:
    """quotas: of a core, by worker. mbit: of the link between two hosts, which have half of the workers each."""

    model: str
    quotas: tuple[float, ...] = (1.0,)
    num_micro_batches: int = 32
    strategy: str = "gradients"
    mbit: float | None = None
    exact: bool = False

    @property
    def name(self) -> str:
        workers = "/".join(f"{100 * quota:.0f}" for quota in self.quotas)
        link = f", {self.mbit:g} Mbit/s" if self.mbit else ""
        return f"{self.model}, {workers}{link}, {self.strategy}{', exact' if self.exact else ''}"

    @property
    def subject(self) -> tuple[str, bool]:
        return self.model, self.exact

    @property
    def place(self) -> tuple[tuple[float, ...], float | None]:
        """Cases of one place are run by the same processes, one after the other."""
        return self.quotas, self.mbit


CASES = (
    Case("small", (1, 1)),
    Case("large", (1,), 16),
    Case("large", (1, 1), 16),
    Case("medium", (1, 1)),
    Case("medium", (1, 1, 1)),
    Case("medium", (1, 1, 1, 1)),
    Case("medium", (1, 0.4), 64),  # longer steps: a quota is enforced in periods of 100 ms
    Case("medium", (1, 0.7, 0.4), 64),
    Case("medium", (1, 1), exact=True),
    Case("medium", (1, 1), mbit=1000),
    Case("large", (1, 1), 16, mbit=1000),
    Case("medium", (1, 1), mbit=100),
    Case("medium", (1, 1), 8, mbit=100, strategy="averaging"),
    Case("medium", (1, 1), mbit=100, strategy="cadence"),
)


def make_model(name: str) -> LanguageModel:
    width, num_layers = MODELS[name]
    return LanguageModel(vocabulary=VOCABULARY, length=LENGTH, width=width, num_layers=num_layers)


def trainer_of(case: Case) -> Trainer:
    import paceline as pl

    strategies: dict[str, Any] = {
        "gradients": "gradients",
        "cadence": pl.Cadence(overhead_target=0.1),
        "averaging": pl.Averaging(every=AVERAGE_EVERY),
    }
    size = {} if case.strategy == "cadence" else {"global_batch": case.num_micro_batches * MICRO_BATCH}
    generator = torch.Generator().manual_seed(0)
    return pl.Trainer.setup(
        partial(make_model, case.model),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=torch.randint(VOCABULARY, (1 << 14, LENGTH), generator=generator),
        micro_batch=MICRO_BATCH,
        strategy=strategies[case.strategy],
        exact=case.exact,
        runtime=pl.Runtime(threads=1, quiet=True),
        **size,
    )


class Crew:
    """Worker processes that stay for all combinations: a call runs on the first so many of them."""

    def __init__(self, quotas: Sequence[CpuQuota], pipes: Sequence[Connection], workers: Sequence[Worker]) -> None:
        self._quotas, self._pipes, self._workers = quotas, pipes, workers

    def call(self, num_workers: int, function: Callable[..., T], *arguments: Any) -> T:
        """Rank 0's result."""
        pipes = self._pipes[:num_workers]
        for pipe in pipes:
            pipe.send((num_workers, function, arguments))
        for pipe, worker in zip(pipes, self._workers, strict=False):
            if pipe not in wait([pipe, worker.result]):
                results_of([worker])  # raises its error
        results: list[T] = [pipe.recv() for pipe in pipes]
        return results[0]

    @contextmanager
    def limited(self, case: Case) -> Iterator[None]:
        for quota, cores in zip(self._quotas, case.quotas, strict=False):
            quota.limit(cores if cores < 1 else None)
        yield
        for quota in self._quotas:
            quota.limit(None)


@contextmanager
def crew_of(num_workers: int, link: Link | None = None) -> Iterator[Crew]:
    with ExitStack() as stack:
        quotas = [stack.enter_context(cpu_quota()) for _ in range(num_workers)]
        pipes = [get_context("spawn").Pipe() for _ in range(num_workers)]
        arguments = (quotas, [inner for _, inner in pipes], link)
        workers = stack.enter_context(working(serve, num_workers, *arguments))
        yield Crew(quotas, [outer for outer, _ in pipes], workers)
        for outer, _ in pipes:
            outer.send(None)


def serve(quotas: Sequence[CpuQuota], pipes: Sequence[Connection], link: Link | None) -> None:
    """In a worker: does what it is told until it is told to end."""
    rank = int(os.environ["RANK"])
    quotas[rank].add(os.getpid())
    if link is not None:
        link.join(rank)
    while (call := pipes[rank].recv()) is not None:
        num_workers, function, arguments = call
        if link is None:
            os.environ.update(WORLD_SIZE=str(num_workers), LOCAL_WORLD_SIZE=str(num_workers))
        pipes[rank].send(function(*arguments))
    _running.clear()  # their trainers are closed


@dataclass(frozen=True)
class Turn:
    """Samples per second of all workers, and the parts of a mean step in seconds.

    compute and exchange: of whoever is last in a step; rest: the longest.
    """

    rate: float
    parts: dict[str, float]


def profiles(case: Case, num_steps: int) -> Iterator[tuple[Profile, StepTimes] | None]:
    """In a worker, in every turn; first of all it settles."""
    from paceline.run import probe

    with trainer_of(case) as trainer:
        yield None
        while True:
            yield probe.profile(trainer.run, trainer.step_with(trainer.model), num_steps)


def measurements(case: Case, seconds: float) -> Iterator[Turn | None]:
    """In a worker, in every turn; first of all shares and cadence settle."""
    with trainer_of(case) as trainer:
        step = trainer.step_with(trainer.model)
        records: list[Any] = []
        trainer.every(1, records.append)

        def train(num_steps: int) -> float:
            records.clear()
            start = time.perf_counter()
            # In one go: with averaging, replicas meet where a loop over epochs ends.
            for epoch in trainer.epochs(max_steps=trainer.position.step + num_steps):
                for batch in epoch:
                    step(batch)
            return trainer.reduce(time.perf_counter() - start, "max")

        least = LEAST_STEPS[case.strategy]
        train(SETTLING_STEPS[case.strategy])
        num_steps = max(1, round(seconds / train(least))) * least
        yield None
        while True:
            rate = MICRO_BATCH / train(num_steps)
            yield Turn(rate * sum(sum(record.shares) for record in records), mean_parts(records))


def mean_parts(records: Sequence[Any]) -> dict[str, float]:
    timed = [(record.shares, record.timings) for record in records if any(own.micro_batch for own in record.timings)]
    parts = {
        "compute": [max(n * own.micro_batch for n, own in zip(*step, strict=True)) for step in timed],
        "exchange": [min(own.sync for own in timings) for _, timings in timed],
        "rest": [max(own.rest for own in timings) for _, timings in timed],
    }
    return {name: statistics.fmean(seconds) for name, seconds in parts.items() if seconds}


_running: dict[Any, Callable[[], Any]] = {}  # in a worker: what it takes turns with


def take_turn(work: Callable[..., Iterator[Any]], *arguments: Any) -> Any:
    """In a worker: the next result of a generator that goes on from turn to turn, with torch settings of its own."""
    if (key := (work, arguments)) not in _running:

        def begin() -> Callable[[], Any]:
            results = work(*arguments)
            next(results)
            return partial(next, results)

        _running[key] = isolated(begin)
    return _running[key]()


class Machine:
    """This one: workers beside each other, and workers on two hosts."""

    def __init__(self, local: Crew, linked: Crew, link: Link) -> None:
        self._local, self._linked, self._link = local, linked, link

    def profile(self, case: Case, num_steps: int) -> tuple[Profile, StepTimes]:
        with self._local.limited(case):
            found: tuple[Profile, StepTimes] = self._local.call(len(case.quotas), take_turn, profiles, case, num_steps)
        return found

    def measure(self, case: Case, seconds: float) -> Turn:
        crew = self._local if case.mbit is None else self._linked
        self._link.limit(case.mbit)
        with crew.limited(case):
            turn: Turn = crew.call(len(case.quotas), take_turn, measurements, case, seconds)
        return turn


def profile_of(machine: Machine, cases: Sequence[Case], num_steps: int) -> Profile:
    """What is measured of a model before its combinations are predicted: this machine, with a device for each quota."""
    model, exact = cases[0].subject
    devices: dict[float, Device] = {}
    for quota in sorted({1.0, *(quota for case in cases for quota in case.quotas)}):
        own, _ = machine.profile(Case(model, (quota,), PROFILE_MICRO_BATCHES, exact=exact), num_steps)
        devices[quota] = replace(own.devices[0], name=f"{quota:g}")
    _, together = machine.profile(Case(model, (1.0, 1.0), 2 * PROFILE_MICRO_BATCHES, exact=exact), num_steps)
    found = replace(own, devices=tuple(devices.values()), counts=(1,) * len(devices))
    return found.with_company(together, [devices[1.0]] * 2)


def situation(profile: Profile, case: Case) -> tuple[Workload, list[Device], Hardware]:
    import paceline as pl
    from paceline.plan.predict import Averaging, Hardware, Link, Workload

    strategies: dict[str, Any] = {
        "gradients": "gradients",
        "cadence": pl.Cadence(overhead_target=0.1),
        "averaging": Averaging(every=AVERAGE_EVERY),
    }
    num_bytes, host = profile.subject.gradient_bytes, profile.as_host
    work = Workload(case.num_micro_batches, MICRO_BATCH, num_bytes, strategy=strategies[case.strategy])
    devices = [profile.device(f"{quota:g}") for quota in case.quotas]
    if case.mbit is None:
        return work, devices, Hardware({profile.host: host})
    # Two namespaces are two hosts, whose workers share one machine's cores.
    factors = host.slowdowns([device.cores for device in devices])
    slowed = [
        replace(device.slowed(factor), host=str(rank))
        for rank, (device, factor) in enumerate(zip(devices, factors, strict=True))
    ]
    return work, slowed, Hardware(link=Link.sold_as(case.mbit * 1e6))


@dataclass(frozen=True)
class Round:
    """A combination as predicted, and as measured afterwards."""

    predicted: Prediction
    simulated: float
    measured: Turn

    @property
    def ratio(self) -> float:
        return self.predicted.samples_per_s / self.measured.rate


def simulate(profile: Profile, case: Case) -> float:
    """Samples per second of the same workers in a simulated run; 0.0 with averaging, which is not simulated."""
    from paceline.run.simulation import Scenario, Simulation

    if case.strategy == "averaging":
        return 0.0
    work, devices, hardware = situation(profile, case)
    noise = NORMAL * statistics.fmean(device.spread for device in devices)
    return Simulation(work, devices, Scenario(SIMULATED_S, noise), hardware).run().samples_per_s


def run(options: argparse.Namespace) -> Result:
    for reason in (missing_cpu_quota(), missing_slow_link()):
        if reason:
            raise Unavailable(reason)
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    with slow_link(None) as link, crew_of(MOST_WORKERS) as local, crew_of(NUM_HOSTS, link) as linked:
        machine = Machine(local, linked, link)
        for number in range(options.rounds):
            for subject in dict.fromkeys(case.subject for case in cases):
                take_round(machine, [case for case in cases if case.subject == subject], found, options)
            ratios = [statistics.median(each.ratio for each in own) for own in found.values()]
            text = " ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"round {number + 1} of {options.rounds}: {text}", file=sys.stderr, flush=True)
    return summary(found, options)


def take_round(
    machine: Machine, cases: Sequence[Case], found: dict[Case, list[Round]], options: argparse.Namespace
) -> None:
    """Profile a model, predict all of its combinations, and only then measure them."""
    from paceline.plan.predict import predict

    profile = profile_of(machine, cases, options.steps)
    predicted = {case: (predict(*situation(profile, case)), simulate(profile, case)) for case in cases}
    for case in cases:
        found[case].append(Round(*predicted[case], machine.measure(case, options.seconds)))


def summary(found: dict[Case, list[Round]], options: argparse.Namespace) -> Result:
    rows = {case.name: row(rounds) for case, rounds in found.items()}
    errors = [abs(each["ratio"] - 1) for each in rows.values()]
    detail = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "cases": rows,
        **circumstances(
            {name: getattr(options, name) for name in ("rounds", "steps", "seconds")} | {"micro_batch": MICRO_BATCH}
        ),
    }
    ratio = statistics.median(each["ratio"] for each in rows.values())
    return PlanResult("plan", "predicted / measured", ratio, 1.0, {}, detail)


def row(rounds: Sequence[Round]) -> dict[str, Any]:
    median = statistics.median
    last = rounds[-1].predicted
    return {
        "predicted": median(each.predicted.samples_per_s for each in rounds),
        "measured": median(each.measured.rate for each in rounds),
        "ratio": median(each.ratio for each in rounds),
        "ratio_by_round": [each.ratio for each in rounds],
        "simulated": median(each.simulated / each.measured.rate for each in rounds) if rounds[-1].simulated else None,
        "predicted_parts": median_parts([each.predicted.parts for each in rounds]),
        "measured_parts": median_parts([each.measured.parts for each in rounds]),
        "limit": last.limit,
        "shares": last.shares,
        "in_interval": statistics.fmean(
            each.predicted.low <= each.measured.rate <= each.predicted.high for each in rounds
        ),
    }


def median_parts(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(parts[name] for parts in rounds) for name in rounds[0]}


class PlanResult(Result):
    def table(self) -> str:
        columns = ("predicted", "measured", "ratio", "simulated")
        lines = [f"{'plan: samples/s':<44} " + " ".join(f"{column:>9}" for column in columns) + " limit"]
        cases = self.detail["cases"]
        for name, case in cases.items():
            simulated = "-" if case["simulated"] is None else f"{case['simulated']:.3f}"
            figures = f"{case['predicted']:>9.1f} {case['measured']:>9.1f} {case['ratio']:>9.3f} {simulated:>9}"
            lines.append(f"{name:<44} {figures} {case['limit']}")
        inside = statistics.fmean(case["in_interval"] for case in cases.values())
        lines.append(
            f"error: median {self.detail['median_error']:.1%}, worst {self.detail['worst_error']:.1%}; "
            f"{inside:.0%} of the rounds inside the predicted interval; median ratio {self.ratio:.3f}"
        )
        return "\n".join([*lines, *self.footer()])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="of profiles and measurements (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured for a profile, at least (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.2, help="of a measurement (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="combinations whose name has a word")
