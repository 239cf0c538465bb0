"""The form of a verdict, and the limits from which one is given. docs/doctor.md has them as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "failed",
    "stalled",
    "worker left",
    "diverging",
    "memory",
    "slow worker",
    "unbalanced",
    "data-bound",
    "exchange-bound",
    "host-bound GPU",
    "too early",
    "nothing wrong",
]
Severity = Literal["error", "warning", "info", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info", "ok")


@dataclass(frozen=True)
class Change:
    """A setting of a project file and a value to try; `setting` is "" for other advice. why: one sentence."""

    setting: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.setting}: {_yaml(self.value)} ({self.why})" if self.setting else self.why

    @property
    def advice(self) -> str:
        return f"try {self}" if self.setting else self.why


@dataclass(frozen=True)
class Verdict:
    """What slows a run down, in one sentence.

    rank: the worker it is about, if it is about one. since_step: the first step for which it holds; None if unknown or
    from the start. figures: its numbers, by name; fractions are of 1. lost: the fraction of the run's speed that it
    costs, if known.
    """

    kind: Kind
    severity: Severity
    text: str
    rank: int | None = None
    since_step: int | None = None
    lost: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

    @property
    def remedy(self) -> str:
        """What to change, on one line."""
        return "; ".join(change.advice for change in self.changes)


@dataclass(frozen=True)
class Limits:
    """When a verdict is given."""

    slower: float = 1.3  # seconds per micro-batch over the others' median
    busy: float = 0.3  # of the time, on micro-batches: below, a slow worker's micro-batches matter little
    unbalanced: float = 0.2  # of the time, waiting for others, though no worker is slow
    waiting: float = 0.1  # of the time, for others: above, a slow worker is not balanced out
    data: float = 0.15  # of the time, waiting for data
    exchange: float = 0.25  # of the time, in the exchange itself
    gpu_percent: float = 70.0  # utilization below which a GPU waits for its host
    gpu_other: float = 0.3  # of the time: waiting for data, others and the exchange, which explain an idle GPU
    memory: float = 0.95  # of the device's or the host's
    loss_ratio: float = 2.0  # recent loss over the lowest
    loss_regained: float = 0.25  # of the loss's decrease, lost again
    stalled_s: float = 5.0  # without a line of metrics, at least
    stalled_ratio: float = 3.0  # of the longest recent time between two lines
    early_s: float = 60.0  # without a line of metrics, while there are fewer than three
    silent_s: float = 3.0  # without a worker's status, which it writes every second


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
