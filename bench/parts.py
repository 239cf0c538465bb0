"""A benchmark of several parts, each with its own contestants and a goal to reach."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.harness import Result


@dataclass(frozen=True)
class Goal:
    """What a part has to reach: `value` of its result, at least or, if `is_upper`, at most `bound`."""

    text: str
    value: Callable[[Result], float]
    bound: float
    is_upper: bool = False

    def judge(self, result: Result) -> dict[str, Any]:
        value = self.value(result)
        is_reached = value <= self.bound if self.is_upper else value >= self.bound
        return {"goal": self.text, "value": value, "bound": self.bound, "reached": is_reached}


def to_limit(name: str) -> Callable[[Result], float]:
    """A contestant's ratio to the limit, the median of the ratios within a turn."""
    return lambda result: float(result.detail["ratio_by_turn"][name]["median"])


@dataclass
class Parts:
    """What the parts found. `to_json` has every part as a `Result` has it, with its goal."""

    bench: str
    results: dict[str, Result]
    goals: Mapping[str, Goal]
    detail: dict[str, Any] = field(default_factory=dict)

    def judged(self) -> dict[str, dict[str, Any]]:
        return {name: self.goals[name].judge(result) for name, result in self.results.items()}

    def table(self) -> str:
        lines = [f"{result.table()}\n" for result in self.results.values()]
        for name, judged in self.judged().items():
            verdict = "reached" if judged["reached"] else "MISSED"
            lines.append(f"{name:<13} {judged['goal']} {judged['bound']:.3g}: {judged['value']:.3f}, {verdict}")
        return "\n".join(lines)

    def to_json(self) -> str:
        judged = self.judged()
        parts = {name: {**judged[name], **json.loads(result.to_json())} for name, result in self.results.items()}
        return json.dumps({"bench": self.bench, "parts": parts, "detail": self.detail})
