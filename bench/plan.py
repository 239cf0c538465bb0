"""Predictions of `paceline plan` against runs: everything is predicted first, then measured, in one run.

Profiles: each model is trained for some steps by one worker alone, by one worker with each quota, and by two workers
together, which shows what sharing the machine and exchanging costs. Nothing else is known to the predictions but the
speed that a link is set to. Then each combination is trained: one to four workers on two cores, quotas of 100/40 and
100/70/40, three sizes of model, links of 1 Gbit/s and 100 Mbit/s between network namespaces, all strategies, plain and
exact. `ratio` is the median of predicted over measured; the error of a combination is how far its ratio is from 1.

A machine's speed drifts: here the same passes of one worker, alone, took 73 to 93 ms within 90 seconds. No profile can
tell what a machine does at another time, so profiles are made in units of a yardstick: the same model's passes in a
bare loop of one process while all others wait. It is timed before every turn of a profile and of a measurement; the
prediction for a turn, made before it begins, is the profile's in the yardstick's seconds. `raw_ratio` has the
prediction in the profile's own seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bench.cpu_quota import CpuQuota, cpu_quota, missing_cpu_quota
from bench.harness import Result, Unavailable, circumstances
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
NUM_TURNS = 4  # of a measurement, of which the median counts: a burst of other work spoils one of them
NUM_PROFILES = 2
MOST_WORKERS = 4
YARDSTICK_S, WARMUP_S = 0.25, 0.1


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


@cache
def yardstick_model(name: str) -> LanguageModel:
    return make_model(name)


def yardstick(model: str) -> float:
    """In a worker: seconds per pass of the model in a bare loop."""
    module, batch = yardstick_model(model), torch.zeros((MICRO_BATCH, LENGTH), dtype=torch.long)

    def passes(seconds: float) -> float:
        num_passes, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            module(batch).backward()
            num_passes += 1
        return (time.perf_counter() - start) / num_passes

    passes(WARMUP_S)
    return passes(YARDSTICK_S)


def profile(case: Case, num_steps: int) -> tuple[Profile, StepTimes]:
    """In a worker."""
    from paceline.run import probe

    with trainer_of(case) as trainer:
        return probe.profile(trainer.run, trainer.step_with(trainer.model), num_steps)


@dataclass(frozen=True)
class Turn:
    """Samples per second of all workers, the shares and times of all in every step, and the yardstick before it."""

    rate: float
    steps: tuple[tuple[tuple[int, ...], Any], ...]
    yardstick_s: float = 1.0


def turns_of(case: Case, seconds: float) -> Iterator[Turn]:
    """Turns without a yardstick, once shares and cadence have settled."""
    with trainer_of(case) as trainer:
        step = trainer.step_with(trainer.model)
        steps: list[tuple[tuple[int, ...], Any]] = []
        trainer.every(1, lambda record: steps.append((record.shares, record.timings)))

        def train(num_steps: int) -> float:
            steps.clear()
            start = time.perf_counter()
            # In one go: with averaging, replicas meet where a loop over epochs ends.
            for epoch in trainer.epochs(max_steps=trainer.position.step + num_steps):
                for batch in epoch:
                    step(batch)
            return trainer.reduce(time.perf_counter() - start, "max")

        least = LEAST_STEPS[case.strategy]
        train(SETTLING_STEPS[case.strategy])
        num_steps = max(1, round(seconds / train(least))) * least
        while True:
            took_s = train(num_steps)
            yield Turn(sum(sum(shares) for shares, _ in steps) * MICRO_BATCH / took_s, tuple(steps))


_turns: Iterator[Turn] = iter(())  # of the combination that this worker is in


def begin_turns(case: Case, seconds: float) -> None:
    """In a worker."""
    global _turns
    _turns = turns_of(case, seconds)


def take_turn() -> Turn:
    return next(_turns)


def end_turns() -> None:
    _turns.close()  # type: ignore[attr-defined]


class Machine:
    """This one: workers beside each other, and workers on two hosts."""

    def __init__(self, local: Crew, linked: Crew, link: Link) -> None:
        self._local, self._linked, self._link = local, linked, link

    def yardstick(self, case: Case) -> float:
        return self._local.call(1, yardstick, case.model)

    def profile(self, case: Case, num_steps: int) -> tuple[Profile, StepTimes, float]:
        """Times are in yardsticks, whose seconds are the third result."""
        found = []
        for _ in range(NUM_PROFILES):
            yardstick_s = self.yardstick(case)
            with self._local.limited(case):
                own, times = self._local.call(len(case.quotas), profile, case, -(-num_steps // NUM_PROFILES))
            found.append((times, yardstick_s))
        times = mean_times([times.scaled(1 / seconds) for times, seconds in found])
        (device,) = own.devices
        device = replace(
            device,
            micro_batch_s=times.micro_batch_s[0],
            rest_s=times.rest_s[0],
            data_s=times.data_s[0],
            spread=times.spread[0],
        )
        return replace(own, devices=(device,)), times, statistics.fmean(seconds for _, seconds in found)

    def measure(self, case: Case, seconds: float) -> list[Turn]:
        crew = self._local if case.mbit is None else self._linked
        self._link.limit(case.mbit)
        num_workers, turns = len(case.quotas), []
        with crew.limited(case):
            crew.call(num_workers, begin_turns, case, seconds / NUM_TURNS)
            crew.call(num_workers, take_turn)  # settles
        for _ in range(NUM_TURNS):
            yardstick_s = self.yardstick(case)
            with crew.limited(case):
                turns.append(replace(crew.call(num_workers, take_turn), yardstick_s=yardstick_s))
        crew.call(num_workers, end_turns)
        return turns


def mean_times(found: Sequence[StepTimes]) -> StepTimes:
    def mean(values: Sequence[Any]) -> Any:
        is_by_rank = isinstance(values[0], tuple)
        return tuple(map(statistics.fmean, zip(*values, strict=True))) if is_by_rank else statistics.fmean(values)

    numbers = {each.name: mean([getattr(own, each.name) for own in found]) for each in fields(found[0])}
    return replace(found[0], **numbers)


def profiles_of(machine: Machine, cases: Sequence[Case], num_steps: int) -> dict[tuple[str, bool], Known]:
    """What is measured before anything is predicted, by subject."""
    known = {}
    for model, exact in dict.fromkeys(case.subject for case in cases):
        quotas = {1.0, *(quota for case in cases if case.subject == (model, exact) for quota in case.quotas)}
        alone = {
            quota: machine.profile(Case(model, (quota,), PROFILE_MICRO_BATCHES, exact=exact), num_steps)
            for quota in sorted(quotas)
        }
        pair = Case(model, (1.0, 1.0), 2 * PROFILE_MICRO_BATCHES, exact=exact)
        _, together, _ = machine.profile(pair, num_steps)
        devices = {quota: replace(found[0].devices[0], name=f"{quota:g}") for quota, found in alone.items()}
        own, _, yardstick_s = alone[1.0]
        combined = replace(own, devices=tuple(devices.values()), counts=(1,) * len(devices))
        known[model, exact] = Known(combined.with_company(together, [devices[1.0]] * 2), yardstick_s)
    return known


@dataclass(frozen=True)
class Known:
    """A subject's profile of this machine, with a device for each quota, in yardsticks of so many seconds then."""

    profile: Profile
    yardstick_s: float

    def predict(self, case: Case, yardstick_s: float | None = None) -> Prediction:
        from paceline.plan.predict import predict

        return predict(*self._situation(case, yardstick_s or self.yardstick_s))

    def ratios(self, case: Case, turns: Sequence[Turn]) -> list[float]:
        """Predicted over measured, of each turn."""
        return [self.predict(case, turn.yardstick_s).samples_per_s / turn.rate for turn in turns]

    def simulate(self, case: Case, yardstick_s: float) -> float | None:
        """Samples per second of the same workers in a simulated run; None with averaging, which is not simulated."""
        from paceline.run.simulation import Scenario, Simulation

        if case.strategy == "averaging":
            return None
        work, devices, hardware = self._situation(case, yardstick_s)
        noise = max(device.spread for device in devices)
        return Simulation(work, devices, Scenario(SIMULATED_S, noise), hardware).run().samples_per_s

    def _situation(self, case: Case, yardstick_s: float) -> tuple[Workload, list[Device], Hardware]:
        import paceline as pl
        from paceline.plan.predict import Averaging, Hardware, Link, Workload

        strategies: dict[str, Any] = {
            "gradients": "gradients",
            "cadence": pl.Cadence(overhead_target=0.1),
            "averaging": Averaging(every=AVERAGE_EVERY),
        }
        profile = self.profile.scaled(yardstick_s)
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


