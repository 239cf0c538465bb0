"""Runs beside one another: names by their settings, labels at the ends of curves, marks, baselines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from in_process import invoke
from made_runs import make_run, row

from paceline.cli.logs.labels import run_labels
from paceline.cli.logs.panels import Mark, make_panels
from paceline.cli.logs.picture import draw, spread
from paceline.observe.json_lines import LineReader
from paceline.observe.metrics import MetricsWriter
from paceline.observe.run_files import RunFiles, write_json

EVALUATED = {step: {"eval": {"loss": 1.0 + (step - 6) ** 2, "accuracy": 0.1 * step}} for step in (2, 6, 10)}
TEN = [row(step, **EVALUATED.get(step, {})) for step in range(1, 11)]


def with_settings(files: RunFiles, text: str) -> RunFiles:
    files.config.write_text(text)
    return files


def test_runs_are_named_by_the_settings_in_which_they_differ(runs: Path) -> None:
    base = "trainer: {learning_rate: %s, seed: 0, log_every: %d}\nworkers: %s\noutput: %s\n"
    a = with_settings(make_run(runs, "a"), base % (0.01, 5, 2, "x"))
    b = with_settings(make_run(runs, "b"), base % (0.001, 10, "null", "y"))
    c = with_settings(make_run(runs, "c"), base % (0.01, 5, "null", "x"))
    assert run_labels([a, b, c]) == ["lr=0.01, workers=2", "lr=0.001, workers=default", "lr=0.01, workers=default"]
    assert run_labels([a, c]) == ["workers=2", "workers=default"]
    labels = {one.label for panel in make_panels([a, c]) for one in panel.series if not one.is_faint}
    assert labels == {"workers=2", "workers=default"}


@pytest.mark.parametrize(
    "settings",
    [
        ("workers: 2", "workers: 2"),  # no difference
        ("workers: 2", ""),  # one has none
        ("workers: [", "workers: 2"),  # not readable
        ("{a: 1, b: 1, c: 1, d: 1}", "{a: 2, b: 2, c: 2, d: 2}"),  # too many
        (f"model: {'x' * 30}", f"model: {'y' * 30}"),  # equal when shortened, or too long
    ],
)
def test_otherwise_runs_have_their_names(runs: Path, settings: tuple[str, str]) -> None:
    made = [with_settings(make_run(runs, name), text) for name, text in zip("ab", settings, strict=True)]
    assert run_labels(made)[1].startswith(("b", "model=yyyyy"))


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.55, 0.1], [0.475, 0.575, 0.1]),
        ([1.0, 1.0, 1.0], [0.8, 0.9, 1.0]),
        ([0.0, 0.0], [0.0, 0.1]),
        ([], []),
    ],
)
def test_labels_are_moved_apart_as_little_as_needed(heights: list[float], expected: list[float]) -> None:
    assert spread(heights, 0.1) == pytest.approx(expected)


def test_spread_labels_keep_their_distance_and_order() -> None:
    heights = [0.31, 0.3, 0.32, 0.9, 0.95, 0.29, 0.0]
    placed = spread(heights, 0.08)
    assert all(b - a > 0.0799 for a, b in pairwise(sorted(placed)))
    assert sorted(range(7), key=lambda i: placed[i]) == sorted(range(7), key=lambda i: heights[i])


def test_every_line_is_labelled_where_it_ends(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = make_run(runs, "whole", [row(step) for step in range(1, 101)])
    early = make_run(runs, "early", [row(step, loss=9.0) for step in range(1, 31)])
    (axes,) = draw(make_panels([whole, early], only_loss=True), "t").axes
    places = {text.get_text(): text.xy for text in axes.texts}  # type: ignore[attr-defined]
    assert places["whole"][0] == 1.0
    assert places["early"][0] == pytest.approx(0.3, abs=0.03)
    assert places["early"][1] > 0.9 > 0.1 > places["whole"][1]
    assert axes.get_legend() is None
    assert not any(getattr(text, "arrow_patch", None) for text in axes.texts), "no leader lines"


def test_resumes_checkpoints_and_the_best_evaluation_are_marked(runs: Path) -> None:
    files = make_run(runs, rows=[*TEN[:7], {"resumed_from": 5}, *TEN[5:]])
    for step in (4, 8):
        folder = files.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").touch()
    panels = {panel.name: panel.marks for panel in make_panels([files])}
    assert panels["loss"] == (
        Mark("resume", 5.0),
        Mark("checkpoint", 4.0),
        Mark("checkpoint", 8.0),
        Mark("best", 6.0, 1.0, 1),
    )
    assert panels["eval/accuracy"] == (Mark("resume", 5.0), Mark("best", 10.0, 1.0, 0))  # the highest
    pytest.importorskip("matplotlib")
    figure = draw(make_panels([files]), "t")
    assert figure.axes[0].texts[0].get_text() == "resumed"
    assert figure.texts[-1].get_text() == "▲ checkpoint   ★ best evaluation"


def test_throughput_is_smoothed(runs: Path) -> None:
    noisy = [row(step, samples_per_s=80.0 + 40 * (-1) ** step) for step in range(1, 61)]
    (panel,) = [panel for panel in make_panels([make_run(runs, rows=noisy)]) if panel.name == "samples_per_s"]
    smoothed = next(one for one in panel.series if one.label == "all workers")
    assert abs(smoothed.y[1:] - 80.0).max() < 20.0
    assert any(one.is_faint for one in panel.series)


@pytest.mark.parametrize(
    ("named", "own"),
    [("learning_rate", "lr"), ("train_loss", "loss"), ("eval_loss", "eval/loss"), ("throughput", "samples_per_s")],
)
def test_metrics_have_the_names_of_other_tools_too(runs: Path, named: str, own: str) -> None:
    files = make_run(runs, rows=TEN)
    assert [panel.name for panel in make_panels([files], metrics=[named])] == [own]


def test_a_run_may_be_given_by_one_of_its_files(runs: Path) -> None:
    files = make_run(runs)
    make_run(runs, "newer", minutes=3)
    (files.ranks / "rank-0.err").touch()
    for path in (files.metrics, files.ranks / "rank-0.err"):
        assert invoke("logs", "summary", path).out.startswith(f"run         {files.root.name}\n")


def test_a_baseline_gives_speed_up_and_efficiency(runs: Path) -> None:
    single = make_run(runs, "single", [row(step, shares=[8], waiting=[0.0]) for step in (1, 2)])
    double = make_run(runs, "double", [row(step, samples_per_s=120.0) for step in (1, 2)], minutes=1)
    out = invoke("logs", "summary", "double", "--baseline", "single").out
    assert f"speed-up    1.50 times {single.root.name}, 75% per worker\n" in out
    document = json.loads(invoke("logs", "summary", "double", "--baseline", "single", "--format", "json").out)
    assert document["comparison"] == {"baseline": single.root.name, "speed_up": 1.5, "efficiency": 0.75}
    lines = invoke("logs", "summary", "--all", "--baseline", "single", "--format", "md").out.splitlines()
    assert lines[0].endswith("| samples/s | speed-up | efficiency |")
    assert [line.rsplit(" | ", 2)[1:] for line in lines[2:]] == [["1.00", "100% |"], ["1.50", "75% |"]]
    assert (
        f", 1.50 times {single.root.name}, "
        in invoke("logs", "summary", double.root.name, "--baseline", "single", "--format", "one-line").out
    )


def test_peak_memory_and_paths_are_in_the_summary(runs: Path) -> None:
    files = make_run(runs)
    for rank in (0, 1):
        write_json(files.worker(rank), {"peak_bytes": 10**9 * (rank + 1)})
    out = invoke("logs", "summary").out
    assert "memory      peak 1.00 GB, 2.00 GB\n" in out
    assert f"metrics     {files.metrics}\n" in out
    assert f"output      {files.ranks}\n" in out


def test_list_and_summary_show_the_same_mean_without_the_first_step(runs: Path) -> None:
    rows = [row(1, time=100.0, samples=8), row(2, time=101.0, samples=16, samples_per_s=9.0)]
    make_run(runs, rows=[*rows, row(20, time=110.0, samples=160, samples_per_s=0.1)])
    assert "throughput  15.2 samples/s" in invoke("logs", "summary").out
    assert invoke("logs", "list").out.splitlines()[1].split()[4] == "15.2"
    make_run(runs, "older", [row(step, samples_per_s=10.0 * step) for step in (1, 2, 3)], minutes=1)
    assert invoke("logs", "list").out.splitlines()[2].split()[4] == "20.0"


def test_samples_continue_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        writer = MetricsWriter(path, start)
        for step in steps:
            writer.log(step, {"loss": 1.0}, num_samples=8)
        writer.close()
    assert [line.get("samples") for line in LineReader(path).read()] == [8, 16, 24, None, 24, 32]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_list_fits_the_terminal(columns: int, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    make_run(runs, "a_long_name_of_a_run", status={"total_steps": 100000})
    header, line = invoke("logs", "list").out.splitlines()
    assert len(line) <= max(columns, 66)  # run, state and step are always shown
    shown = header.split()
    assert shown == ["run", "state", "step", "loss", "samples/s", "trained", "started"][: len(shown)]
    assert len(shown) == {60: 3, 80: 5, 120: 7}[columns]


def test_colors_respect_no_color(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(runs)
    monkeypatch.setattr("in_process._Output.isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mfinished" in invoke("logs", "list").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in invoke("logs", "list").out
    assert "\x1b" not in invoke("logs", "plot").out
    assert "\x1b" not in invoke("logs", "summary", "nobody").err
