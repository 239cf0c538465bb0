"""Which checkpoints are kept: literal tables, and properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.policy import Retention, steps_to_delete

NAN, INF = math.nan, math.inf

# metrics of steps 1, 2, ...; the rules; the steps that stay
TABLE: list[tuple[list[float | None], Retention, list[int]]] = [
    ([None] * 5, Retention(), [1, 2, 3, 4, 5]),
    ([None] * 5, Retention(last=2), [4, 5]),
    ([None] * 5, Retention(last=1), [5]),
    ([None] * 5, Retention(last=9), [1, 2, 3, 4, 5]),
    ([], Retention(last=2), []),
    ([3, 2, 2.5, 2.2, 2.1], Retention(best=("loss", 2)), [2, 5]),
    ([3, 2, 2.5, 2.2, 2.1], Retention(best=("loss", 2, "max")), [1, 3, 5]),
    ([3, 2, 2.5, 2.2, 9], Retention(best=("loss", 2, "min")), [2, 4, 5]),
    ([3, 2, 2.5, 2.2, 2.1], Retention(best=("loss", 1), last=2), [2, 4, 5]),
    ([1, 1, 1, 5, 5], Retention(best=("loss", 2)), [2, 3, 5]),
    ([NAN, 2, NAN, 3, 4], Retention(best=("loss", 2)), [2, 4, 5]),
    ([NAN, 2, NAN, None, 4], Retention(best=("loss", 3)), [2, 3, 5]),
    ([NAN, -1, NAN, INF, 4], Retention(best=("loss", 2, "max")), [4, 5]),
    ([NAN, -INF, INF, 5], Retention(best=("loss", 2, "max")), [3, 4]),
    ([NAN, INF, 9, 9], Retention(best=("loss", 3)), [2, 3, 4]),
    ([None] * 6, Retention(every=2), [2, 4, 6]),
    ([None] * 7, Retention(every=3, last=1), [3, 6, 7]),
    ([1, 9, 9, 9, 9, 9], Retention(every=4, last=1, best=("loss", 1)), [1, 4, 6]),
]


def measured(metrics: list[float | None]) -> dict[int, dict[str, float]]:
    """Checkpoints of steps 1, 2, ...; None: the metric was not measured."""
    return {step: {} if value is None else {"loss": value} for step, value in enumerate(metrics, 1)}


@pytest.mark.parametrize(("metrics", "rules", "stay"), TABLE)
def test_what_stays(metrics: list[float | None], rules: Retention, stay: list[int]) -> None:
    gone = steps_to_delete(measured(metrics), len(metrics), rules)
    assert [step for step in range(1, len(metrics) + 1) if step not in gone] == stay


def test_rotation_step_by_step_keeps_the_best_two() -> None:
    here: dict[int, dict[str, float]] = {}
    for step, metric in enumerate([3, 2, 2.5, 2.2, 2.1], 1):
        here[step] = {"loss": metric}
        for gone in steps_to_delete(here, step, Retention(best=("loss", 2))):
            del here[gone]
    assert [metrics["loss"] for metrics in here.values()] == [2, 2.1]


def test_the_one_just_written_stays_even_below_others() -> None:
    assert steps_to_delete({step: {} for step in (2, 5, 7, 9)}, 2, Retention(last=1)) == [5, 7]


checkpoints = st.dictionaries(st.integers(0, 50), st.none() | st.floats(), min_size=1)
counts = st.none() | st.integers(1, 6)


@given(checkpoints, counts, counts, counts, st.sampled_from(["min", "max"]), st.data())
def test_what_always_holds(saved: Any, last: Any, best: Any, every: Any, mode: Any, data: st.DataObject) -> None:
    keep = Retention(last, None if best is None else ("loss", best, mode), every)
    just_written = data.draw(st.sampled_from(sorted(saved)))
    metrics = {step: {} if value is None else {"loss": value} for step, value in saved.items()}
    gone = steps_to_delete(metrics, just_written, keep)
    assert gone == sorted(set(gone) & set(saved))
    assert just_written not in gone
    assert max(saved) not in gone
    assert len(saved) - len(gone) >= min(len(saved), max(last or 0, 1))
    if every is not None:
        assert not any(step % every == 0 for step in gone)
    if best is not None:
        sign = 1 if mode == "min" else -1
        stay = [sign * saved[s] for s in saved if s not in gone and saved[s] is not None]
        for step in gone:
            if saved[step] is not None and not math.isnan(saved[step]):
                assert sum(value <= sign * saved[step] for value in stay) >= best
