"""The moving mean that smooths plots."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cli.logs.panels import moving_mean


@pytest.mark.parametrize("window", [2, 3, 7, 50, 1000, 10**9])
def test_a_moving_mean_over_any_window(window: int) -> None:
    rng = np.random.default_rng(window)
    series = rng.normal(size=333)
    series[[7, 100]] = np.nan
    reach = min(window // 2, len(series) - 1)
    for i, mean in enumerate(moving_mean(series, window)):
        own = series[: 2 * i + 1] if i < reach else series[i - reach : i + reach + 1]
        assert mean == pytest.approx(np.nanmean(own), abs=1e-12)


def test_a_moving_mean_of_large_numbers() -> None:
    assert moving_mean(np.full(1000, 1.5e308), 100) == pytest.approx(np.full(1000, 1.5e308))
