"""Predictions of `paceline plan` against runs: everything is predicted first, then measured, in one run.

Profiles: each model is trained for some steps by one worker alone, by one worker with each quota, and by two workers
together, which shows what sharing the machine and exchanging costs. Nothing else is known to the predictions but the
speed that a link is set to. Then each combination is trained: one to four workers on two cores, quotas of 100/40 and
100/70/40, three sizes of model, links of 1 Gbit/s and 100 Mbit/s between network namespaces, all strategies, plain and
exact. `ratio` is the median of predicted over measured; the error of a combination is how far its ratio is from 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
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


def trainer_of(case: Case) -> Trainer:
    import paceline as pl

    width, num_layers = MODELS[case.model]
    strategies: dict[str, Any] = {
        "gradients": "gradients",
        "cadence": pl.Cadence(overhead_target=0.1),
        "averaging": pl.Averaging(every=AVERAGE_EVERY),
    }
    size = {} if case.strategy == "cadence" else {"global_batch": case.num_micro_batches * MICRO_BATCH}
    generator = torch.Generator().manual_seed(0)
    return pl.Trainer.setup(
        partial(LanguageModel, vocabulary=VOCABULARY, length=LENGTH, width=width, num_layers=num_layers),
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

    quotas: tuple[CpuQuota | None, ...]
    link: Link | None

    def join(self) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if (quota := self.quotas[rank]) is not None:
            quota.add(os.getpid())
        if self.link is not None:
            local_size = size // NUM_HOSTS
            self.link.join(rank // local_size, rank % local_size, local_size)


@contextmanager
def places_of(case: Case) -> Iterator[Places]:
    with ExitStack() as stack:
        quotas = tuple(stack.enter_context(cpu_quota(quota)) if quota < 1 else None for quota in case.quotas)
        yield Places(quotas, None if case.mbit is None else stack.enter_context(slow_link(case.mbit)))


def profile_case(case: Case, num_steps: int) -> tuple[Profile, StepTimes]:
    from paceline.run import probe

    with trainer_of(case) as trainer:
        return probe.profile(trainer.run, trainer.step_with(trainer.model), num_steps)


def measure_case(case: Case, seconds: float) -> float:
    """Samples per second of all workers, once shares and cadence have settled."""
    with trainer_of(case) as trainer:
        step = trainer.step_with(trainer.model)
        num_samples = 0

        def count(record: Any) -> None:
            nonlocal num_samples
            num_samples += sum(record.shares) * MICRO_BATCH

        trainer.every(1, count)

        def train(num_steps: int) -> tuple[float, float]:
            nonlocal num_samples
            num_samples = 0
            start = time.perf_counter()
            # In one go: with averaging, replicas meet where a loop over epochs ends.
            for epoch in trainer.epochs(max_steps=trainer.position.step + num_steps):
                for batch in epoch:
                    step(batch)
            return trainer.reduce(time.perf_counter() - start, "max"), num_samples

        train(SETTLING_STEPS[case.strategy])
        least = LEAST_STEPS[case.strategy]
        step_s = train(least)[0] / least
        per_turn = max(1, round(seconds / NUM_TURNS / step_s))
        per_turn = -(-per_turn // least) * least if case.strategy == "averaging" else per_turn
        turns = [train(per_turn) for _ in range(NUM_TURNS)]
        return statistics.median(trained / took_s for took_s, trained in turns)


def work(function: Callable[[Case, Any], T], cases: Sequence[Case], places: Places, argument: Any) -> list[T]:
    """In a worker."""
    places.join()
    return [function(case, argument) for case in cases]


def run_cases(function: Callable[[Case, Any], T], cases: Sequence[Case], argument: Any) -> dict[Case, T]:
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
    for pair, (_, times) in together.items():
        own = {case.quotas[0]: profile for case, (profile, _) in singles.items() if case.subject == pair.subject}
        devices = {quota: replace(profile.devices[0], name=f"{quota:g}") for quota, profile in own.items()}
        profile = replace(own[1.0], devices=tuple(devices.values()), counts=(1,) * len(devices))
        known[pair.subject] = Known(profile.with_company(times, [devices[1.0]] * 2))
    return known


@dataclass(frozen=True)
class Known:
    """A subject's profile of this machine, with a device for each quota."""

    profile: Profile

    def predict(self, case: Case) -> Prediction:
        from paceline.plan.predict import predict

        return predict(*self._situation(case))

    def simulate(self, case: Case) -> float | None:
        """Samples per second of the same workers in a simulated run; None with averaging, which is not simulated."""
        from paceline.run.simulation import Scenario, Simulation

        if case.strategy == "averaging":
            return None
        work, devices, hardware = self._situation(case)
        noise = max(device.spread for device in devices)
        return Simulation(work, devices, Scenario(SIMULATED_S, noise), hardware).run().samples_per_s

    def _situation(self, case: Case) -> tuple[Workload, list[Device], Hardware]:
        import paceline as pl
        from paceline.plan.predict import Averaging, Hardware, Link, Workload

        strategies: dict[str, Any] = {
            "gradients": "gradients",
            "cadence": pl.Cadence(overhead_target=0.1),
            "averaging": Averaging(every=AVERAGE_EVERY),
        }
        num_bytes, host = self.profile.subject.gradient_bytes, self.profile.as_host
        work = Workload(case.num_micro_batches, MICRO_BATCH, num_bytes, strategy=strategies[case.strategy])
        devices = [self.profile.device(f"{quota:g}") for quota in case.quotas]
        if case.mbit is None:
            return work, devices, Hardware({self.profile.host: host})
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
    predicted = {case: known[case.subject].predict(case) for case in cases}
    measured: dict[Case, float] = {}
    for place in dict.fromkeys(case.place for case in cases):
        measured |= run_cases(measure_case, [case for case in cases if case.place == place], options.seconds)
        for case, rate in measured.items():
            if case.place == place:
                print(f"{case.name}: {predicted[case].samples_per_s / rate:.3f}", file=sys.stderr, flush=True)
    return summary(known, predicted, measured, options)


