"""Who takes which micro-batches of the next step: fixed by the user, or following the times that were measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.core.world import World
from paceline.plan.balance import Balancer
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.shares import Plan, ranges, shares
from paceline.run.config import RunConfig
from paceline.sync.step_numbers import Numbers

# A GPU's numbers are read this many steps late, so that the host need not wait for them; the CPU's at once.
GPU_LAG_STEPS = 2
# Of steps shorter than this only some are looked at: learning from one takes a third of a small model's step.
LOOK_EVERY_S = 0.01
MAX_UNSEEN = 100  # however short a step seems to be


class Planner(Protocol):
    """The same on every worker: it sees only what all of them have."""

    def plan(self, num_left: int) -> Plan:
        """The next step's micro-batch numbers, by rank, where so many micro-batches are left in the epoch."""

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        """What was exchanged in a step; called with every step in turn, some steps late."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned about the workers; empty where nothing is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave in a world of as many workers."""


class FixedPlanner:
    """The same proportions in every step."""

    def __init__(self, step_size: int, speeds: Sequence[float]) -> None:
        self._step_size = step_size
        self._speeds = tuple(speeds)
        self._whole = ranges(shares(step_size, self._speeds))

    def plan(self, num_left: int) -> Plan:
        return self._whole if num_left >= self._step_size else ranges(shares(num_left, self._speeds))

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return


class MeasuringPlanner:
    """Shares that follow the workers' measured speeds."""

    def __init__(self, step_size: int, balancer: Balancer) -> None:
        self._step_size = step_size
        self._balancer = balancer
        self._plans: dict[int, Plan] = {}  # by size of the step, until speeds are looked at again
        self._num_unseen = 0  # steps to come that are not looked at

    def plan(self, num_left: int) -> Plan:
        size = min(self._step_size, num_left)
        if size not in self._plans:
            self._plans[size] = ranges(self._balancer.shares(size))
        return self._plans[size]

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        if self._num_unseen:
            self._num_unseen -= 1
            return
        timings = numbers.timings
        first = timings[0]
        step_s = len(plan[0]) * first.micro_batch + first.sync + first.rest
        self._num_unseen = min(math.ceil(LOOK_EVERY_S / step_s) - 1, MAX_UNSEEN) if step_s else 0
        self._balancer.observe([t.micro_batch for t in timings], [t.rest for t in timings])
        self._plans = {}

    def state_dict(self) -> dict[str, Any]:
        return {"balancer": self._balancer.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "balancer" in state:
            self._balancer = Balancer.from_dict(state["balancer"])
            self._plans = {}


class CadencePlanner:
    """Steps as large as El Che says, so that the exchange costs little."""

    def __init__(self, el_che: ElChe, max_step_size: int) -> None:
        self._el_che = el_che
        self._max_step_size = max_step_size

    def plan(self, num_left: int) -> Plan:
        return ranges(self._el_che.clamp_total(min(num_left, self._max_step_size)))

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        timings = numbers.timings
        # On a GPU a step may end before the one it reports on could be read.
        counts = [len(own) if timing.micro_batch else 0 for own, timing in zip(plan, timings, strict=True)]
        compute_ms = [1e3 * timing.micro_batch * count for timing, count in zip(timings, counts, strict=True)]
        # Who comes last to an exchange waits for nobody: its time is what the exchange itself takes.
        syncs = [timing.sync for timing in timings if timing.sync]
        self._el_che.report_timing(compute_ms, counts, 1e3 * min(syncs) if syncs else None)

    def state_dict(self) -> dict[str, Any]:
        return {"el_che": self._el_che.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "el_che" in state:
            self._el_che = ElChe.from_dict(state["el_che"])


class Late:
    """Hands a planner the numbers of a step so many steps late, when they have long arrived."""

    def __init__(self, planner: Planner, lag: int) -> None:
        self._planner = planner
        self._lag = lag
        self._unread: deque[tuple[Plan, Numbers]] = deque()

    def plan(self, num_left: int) -> Plan:
        return self._planner.plan(num_left)

    def observe(self, plan: Plan, numbers: Numbers) -> None:
        self._unread.append((plan, numbers))
        if len(self._unread) > self._lag:
            self._planner.observe(*self._unread.popleft())

    def state_dict(self) -> dict[str, Any]:
        return self._planner.state_dict()  # of times that no planner has seen yet, nothing depends

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planner.load_state_dict(state)


def planner_for(config: RunConfig, world: World, step_size: int) -> Planner:
    """`step_size`: micro-batches of a full step; the most of one where a cadence decides."""
    planner: Planner
    if isinstance(config.strategy, Cadence):
        planner = CadencePlanner(config.strategy.for_workers(world.size), step_size)
    elif isinstance(config.balancing.shares, tuple):
        return FixedPlanner(step_size, config.balancing.shares)
    elif config.balancing.shares == "equal" or world.size == 1:
        return FixedPlanner(step_size, (1.0,) * world.size)
    else:
        planner = MeasuringPlanner(step_size, Balancer(world.size, config.balancing.speed_hints))
    return Late(planner, GPU_LAG_STEPS) if world.device.type == "cuda" else planner
