"""The panels of `paceline logs plot`: which lines they have, over which axis, smoothed and thinned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import Ended, invoke
from made_runs import make_run, row

from paceline.cli.logs import panels as panels_module
from paceline.cli.logs import picture as logs_picture
from paceline.cli.logs.labels import short_names
from paceline.cli.logs.panels import Panel, make_panels, moving_mean
from paceline.cli.logs.text_plot import text_plot
from paceline.observe.metrics import MAX_POINTS, Curves, read_curves
from paceline.observe.run_files import RunFiles

EVALUATED = {step: {"eval": {"loss": 1.0 * step, "accuracy": 0.5}} for step in (2, 4)}
FIVE = [row(step, loss=6.0 - step, **EVALUATED.get(step, {})) for step in range(1, 6)]


def logs_command(*arguments: object) -> Ended:
    return invoke("logs", *arguments)


def content(panels: list[Panel]) -> dict[str, Any]:
    """The content of the image: for each axes its labels, lines with their data, and the names beside them."""
    pytest.importorskip("matplotlib")
    figure = logs_picture.draw(panels, "a title")
    return {
        axes.get_ylabel(): {
            "x": axes.get_xlabel(),
            "lines": {
                line.get_label(): (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
                for line in axes.get_lines()
                if line.get_label() != "_best"
            },
            "names": [text.get_text() for text in sorted(axes.texts, key=lambda text: -text.xy[1])],  # from above
        }
        for axes in figure.axes
    }


def panels_of(*files: RunFiles, **options: Any) -> list[Panel]:
    return make_panels(files, **options)


def test_default_panels_of_one_run(runs: Path) -> None:
    steps = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert content(panels_of(make_run(runs, rows=FIVE))) == {
        "loss": {
            "x": "step",
            "lines": {"training": (steps, [5.0, 4.0, 3.0, 2.0, 1.0]), "evaluation": ([2.0, 4.0], [2.0, 4.0])},
            "names": ["evaluation", "training"],
        },
        "eval/accuracy": {"x": "step", "lines": {"eval/accuracy": ([2.0, 4.0], [0.5, 0.5])}, "names": []},
        "learning rate": {"x": "step", "lines": {"learning rate": (steps, [0.001] * 5)}, "names": []},
        "gradient norm": {"x": "step", "lines": {"gradient norm": (steps, [2.0] * 5)}, "names": []},
        "samples / s": {
            "x": "step",
            "lines": {
                "all workers": (steps, [80.0] * 5),
                "worker 0": (steps, [60.0] * 5),
                "worker 1": (steps, [20.0] * 5),
            },
            "names": ["all workers", "worker 0", "worker 1"],
        },
    }


def test_compared_runs_share_axes_and_are_named_in_the_order_of_their_ends(runs: Path) -> None:
    both = [make_run(runs, "one", FIVE), make_run(runs, "two", [row(1), row(2)])]
    assert content(panels_of(*both, only_loss=True)) == {
        "loss": {
            "x": "step",
            "lines": {
                "one": ([1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]),
                "one evaluation": ([2.0, 4.0], [2.0, 4.0]),
                "two": ([1.0, 2.0], [8.0, 4.0]),
            },
            "names": ["two", "one"],
        }
    }
    overview = content(panels_of(*both))
    assert overview["samples / s"]["names"] == ["one", "two"]


def test_run_has_one_color_in_all_panels(runs: Path) -> None:
    panels = panels_of(make_run(runs, "one", FIVE), make_run(runs, "two"))
    assert {(series.label, series.color) for panel in panels for series in panel.series} == {
        ("one", 0),
        ("one evaluation", 0),
        ("two", 1),
    }


def test_one_panel_per_chosen_metric(runs: Path) -> None:
    found = content(panels_of(make_run(runs, rows=FIVE), metrics=["waiting", "eval", "shares/1", "loss"]))
    assert {label: axes["lines"].keys() for label, axes in found.items()} == {
        "waiting (part of the time)": {"worker 0", "worker 1"},
        "eval": {"loss", "accuracy"},
        "shares/1": {"shares/1"},
        "loss": {"loss"},
    }


def test_smoothing_keeps_the_original_values_and_skips_the_learning_rate(runs: Path) -> None:
    rows = [row(step, loss=float(step % 2), lr=float(step), eval={"loss": 1.0}) for step in range(1, 6)]
    found = content(panels_of(make_run(runs, rows=rows), smooth=3))
    assert found["loss"]["lines"]["_original"][1] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert found["loss"]["lines"]["training"][1] == pytest.approx([1.0, 2 / 3, 1 / 3, 2 / 3, 0.5])
    assert found["loss"]["lines"]["evaluation"][1] == [1.0] * 5
    assert found["learning rate"]["lines"] == {"learning rate": ([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0])}


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1), st.integers(1, 20))
def test_moving_mean_ignores_non_finite_values(values: list[float], window: int) -> None:
    for i, found in enumerate(moving_mean(np.array(values), window)):
        reach = min(window // 2, i)
        near = [value for value in values[i - reach : i + reach + 1] if math.isfinite(value)]
        assert found == pytest.approx(np.mean(near), abs=1e-4) if near else math.isnan(found)


@pytest.mark.parametrize("window", [2, 3, 7, 50, 1000, 10**9])
def test_moving_mean_over_any_window(window: int) -> None:
    rng = np.random.default_rng(window)
    series = rng.normal(size=333)
    series[[7, 100]] = np.nan
    reach = min(window // 2, len(series) - 1)
    for i, mean in enumerate(moving_mean(series, window)):
        own = series[: 2 * i + 1] if i < reach else series[i - reach : i + reach + 1]
        assert mean == pytest.approx(np.nanmean(own), abs=1e-12)


def test_moving_mean_of_large_numbers() -> None:
    assert moving_mean(np.full(1000, 1.5e308), 100) == pytest.approx(np.full(1000, 1.5e308))


def test_moving_mean_after_a_spike_is_exact() -> None:
    assert moving_mean(np.array([1.0, 1e30, 1.0, 1.0, 1.0, 1.0]), 2)[-1] == 1.0


@pytest.mark.parametrize(
    ("axis", "label", "x"),
    [
        ("step", "step", [5, 10, 15, 20, 25]),
        ("epoch", "epoch", [0.5, 1.0, 1.5, 2.0, 2.5]),
        ("time", "time of training (s)", [2.5, 5.0, 7.5, 10.0, 12.5]),
    ],
)
def test_x_axis_in_steps_epochs_or_time(runs: Path, axis: Any, label: str, x: list[float]) -> None:
    rows = [row(step) for step in (5, 10, 15, 20, 25)]
    (panel,) = panels_of(make_run(runs, rows=rows), only_loss=True, x_axis=axis)
    assert panel.x_label == label
    assert panel.series[0].x.tolist() == x


def test_epochs_of_evaluations_are_interpolated(runs: Path) -> None:
    rows = [row(5), {"step": 10, "eval": {"loss": 1.0}}, row(15), row(20)]
    (panel,) = panels_of(make_run(runs, rows=rows), only_loss=True, x_axis="epoch")
    assert [series.x.tolist() for series in panel.series] == [pytest.approx([1, 5 / 3, 2]), pytest.approx([4 / 3])]


@pytest.mark.parametrize(
    ("seconds", "label", "x"), [(179, "s", 179), (180, "min", 3), (7200, "h", 2), (4 * 86400, "days", 4)]
)
def test_unit_of_the_time_axis_fits_the_longest_run(runs: Path, seconds: float, label: str, x: float) -> None:
    run = make_run(runs, rows=[row(1, time=seconds)])
    (panel,) = panels_of(run, make_run(runs, "short"), only_loss=True, x_axis="time")
    assert panel.x_label == f"time of training ({label})"
    assert panel.series[0].x.tolist() == [x]


def test_labels_are_the_shortest_unique_ones(runs: Path) -> None:
    a, b, c = make_run(runs, "a"), make_run(runs, "b"), make_run(runs, "a", minutes=5)
    assert short_names([a, b]) == ["a", "b"]
    assert short_names([a, b, c]) == ["a 12:00:00", "b 12:00:00", "a 12:05:00"]
    tomorrow = make_run(runs, "a", minutes=24 * 60)
    assert short_names([a, tomorrow]) == [a.root.name, tomorrow.root.name]


def test_thinned_curves_keep_their_extremes(runs: Path) -> None:
    rows = [{"step": step, "loss": 100.0 if step == 7777 else 1.0 + step % 3} for step in range(1, 20_001)]
    run = make_run(runs, rows=rows)
    (panel,) = make_panels([run], only_loss=True, smooth=2)
    series, smoothed = panel.series
    assert len(smoothed.x) <= MAX_POINTS
    assert len(series.x) <= MAX_POINTS
    assert (series.x[0], series.x[-1], series.y.max()) == (1, 20_000, 100.0)


def test_non_finite_values_leave_a_gap(runs: Path) -> None:
    rows = [row(1), row(2, loss=math.nan), row(3, loss=math.inf), row(4)]
    (panel,) = panels_of(make_run(runs, rows=rows), only_loss=True)
    assert panel.series[0].x.tolist() == [1, 2, 3, 4]
    content([panel])
    assert "training 2" in text_plot(panel)
    (bad,) = [make_run(runs, "bad", [row(1, loss=math.nan), row(2, loss=math.nan)])]
    assert "loss" not in [panel.name for panel in panels_of(bad)]


def test_missing_x_axis_metric_is_an_error(runs: Path) -> None:
    make_run(runs, rows=[{"step": 1, "loss": 1.0}])
    ended = logs_command("plot", "--x-axis", "epoch")
    assert ended.err == "paceline logs plot: the metrics have no epoch: choose --x-axis step\n"


def test_only_what_is_drawn_is_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --smooth all points are kept, of which a long run has many."""
    kept = []

    def read(*arguments: Any, **options: Any) -> Curves:
        kept.append(read_curves(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(panels_module, "read_curves", read)
    rows = [row(step, lanes={"data": [0.1, 0.2]}, speeds=[1.0, 2.0]) for step in range(1, 9)]
    make_panels([make_run(runs, rows=rows)], smooth=2)
    drawn = {"loss", "lr", "grad_norm", "samples_per_s", "samples_per_s@0", "samples_per_s@1"}
    assert set(kept[0].curves) == drawn
