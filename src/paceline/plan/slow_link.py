"""Which exchange fits a slow link: how often, in how many bits and in how many parts replicas are averaged."""

from __future__ import annotations

from dataclasses import dataclass

# An exchange that overlaps with training may take this part of the time until the next one: links and steps vary.
MAX_BUSY = 0.5
# The mean of a part is applied after this many steps. Fewer are better for the loss, but each exchange takes time.
STEPS_UNDER_WAY = 8
# What the loss may be above that of synchronous training; docs/slow-links.md says where it was kept and where not.
LOSS_BUDGET = 0.01


@dataclass(frozen=True)
class Exchange:
    """A way to average replicas."""

    every: int
    compress: str
    bits_per_value: float

    @property
    def fragments(self) -> int:
        return max(1, self.every // STEPS_UNDER_WAY)


# From the one closest to synchronous training to the one with the fewest bytes. int4 ended within 0.1% of fp32. Others
# that were tried: 16 steps were no better and take 2% more time with small models on a CPU; 64 exceeded the budget.
OPTIONS = (Exchange(32, "int4", 4.125),)


@dataclass(frozen=True)
class Choice:
    """An exchange, and the measurements that led to it. busy: the part of the time in which the link is used."""

    exchange: Exchange
    busy: float
    bytes_per_s: float
    step_s: float

    @property
    def reason(self) -> str:
        exchange = self.exchange
        text = (
            f"averaging every {exchange.every} steps in {exchange.compress}, in {exchange.fragments} parts: a step "
            f"takes {_number(1e3 * self.step_s)} ms and the link carries {_number(8e-6 * self.bytes_per_s)} Mbit/s per "
            f"worker, so that it is used {min(self.busy, 1.0):.0%} of the time"
        )
        if self.busy > 1.0:
            return f"{text}; workers wait for it, as nothing coarser is known to keep the loss within {LOSS_BUDGET:.0%}"
        return text


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def choose(num_values: int, num_workers: int, bytes_per_s: float, step_s: float) -> Choice:
    """The first option that the link carries while training goes on, or else the last one.

    bytes_per_s: that a worker sends to all others. Every worker sends what it has to each of the others.
    """
    choice = None
    for exchange in OPTIONS:
        num_bytes = (num_workers - 1) * num_values * exchange.bits_per_value / 8
        choice = Choice(exchange, num_bytes / bytes_per_s / (exchange.every * step_s), bytes_per_s, step_s)
        if choice.busy <= MAX_BUSY:
            break
    assert choice is not None
    return choice