def summary(
    known: dict[tuple[str, bool], Known],
    predicted: dict[Case, Prediction],
    measured: dict[Case, float],
    options: argparse.Namespace,
) -> Result:
    ratios = {case: predicted[case].samples_per_s / measured[case] for case in predicted}
    errors = [abs(ratio - 1) for ratio in ratios.values()]
    detail = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "cases": {
            case.name: {
                "predicted": predicted[case].samples_per_s,
                "simulated": known[case.subject].simulate(case),
                "measured": measured[case],
                "ratio": ratios[case],
                "limit": predicted[case].limit,
                "shares": predicted[case].shares,
                "is_in_interval": predicted[case].low <= measured[case] <= predicted[case].high,
            }
            for case in predicted
        },
        "profiles": {f"{model}{' exact' * exact}": asdict(own.profile) for (model, exact), own in known.items()},
        **circumstances({"steps": options.steps, "seconds": options.seconds, "micro_batch": MICRO_BATCH}),
    }
    return PlanResult("plan", "predicted / measured", statistics.median(ratios.values()), 1.0, {}, detail)


class PlanResult(Result):
    def table(self) -> str:
        lines = [f"{'plan: samples/s':<44} {'predicted':>9} {'measured':>9} {'ratio':>7} limit"]
        for name, case in self.detail["cases"].items():
            figures = f"{case['predicted']:>9.1f} {case['measured']:>9.1f} {case['ratio']:>7.3f}"
            lines.append(f"{name:<44} {figures} {case['limit']}")
        simulated = [
            case["simulated"] / case["measured"] for case in self.detail["cases"].values() if case["simulated"]
        ]
        inside = sum(case["is_in_interval"] for case in self.detail["cases"].values())
        lines.append(
            f"error: median {self.detail['median_error']:.1%}, worst {self.detail['worst_error']:.1%}; "
            f"{inside} of {len(self.detail['cases'])} inside the predicted interval; median ratio {self.ratio:.3f}"
        )
        lines.append(f"simulated over measured: {min(simulated):.3f} to {max(simulated):.3f}")
        return "\n".join([*lines, *self.footer()])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="measured for a profile (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a measurement (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="combinations whose name has a word")
