"""The benchmark of sums over two hosts: a short run of it."""

from __future__ import annotations

import pytest

from bench.hosts import FLAT, GOALS, OURS, Task, contest
from bench.namespaces import missing_slow_link

MISSING = missing_slow_link()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_both_ways_are_measured_turn_by_turn() -> None:
    result = contest("4 KB", Task(mbit=1000, num_bytes=4096, num_calls=2, workers_per_host=2, num_turns=2))
    assert result.unit == "ms per sum of 4 KB"
    assert set(result.detail["spread"]) == {OURS, FLAT}
    assert result.detail["turns"] == 2
    assert 0 < result.ours < 1000
    judged = GOALS["4 KB"].judge(result)
    assert judged["value"] == result.detail["ratio_by_turn"][OURS]["median"]