def run(options: argparse.Namespace) -> Result:
    for reason in (missing_cpu_quota(), missing_slow_link()):
        if reason:
            raise Unavailable(reason)
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    measured: dict[Case, list[Turn]] = {}
    with slow_link(None) as link, crew_of(MOST_WORKERS) as local, crew_of(NUM_HOSTS, link) as linked:
        machine = Machine(local, linked, link)
        known = profiles_of(machine, cases, options.steps)
        for case in cases:
            measured[case] = machine.measure(case, options.seconds)
            ratios = known[case.subject].ratios(case, measured[case])
            print(f"{case.name}: {statistics.median(ratios):.3f}", file=sys.stderr, flush=True)
    return summary(known, measured, options)


def summary(
    known: dict[tuple[str, bool], Known], measured: dict[Case, list[Turn]], options: argparse.Namespace
) -> Result:
    rows = {case.name: row(known[case.subject], case, turns) for case, turns in measured.items()}
    errors = [abs(each["ratio"] - 1) for each in rows.values()]
    detail = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "raw_median_error": statistics.median(abs(each["raw_ratio"] - 1) for each in rows.values()),
        "raw_worst_error": max(abs(each["raw_ratio"] - 1) for each in rows.values()),
        "cases": rows,
        "profiles": {f"{model}{' exact' * exact}": asdict(own) for (model, exact), own in known.items()},
        **circumstances({"steps": options.steps, "seconds": options.seconds, "micro_batch": MICRO_BATCH}),
    }
    ratio = statistics.median(each["ratio"] for each in rows.values())
    return PlanResult("plan", "predicted / measured", ratio, 1.0, {}, detail)


