"""How replicas are averaged on a slow link: how often, in how many bits and parts, and what the link has to do."""

from __future__ import annotations

from dataclasses import dataclass

# The mean of a part is applied after this many steps. Each exchange takes time, so that fewer cost more; with 8, a
# convolutional network exceeded the budget.
STEPS_UNDER_WAY = 4
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


# The same on every link. int4 ended within 0.1% of fp32. Averages every 16 or 8 steps take more time and ended with a
# higher loss; 64 steps exceeded the budget.
EXCHANGE = Exchange(32, "int4", 4.125)


@dataclass(frozen=True)
class LinkUse:
    """What EXCHANGE means for a link that was measured. busy: the part of the time in which it is used."""

    busy: float
    bytes_per_s: float
    step_s: float

    @property
    def reason(self) -> str:
        text = (
            f"averaging every {EXCHANGE.every} steps in {EXCHANGE.compress}, in {EXCHANGE.fragments} parts: a step "
            f"takes {_number(1e3 * self.step_s)} ms and the link carries {_number(8e-6 * self.bytes_per_s)} Mbit/s per "
            f"worker, so that it is used {min(self.busy, 1.0):.0%} of the time"
        )
        if self.busy > 1.0:
            return f"{text}; workers wait for it, as nothing coarser is known to keep the loss within {LOSS_BUDGET:.0%}"
        return text


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def link_use(num_values: int, num_workers: int, bytes_per_s: float, step_s: float) -> LinkUse:
    """bytes_per_s: that a worker sends to all others. Every worker sends what it has to each of the others."""
    num_bytes = (num_workers - 1) * num_values * EXCHANGE.bits_per_value / 8
    return LinkUse(num_bytes / bytes_per_s / (EXCHANGE.every * step_s), bytes_per_s, step_s)
