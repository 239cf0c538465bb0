"""Simulates a run of any size with the real planner and membership, without processes.

Time is simulated: a worker's micro-batch takes its device's predicted time, with noise. The planner plans every step
from these times, and generations are decided as in agents.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, cast

import numpy as np

from paceline.core.timing import Timing
from paceline.plan.cadence import Cadence
from paceline.plan.predict import Device, Hardware, Workload, predict
from paceline.plan.shares import Plan, sizes
from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.roster import Report, next_generation
from paceline.run.step.planner import CadencePlanner, MeasuringPlanner, Planner
from paceline.sync.numbers import Numbers

# The time from when all survivors wait in the exchange until they repeat the step, measured by `bench survive` with
# very short steps. Survivors notice a death in the exchange.
RECOVERY_S = 0.045
# The cost, for the other workers, of a change of workers between two steps.
CHANGE_S = 0.1
# A run has recovered at this part of the speed of the recent steps, less the lost worker's.
_RECOVERED, _RECENT_STEPS = 0.95, 20
_KNOWN_DELAY_STEPS = 5  # in which workers report the rest of a step, which does not change

Event = tuple[float, int, Literal["die", "leave", "join"]]  # when, which worker, what


@dataclass(frozen=True)
class Scenario:
    """What happens during a run.

    noise: relative standard deviation of a step's times. failures_per_hour: mean deaths per worker.
    replace_after_s: seconds until a dead worker's replacement joins; None: never. trace: further events, by time.
    """

    duration_s: float
    noise: float = 0.03
    failures_per_hour: float = 0.0
    replace_after_s: float | None = None
    trace: Sequence[Event] = ()
    seed: int = 0


@dataclass
class Outcome:
    """The result. wasted_s: worker-seconds of abandoned steps. recoveries_s: from a death to the end of the first step
    at the survivors' full speed. size_by_step and samples_per_s_by_step: of every completed step."""

    num_workers: int
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    busy_s: float = 0.0
    wasted_s: float = 0.0
    deaths: int = 0
    joins: int = 0
    leaves: int = 0
    generations: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    size_by_step: list[int] = field(default_factory=list)
    samples_per_s_by_step: list[float] = field(default_factory=list)
    last_shares: tuple[int, ...] = ()

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        recoveries = self.recoveries_s
        return {
            "workers": self.num_workers,
            "seconds": self.seconds,
            "steps": self.steps,
            "samples_per_s": self.samples_per_s,
            "wasted": self.wasted_s / (self.busy_s + self.wasted_s) if self.busy_s else 0.0,
            "deaths": self.deaths,
            "leaves": self.leaves,
            "joins": self.joins,
            "generations": self.generations,
            "recovery_s": statistics.median_high(recoveries) if recoveries else None,
            "longest_recovery_s": max(recoveries, default=None),
            "least_workers": min(self.size_by_step, default=0),
            "least_share": min(self.last_shares, default=0),
            "largest_share": max(self.last_shares, default=0),
        }


_Place = tuple[int, int]  # node and slot


class _Times:
    """The part of a step's numbers that planners read, computed on demand: they skip many short steps."""

    def __init__(self, micro_batch_s: np.ndarray, exchange_s: float, rest_s: np.ndarray) -> None:
        self._readings = micro_batch_s, exchange_s, rest_s

    @property
    def timings(self) -> list[Timing]:
        micro_batch_s, exchange_s, rest_s = self._readings
        readings = zip(micro_batch_s.tolist(), repeat(exchange_s), rest_s.tolist(), repeat(0.0), repeat(0.0))
        return list(map(tuple.__new__, repeat(Timing), readings))  # `Timing._make` without a call in Python