def row(known: Known, case: Case, turns: Sequence[Turn]) -> dict[str, Any]:
    rate = statistics.median(turn.rate for turn in turns)
    yardstick_s = statistics.median(turn.yardstick_s for turn in turns)
    predicted = known.predict(case, yardstick_s)
    return {
        "predicted": predicted.samples_per_s,
        "simulated": known.simulate(case, yardstick_s),
        "measured": rate,
        "ratio": statistics.median(known.ratios(case, turns)),
        "raw_ratio": known.predict(case).samples_per_s / rate,
        "yardstick": yardstick_s / known.yardstick_s,
        "limit": predicted.limit,
        "shares": predicted.shares,
        "is_in_interval": predicted.low <= rate <= predicted.high,
    }


class PlanResult(Result):
    def table(self) -> str:
        columns = ("predicted", "measured", "ratio", "raw")
        lines = [f"{'plan: samples/s':<44} " + " ".join(f"{column:>9}" for column in columns) + " limit"]
        for name, case in self.detail["cases"].items():
            figures = (
                f"{case['predicted']:>9.1f} {case['measured']:>9.1f} {case['ratio']:>9.3f} {case['raw_ratio']:>9.3f}"
            )
            lines.append(f"{name:<44} {figures} {case['limit']}")
        simulated = [
            case["simulated"] / case["measured"] for case in self.detail["cases"].values() if case["simulated"]
        ]
        inside = sum(case["is_in_interval"] for case in self.detail["cases"].values())
        lines.append(
            f"error: median {self.detail['median_error']:.1%}, worst {self.detail['worst_error']:.1%} "
            f"(raw {self.detail['raw_median_error']:.1%}, {self.detail['raw_worst_error']:.1%}); "
            f"{inside} of {len(self.detail['cases'])} inside the predicted interval; median ratio {self.ratio:.3f}"
        )
        lines.append(f"simulated over measured: {min(simulated):.3f} to {max(simulated):.3f}")
        return "\n".join([*lines, *self.footer()])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="measured for a profile (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a measurement (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="combinations whose name has a word")
