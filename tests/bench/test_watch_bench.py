"""The benchmark of `paceline watch`, in short: that first pictures are measured, and in full what it reports."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from bench import watch
from bench.watch_training import BLANK, PAGE, REQUESTS, WITHOUT


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    watch.add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)]
)
def test_interval_of_a_median(count: int, low: int, high: int) -> None:
    assert watch.median_interval([float(value) for value in range(count, 0, -1)]) == (low, high)


@pytest.mark.slow
def test_first_pictures(tmp_path: Path) -> None:
    found, peaks = watch._pictures(tmp_path, options("--pictures", "1", "--lines", "300", "--runs", "3"))
    assert set(found) == {"a run with 300 lines", "a folder with 3 runs"}
    for measured in found.values():
        assert min(measured["picture"]) > 0 < min(measured["reading"])
    assert min(peaks) > 10


@pytest.mark.slow
def test_the_whole_benchmark() -> None:
    chosen = options("--turns", "1", "--turn-s", "1", "--pictures", "1", "--lines", "3000", "--runs", "10")
    result = watch.run(chosen)
    has_browser = shutil.which("chromium") is not None
    assert set(result.detail["spread"]) == {WITHOUT, REQUESTS, *([BLANK, PAGE] if has_browser else [])}
    assert set(result.detail["skipped"]) == (set() if has_browser else {BLANK, PAGE})
    strictest, *_ = result.detail["training"]
    assert strictest == f"{PAGE if has_browser else REQUESTS} over {WITHOUT}"
    assert result.ratio > 0
    assert 0 <= result.detail["cores"][REQUESTS] < 1
    assert result.detail["cores"][WITHOUT] == 0
