"""Predictions of `paceline plan` against runs: everything is predicted first, then measured, in one run.

Profiles: each model is trained for some steps by one worker alone, by one worker with each quota, and by two workers
together, which shows what sharing the machine and exchanging costs. Nothing else is known to the predictions but the
speed that a link is set to. Then each combination is trained: one to four workers on two cores, quotas of 100/40 and
100/70/40, three sizes of model, links of 1 Gbit/s and 100 Mbit/s between network namespaces, all strategies, plain and
exact. `ratio` is the median of predicted over measured; the error of a combination is how far its ratio is from 1.

A machine's speed drifts: here the same passes of one worker, alone, took 73 to 93 ms within 90 seconds. No profile can
tell what a machine does at another time, so profiles are made in units of a yardstick: the same model's passes in a
bare loop on rank 0 while all others wait. It is timed before and after every turn of a profile and of a measurement;
the prediction for a turn is the profile's, in the yardstick's seconds of that turn. `raw_ratio` has the prediction in
the profile's seconds.
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
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bench.cpu_quota import CpuQuota, cpu_quota, missing_cpu_quota
from bench.harness import Result, Unavailable, circumstances
from bench.models import LanguageModel
from bench.namespaces import NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.workers import run_workers

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
YARDSTICK_S, YARDSTICK_TIMEOUT_S = 0.25, 120.0
FIRST_WARM_S, WARM_S = 1.0, 0.1  # untimed, before the first yardstick and before each


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


@dataclass(frozen=True)
class Places:
    """Where a case's workers run."""

    shares: tuple[float, ...]  # of a core, by worker
    quotas: tuple[CpuQuota | None, ...]
    link: Link | None
    barrier: Barrier

    def join(self) -> None:
        rank, size = own_rank(), int(os.environ["WORLD_SIZE"])
        if (quota := self.quotas[rank]) is not None:
            quota.add(os.getpid())
        if self.link is not None:
            local_size = size // NUM_HOSTS
            self.link.join(rank // local_size, rank % local_size, local_size)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether this is rank 0, which has a whole core to itself while all others sleep."""
        rank = own_rank()
        self.barrier.wait(YARDSTICK_TIMEOUT_S)
        if rank == 0 and (quota := self.quotas[rank]) is not None:
            quota.limit(None)
            yield True
            quota.limit(self.shares[rank])
        else:
            yield rank == 0
        self.barrier.wait(YARDSTICK_TIMEOUT_S)


def own_rank() -> int:
    return int(os.environ["RANK"])


@contextmanager
def places_of(case: Case) -> Iterator[Places]:
    with ExitStack() as stack:
        quotas = tuple(stack.enter_context(cpu_quota(quota)) if quota < 1 else None for quota in case.quotas)
        link = None if case.mbit is None else stack.enter_context(slow_link(case.mbit))
        yield Places(case.quotas, quotas, link, get_context("spawn").Barrier(len(quotas)))


class Yardstick:
    """Seconds per pass of the case's model in a bare loop on rank 0; 0.0 on the others."""

    def __init__(self, case: Case, places: Places) -> None:
        self._places = places
        self._model = make_model(case.model)
        self._batch = torch.zeros((MICRO_BATCH, LENGTH), dtype=torch.long)
        self._warmup_s = FIRST_WARM_S

    def __call__(self) -> float:
        with self._places.alone() as is_mine:
            return self._measure() if is_mine else 0.0

    def _measure(self) -> float:
        self._passes(self._warmup_s)  # memory, kernels; and a quota that was lifted
        self._warmup_s = WARM_S
        return self._passes(YARDSTICK_S)

    def _passes(self, seconds: float) -> float:
        num_passes, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            self._model(self._batch).backward()
            num_passes += 1
        return (time.perf_counter() - start) / num_passes


def profile_case(case: Case, num_steps: int, yardstick: Yardstick) -> tuple[Profile, StepTimes, float]:
    """Times are in yardsticks, whose seconds are the third result."""
    from paceline.run import probe

    found = []
    before_s = yardstick()
    for _ in range(NUM_PROFILES):
        with trainer_of(case) as trainer:
            profile, times = probe.profile(trainer.run, trainer.step_with(trainer.model), -(-num_steps // NUM_PROFILES))
        after_s = yardstick()
        found.append((times, (before_s + after_s) / 2))
        before_s = after_s
    if own_rank() != 0:
        return profile, times, 0.0
    times = mean_times([times.scaled(1 / seconds) for times, seconds in found])
    (device,) = profile.devices
    device = replace(
        device,
        micro_batch_s=times.micro_batch_s[0],
        rest_s=times.rest_s[0],
        data_s=times.data_s[0],
        spread=times.spread[0],
    )
    return replace(profile, devices=(device,)), times, statistics.fmean(seconds for _, seconds in found)


def mean_times(found: Sequence[StepTimes]) -> StepTimes:
    def mean(values: Sequence[Any]) -> Any:
        is_by_rank = isinstance(values[0], tuple)
        return tuple(map(statistics.fmean, zip(*values, strict=True))) if is_by_rank else statistics.fmean(values)

    numbers = {each.name: mean([getattr(own, each.name) for own in found]) for each in fields(found[0])}
    return replace(found[0], **numbers)


Turn = tuple[float, float]  # samples per second of all workers, and the yardstick's seconds


def measure_case(case: Case, seconds: float, yardstick: Yardstick) -> list[Turn]:
    """Turns, once shares and cadence have settled."""
    with trainer_of(case) as trainer:
        step = trainer.step_with(trainer.model)
        num_samples = 0

        def count(record: Any) -> None:
            nonlocal num_samples
            num_samples += sum(record.shares) * MICRO_BATCH

        trainer.every(1, count)

        def train(num_steps: int) -> float:
            nonlocal num_samples
            num_samples = 0
            start = time.perf_counter()
            # In one go: with averaging, replicas meet where a loop over epochs ends.
            for epoch in trainer.epochs(max_steps=trainer.position.step + num_steps):
                for batch in epoch:
                    step(batch)
            return trainer.reduce(time.perf_counter() - start, "max")

        train(SETTLING_STEPS[case.strategy])
        least = LEAST_STEPS[case.strategy]
        step_s = train(least) / least
        per_turn = max(1, round(seconds / NUM_TURNS / step_s))
        per_turn = -(-per_turn // least) * least if case.strategy == "averaging" else per_turn
        turns: list[Turn] = []
        before_s = yardstick()
        for _ in range(NUM_TURNS):
            rate = 1 / train(per_turn)
            rate, after_s = rate * num_samples, yardstick()
            turns.append((rate, (before_s + after_s) / 2))
            before_s = after_s
        return turns


def work(
    function: Callable[[Case, Any, Yardstick], T], cases: Sequence[Case], places: Places, argument: Any
) -> list[T]:
    """In a worker."""
    places.join()
    return [function(case, argument, Yardstick(case, places)) for case in cases]


def run_cases(function: Callable[[Case, Any, Yardstick], T], cases: Sequence[Case], argument: Any) -> dict[Case, T]:
    """Rank 0's results."""
    results: dict[Case, T] = {}
    for place in dict.fromkeys(case.place for case in cases):
        own = [case for case in cases if case.place == place]
        with places_of(own[0]) as places:
            found = run_workers(work, len(own[0].quotas), function, own, places, argument)[0]
        results |= dict(zip(own, found, strict=True))
    return results


def profiles_of(cases: Sequence[Case], num_steps: int) -> dict[tuple[str, bool], Known]:
    """What is measured before anything is predicted, by subject."""
    alone, pairs = dict[Case, None](), dict[Case, None]()
    for case in cases:
        model, exact = case.subject
        for quota in {*case.quotas, 1.0}:
            alone[Case(model, (quota,), PROFILE_MICRO_BATCHES, exact=exact)] = None
        pairs[Case(model, (1.0, 1.0), 2 * PROFILE_MICRO_BATCHES, exact=exact)] = None
    singles = run_cases(profile_case, list(alone), num_steps)
    together = run_cases(profile_case, list(pairs), num_steps)
    known = {}
    for pair, (_, times, _) in together.items():
        mine = {case.quotas[0]: found for case, found in singles.items() if case.subject == pair.subject}
        devices = {quota: replace(found[0].devices[0], name=f"{quota:g}") for quota, found in mine.items()}
        own, _, yardstick_s = mine[1.0]
        profile = replace(own, devices=tuple(devices.values()), counts=(1,) * len(devices))
        known[pair.subject] = Known(profile.with_company(times, [devices[1.0]] * 2), yardstick_s)
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
        return [self.predict(case, yardstick_s).samples_per_s / rate for rate, yardstick_s in turns]

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
            replace(device, micro_batch_s=factor * device.micro_batch_s, rest_s=factor * device.rest_s, host=str(rank))
            for rank, (device, factor) in enumerate(zip(devices, factors, strict=True))
        ]
        return work, slowed, Hardware(link=Link.sold_as(case.mbit * 1e6))


def run(options: argparse.Namespace) -> Result:
    for reason in (missing_cpu_quota(), missing_slow_link()):
        if reason:
            raise Unavailable(reason)
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    known = profiles_of(cases, options.steps)
    measured: dict[Case, list[Turn]] = {}
    for place in dict.fromkeys(case.place for case in cases):
        measured |= run_cases(measure_case, [case for case in cases if case.place == place], options.seconds)
        for case, turns in measured.items():
            if case.place == place:
                ratio = statistics.median(known[case.subject].ratios(case, turns))
                print(f"{case.name}: {ratio:.3f}", file=sys.stderr, flush=True)
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
    rate, yardstick_s = (statistics.median(values) for values in zip(*turns, strict=True))
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
