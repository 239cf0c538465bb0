"""Who takes which micro-batches of the next step: fixed by the user, or following the speeds that were measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from paceline.core.world import World
from paceline.plan.balance import Balancer
from paceline.plan.shares import Plan, plan, ranges
from paceline.run.config import RunConfig
from paceline.sync.numbers import Numbers

# A GPU's numbers are read this many steps late, so that the host need not wait for them; the CPU's at once.
GPU_LAG_STEPS = 2


class Planner(Protocol):
    """The same on every worker: it sees only what all of them have."""

    def plan(self, num_micro_batches: int) -> Plan:
        """The next step's micro-batch numbers, by rank."""

    def observe(self, numbers: Numbers) -> None:
        """What was exchanged in the step just completed."""


class FixedPlanner:
    """The same proportions in every step."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = tuple(speeds)

    def plan(self, num_micro_batches: int) -> Plan:
        return plan(num_micro_batches, self._speeds)

    def observe(self, numbers: Numbers) -> None:
        return


class MeasuringPlanner:
    """Shares that follow the workers' measured speeds, `lag` steps behind."""

    def __init__(self, balancer: Balancer, lag: int) -> None:
        self._balancer = balancer
        self._lag = lag
        self._unread: deque[Numbers] = deque()

    def plan(self, num_micro_batches: int) -> Plan:
        return ranges(self._balancer.shares(num_micro_batches))

    def observe(self, numbers: Numbers) -> None:
        self._unread.append(numbers)
        if len(self._unread) > self._lag:
            self._balancer.observe(self._unread.popleft().seconds)


def planner_for(config: RunConfig, world: World) -> Planner:
    if isinstance(config.shares, tuple):
        return FixedPlanner(config.shares)
    if config.shares == "equal" or world.size == 1:
        return FixedPlanner((1.0,) * world.size)
    lag = GPU_LAG_STEPS if world.device.type == "cuda" else 0
    return MeasuringPlanner(Balancer(world.size, config.speed_hints), lag)