class Simulation:
    """One run. `workload.strategy` is "gradients" or a `Cadence`; averaging is not simulated."""

    def __init__(
        self, workload: Workload, devices: Sequence[Device], scenario: Scenario, hardware: Hardware | None = None
    ) -> None:
        if not (isinstance(workload.strategy, Cadence) or workload.strategy == "gradients"):
            raise ValueError("a simulation needs strategy 'gradients' or a cadence: averaging is not simulated")
        self._workload, self._scenario, self._hardware = workload, scenario, hardware or Hardware()
        self._random = np.random.default_rng(scenario.seed)
        nodes: dict[str, int] = {}
        num_workers = Counter[int]()  # by node
        self._places: list[_Place] = []  # by number of the worker in a trace
        for device in devices:
            node = nodes.setdefault(device.host, len(nodes))
            self._places.append((node, num_workers[node]))
            num_workers[node] += 1
        self._device_of = dict(zip(self._places, devices, strict=True))
        self._generation = Generation.first(num_workers)
        self._starts = dict.fromkeys(self._places, 0)
        self._planner = self._new_planner(len(devices))
        self._deaths: list[tuple[float, int, _Place, int | None]] = []  # of that start; None: of whoever is there
        self._changes: list[tuple[float, int, _Place, str]] = []
        self._num_events = 0
        self._waiting: set[Member] = set()
        self._outcome = Outcome(len(devices))
        self._now = 0.0
        self._lost_at: float | None = None
        self._prepare()
        for place in self._places:
            self._schedule_death(place)
        for at_s, worker, what in scenario.trace:
            if not 0 <= worker < len(devices):
                raise ValueError(f"the trace names worker {worker}: there are {len(devices)}, counted from 0")
            self._push(at_s, self._places[worker], what)

    def run(self) -> Outcome:
        outcome = self._outcome
        while self._now < self._scenario.duration_s:
            self._change_between_steps()
            if not self._generation.members:
                break
            self._step()
        outcome.seconds = self._now
        return outcome

    def _step(self) -> None:
        plan = self._planner.plan(1 << 40)
        counts = np.array(sizes(plan))
        noise = 1 + self._scenario.noise * self._random.standard_normal(len(counts))
        micro_batch_s = self._micro_batch_s * np.maximum(noise, 0.2)
        compute_s = counts * micro_batch_s
        took_s = float((compute_s + self._rest_s).max()) + self._exchange_s
        if (death_s := self._next_death(self._now + took_s)) is not None:
            self._lose(death_s, compute_s)
            return
        self._now += took_s
        self._complete(plan, np.where(counts, micro_batch_s, 0.0), took_s, float(compute_s.sum()))

    def _complete(self, plan: Plan, micro_batch_s: np.ndarray, took_s: float, busy_s: float) -> None:
        outcome, rest_s = self._outcome, self._rest_s * (self._num_known < _KNOWN_DELAY_STEPS)
        self._num_known += 1
        num_samples = plan[-1].stop * self._workload.micro_batch
        outcome.steps += 1
        outcome.samples += num_samples
        outcome.busy_s += busy_s
        outcome.size_by_step.append(len(plan))
        outcome.samples_per_s_by_step.append(num_samples / took_s)
        outcome.last_shares = sizes(plan)
        self._planner.observe(plan, cast("Numbers", _Times(micro_batch_s, self._exchange_s, rest_s)))
        if self._lost_at is not None and num_samples / took_s >= _RECOVERED * self._target:
            outcome.recoveries_s.append(self._now - self._lost_at)
            self._lost_at = None

    def _lose(self, death_s: float, compute_s: np.ndarray) -> None:
        """Survivors compute their shares of the step, notice the death in the exchange, and repeat the step."""
        _, _, place, _ = heapq.heappop(self._deaths)
        member = self._member_at(place)
        assert member is not None, "_next_death found it"
        rank = self._generation.members.index(member)
        done_s = max(death_s - self._now, 0.0)
        left_s = np.delete(np.maximum(compute_s - done_s, 0.0), rank)
        self._outcome.wasted_s += float(np.minimum(compute_s, done_s).sum())
        self._outcome.deaths += 1
        before, before_s = self._full_speed, np.delete(self._micro_batch_s, rank)
        self._enter(lost={member: "died"})
        if self._generation.members:  # workers that shared cores with the lost one are faster now
            left_s *= self._micro_batch_s / before_s
        self._outcome.wasted_s += float(left_s.sum())
        self._now = max(death_s, self._now) + float(left_s.max(initial=0.0)) + RECOVERY_S
        if self._lost_at is None:
            # Noise makes steps longer than predicted, with more workers more so: compare with recent steps.
            recent = self._outcome.samples_per_s_by_step[-_RECENT_STEPS:] or [before]
            self._lost_at, self._target = death_s, statistics.median(recent) * self._full_speed / before
        if self._scenario.replace_after_s is not None:
            self._push(death_s + self._scenario.replace_after_s, place, "join")

    def _change_between_steps(self) -> None:
        """Let workers join and leave that are due."""
        leaving: dict[Member, str] = {}
        while self._changes and self._changes[0][0] <= self._now:
            _, _, place, what = heapq.heappop(self._changes)
            member = self._member_at(place)
            if what == "leave" and member is not None:
                leaving[member] = "preempted"
            elif what == "join" and member is None:
                self._starts[place] += 1
                self._waiting.add(Member(*place, self._starts[place]))
                self._schedule_death(place)
        if leaving or self._waiting:
            self._now += CHANGE_S
            self._enter(leaving=leaving)

    def _enter(self, lost: Mapping[Member, str] | None = None, leaving: Mapping[Member, str] | None = None) -> None:
        """Enter the next generation, decided from the reports that the agents would make."""
        before = self._generation
        entered = {member: before.number for member in before.members if member not in (lost or {})}
        report = Report(lost or {}, leaving or {}, frozenset() if lost else frozenset(self._waiting), entered)
        after = next_generation(before, {0: report})
        if after is None:
            return
        self._outcome.generations += 1
        self._outcome.joins += len(after.joined)
        self._outcome.leaves += 0 if after.is_urgent else len(after.left)
        self._waiting -= after.joined
        self._generation, self._members = after, frozenset(after.members)
        if after.members:
            known = self._planner.handover()
            self._planner.regroup(known, after.previous_ranks(before))
            self._prepare()

    def _prepare(self) -> None:
        """Predict the current workers' times, by rank, their exchange, and their speed."""
        self._members = frozenset(self._generation.members)
        devices = [self._device_of[member.node, member.slot] for member in self._generation.members]
        predicted = predict(self._workload, devices, self._hardware)
        slowed = predicted.slowed
        self._micro_batch_s = np.array([device.micro_batch_s for device in slowed])
        self._rest_s = np.array([device.rest_s for device in slowed])
        self._exchange_s = predicted.parts["exchange"]
        self._full_speed = predicted.samples_per_s
        self._num_known = 0

    def _new_planner(self, num_workers: int) -> Planner:
        strategy, count = self._workload.strategy, self._workload.num_micro_batches
        if isinstance(strategy, Cadence):
            return CadencePlanner(strategy.for_workers(num_workers), strategy.max_batches(num_workers))
        return MeasuringPlanner(count, num_workers)

    def _schedule_death(self, place: _Place) -> None:
        if self._scenario.failures_per_hour > 0:
            mean_s = 3600 / self._scenario.failures_per_hour
            self._push(self._now + float(self._random.exponential(mean_s)), place, "die", self._starts[place])

    def _push(self, at_s: float, place: _Place, what: str, start: int | None = None) -> None:
        self._num_events += 1
        if what == "die":
            heapq.heappush(self._deaths, (at_s, self._num_events, place, start))
        else:
            heapq.heappush(self._changes, (at_s, self._num_events, place, what))

    def _next_death(self, until_s: float) -> float | None:
        """When the next member dies before that time. Deaths of workers that are away by then do not happen."""
        while self._deaths and self._deaths[0][0] < until_s:
            at_s, _, place, start = self._deaths[0]
            if self._member_at(place) is not None and start in (None, self._starts[place]):
                return at_s
            heapq.heappop(self._deaths)
        return None

    def _member_at(self, place: _Place) -> Member | None:
        member = Member(*place, self._starts[place])
        return member if member in self._members else None
