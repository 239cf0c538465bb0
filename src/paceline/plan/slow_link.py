"""How replicas are averaged on a slow link: how often, in how many bits and parts, and how busy the link is."""

from __future__ import annotations

from dataclasses import dataclass

# The mean of a part is applied this many steps after it was sent. Fewer steps mean more exchanges, which cost time;
# with 8, a convolutional network exceeded the budget.
STEPS_IN_FLIGHT = 4
# How much higher than with synchronous training the loss may be; docs/slow-links.md says where this was met.
LOSS_BUDGET = 0.01


@dataclass(frozen=True)
class Exchange:
    """A way to average replicas."""

    every: int
    compress: str
    bits_per_value: float

    @property
    def fragments(self) -> int:
        return max(1, self.every // STEPS_IN_FLIGHT)


# The same on every link. int4 ended within 0.1% of fp32. Averages every 16 or 8 steps take more time and ended with a
# higher loss; 64 steps exceeded the budget.
EXCHANGE = Exchange(32, "int4", 4.125)


@dataclass(frozen=True)
class LinkUse:
    """The cost of EXCHANGE on a measured link. busy: the part of the time in which the link is used."""

    busy: float
    bytes_per_s: float
    step_s: float

    @property
    def reason(self) -> str:
        text = (
            f"averaging every {EXCHANGE.every} steps in {EXCHANGE.compress}, in {EXCHANGE.fragments} parts: a step "
            f"takes {_number(1e3 * self.step_s)} ms and the link carries {_number(8e-6 * self.bytes_per_s)} Mbit/s per "
            f"worker, so it is used {min(self.busy, 1.0):.0%} of the time"
        )
        if self.busy > 1.0:
            return (
                f"{text}; workers wait for it: no coarser exchange is known to keep the loss within {LOSS_BUDGET:.0%}"
            )
        return text


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def link_use(num_values: int, num_workers: int, bytes_per_s: float, step_s: float) -> LinkUse:
    """bytes_per_s: sent by a worker. Every worker sends its values to each of the others."""
    num_bytes = (num_workers - 1) * num_values * EXCHANGE.bits_per_value / 8
    return LinkUse(num_bytes / bytes_per_s / (EXCHANGE.every * step_s), bytes_per_s, step_s)
