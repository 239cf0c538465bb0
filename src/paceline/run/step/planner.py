"""Which worker takes which micro-batches of the next step: fixed shares, or shares that follow measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.deferred import DeferredReader
from paceline.core.timing import split_sync
from paceline.core.world import World
from paceline.plan.balance import TURN, Balancer
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.shares import Plan, ranges, shares
from paceline.run.config import RunConfig
from paceline.sync.averaging.strategy import Averaging
from paceline.sync.numbers import Numbers

# Numbers from a GPU are read this many steps late, so that the host does not wait for the device.
GPU_LAG_STEPS = 2
# Of shorter steps only some are used: updating the speeds takes a third of a small model's step.
OBSERVE_EVERY_S = 0.01
# And of many workers' steps: planning takes a microsecond or two per worker, which is to be 1% of the time at most.
OBSERVE_EVERY_S_PER_WORKER = 1.5e-4
MAX_UNSEEN = 100  # steps in a row that are not used


class Planner:
    """Computes the same plan on every worker: it uses only numbers that all of them have."""

    def plan(self, num_left: int) -> Plan:
        """The micro-batches of the next step, by rank. num_left: micro-batches left in the epoch."""
        raise NotImplementedError

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        """Learn from a completed step's numbers. Called for every step, in order."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned about the workers, for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned in a world of the same size."""

    def handover(self) -> dict[str, Any]:
        """What a worker that joins must know to plan as this one does."""
        return self.state_dict()

    def regroup(self, known: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        """Plan for other workers from now on. known: `handover` of a planner for the workers before.

        previous_ranks: by rank, the rank among the workers before; None for a new worker.
        """
        raise NotImplementedError


class FixedPlanner(Planner):
    """The same proportions in every step."""

    def __init__(self, step_size: int, speeds: Sequence[float]) -> None:
        self._step_size = step_size
        self._speeds = tuple(speeds)
        self._whole = ranges(shares(step_size, self._speeds))

    def plan(self, num_left: int) -> Plan:
        return self._whole if num_left >= self._step_size else ranges(shares(num_left, self._speeds))

    def handover(self) -> dict[str, Any]:
        return {"speeds": list(self._speeds)}

    def regroup(self, known: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        speeds: Sequence[float] = known["speeds"]
        usual = sum(speeds) / len(speeds)
        self._speeds = tuple(usual if rank is None else speeds[rank] for rank in previous_ranks)
        self._whole = ranges(shares(self._step_size, self._speeds))


class MeasuringPlanner(Planner):
    """Shares that follow the workers' measured speeds.

    schedule: see `Balancer`. observe_every_s: of shorter steps only some are used.
    """

    def __init__(
        self,
        step_size: int,
        num_workers: int,
        hints: Sequence[float] | None = None,
        schedule: tuple[int, int] = (1, 1),
        observe_every_s: float = OBSERVE_EVERY_S,
    ) -> None:
        self._step_size = step_size
        self._schedule = schedule
        self._observe_every_s = observe_every_s
        self._num_workers = num_workers
        self._balancer = Balancer(num_workers, hints, schedule)
        self._plans: dict[int, Plan] = {}  # by step size; cleared when they may change
        self._num_unseen = 0  # coming steps that are not used
        self._before: Plan = ()  # of the last step

    def plan(self, num_left: int) -> Plan:
        size = min(self._step_size, num_left)
        if size not in self._plans:
            self._plans[size] = ranges(self._balancer.shares(size))
        return self._plans[size]

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        before, self._before = self._before, plan
        # Used in any case: a step in which an idle worker gets its turn, since it gets it to be measured.
        is_turn = plan != before and any(own and not was for own, was in zip(plan, before, strict=False))
        if self._num_unseen and not is_turn:
            self._num_unseen -= 1
            self._balancer.num_steps = num_steps = self._balancer.num_steps + 1
            if num_steps % TURN in (0, TURN - 1) and not all(plan):
                self._plans = {}
            return
        timings = numbers.timings
        first = timings[0]
        step_s = len(plan[0]) * first.micro_batch + first.sync + first.rest
        every_s = self._observe_every_s and max(self._observe_every_s, OBSERVE_EVERY_S_PER_WORKER * self._num_workers)
        self._num_unseen = min(math.ceil(every_s / step_s or 1) - 1, MAX_UNSEEN) if step_s else 0
        seconds_per_micro_batch, _, delays, _, _ = zip(*timings, strict=True)
        self._balancer.observe(seconds_per_micro_batch, delays)
        self._plans = {}

    def state_dict(self) -> dict[str, Any]:
        return {"balancer": self._balancer.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "balancer" in state:
            self._balancer = Balancer.from_dict(state["balancer"], self._schedule)
            self._plans = {}

    def regroup(self, known: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        self._balancer = Balancer.from_dict(known["balancer"], self._schedule).regrouped(previous_ranks)
        self._num_workers = len(previous_ranks)
        self._plans, self._num_unseen, self._before = {}, 0, ()


class CadencePlanner(Planner):
    """El Che's steps: large enough to keep the exchange cheap."""

    def __init__(self, el_che: ElChe, max_step_size: int) -> None:
        self._el_che = el_che
        self._max_step_size = max_step_size

    def plan(self, num_left: int) -> Plan:
        return ranges(self._el_che.clamp_total(min(num_left, self._max_step_size)))

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        timings = numbers.timings
        # On a GPU a step may end before any timing has arrived.
        counts = [len(own) if timing.micro_batch else 0 for own, timing in zip(plan, timings, strict=True)]
        compute_ms = [1e3 * timing.micro_batch * count for timing, count in zip(timings, counts, strict=True)]
        exchange_s, _ = split_sync([timing.sync for timing in timings if timing.sync])
        self._el_che.report_timing(compute_ms, counts, 1e3 * exchange_s or None)

    def state_dict(self) -> dict[str, Any]:
        return {"el_che": self._el_che.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "el_che" in state:
            self._el_che = self._el_che.resumed(state["el_che"])

    def regroup(self, known: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        self._el_che = ElChe.from_dict(known["el_che"]).regrouped(previous_ranks)


class LaggedPlanner(Planner):
    """Passes numbers to a planner `lag` steps late, when they have arrived from the device."""

    def __init__(self, planner: Planner, lag: int) -> None:
        self._planner = planner
        self._reader = DeferredReader[tuple[Plan, Numbers]](lambda step: planner.observe(*step), lag)

    def plan(self, num_left: int) -> Plan:
        return self._planner.plan(num_left)

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        self._reader.add((plan, numbers))

    def state_dict(self) -> dict[str, Any]:
        return self._planner.state_dict()  # nothing depends on numbers that were not passed on

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planner.load_state_dict(state)

    def handover(self) -> dict[str, Any]:
        return self._planner.handover()

    def regroup(self, known: Mapping[str, Any], previous_ranks: Sequence[int | None]) -> None:
        self._reader.clear()  # numbers of the workers before
        self._planner.regroup(known, previous_ranks)


def planner_for(config: RunConfig, world: World, step_size: int, *, can_change: bool = False) -> Planner:
    """step_size: micro-batches of a full step; the maximum if a cadence decides. can_change: workers may come or go."""
    planner: Planner
    if isinstance(config.strategy, Cadence):
        planner = CadencePlanner(config.strategy.for_workers(world.size), step_size)
    elif isinstance(config.balancing.shares, tuple):
        return FixedPlanner(step_size, config.balancing.shares)
    elif config.balancing.shares == "equal" or (world.size == 1 and not can_change):
        return FixedPlanner(step_size, (1.0,) * world.size)
    else:
        balancing = config.balancing
        schedule = (balancing.replan_after, balancing.replan_every)
        # With averaging the times of a round arrive in a single step, which must not be left out.
        observe_every_s = 0.0 if isinstance(config.strategy, Averaging) else OBSERVE_EVERY_S
        hints = None if world.is_joining else balancing.speed_hints
        planner = MeasuringPlanner(step_size, world.size, hints, schedule, observe_every_s)
    return LaggedPlanner(planner, GPU_LAG_STEPS) if world.device.type == "cuda" else planner
