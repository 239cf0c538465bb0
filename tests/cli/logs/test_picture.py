"""`paceline logs plot -o`: the image, seen through its Figure and as a file."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process import Ended, invoke
from made_runs import make_run, row

from paceline.cli.logs import command
from paceline.cli.logs import picture as logs_picture
from paceline.cli.logs.panels import Panel, make_panels
from paceline.cli.main import main
from paceline.observe.run_files import RunFiles

EVALUATED = {step: {"eval": {"loss": 1.0 * step, "accuracy": 0.5}} for step in (2, 4)}
FIVE = [row(step, loss=6.0 - step, **EVALUATED.get(step, {})) for step in range(1, 6)]


def logs_command(*arguments: object) -> Ended:
    return invoke("logs", *arguments)


def panels_of(*files: RunFiles, **options: Any) -> list[Panel]:
    return make_panels(files, **options)


def test_log_scale_only_for_positive_values(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    files = make_run(runs, rows=[row(1, grad_norm=0.0), row(2)])

    def scales(**options: Any) -> list[str]:
        figure = logs_picture.draw(panels_of(files, **options), "t")
        return [axes.get_yscale() for axes in figure.axes]

    assert scales(log_scale=True) == ["log", "linear", "linear", "linear"]
    assert scales(log_scale=True, metrics=["lr", "grad_norm"]) == ["log", "linear"]
    assert scales() == ["linear"] * 4


def test_log_scale_has_plain_tick_labels(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = panels_of(make_run(runs), log_scale=True, only_loss=True)
    (axes,) = logs_picture.draw(panels, "t").axes
    assert {"0.5", "1", "2", "5"} <= {label.get_text() for label in axes.get_yticklabels()}


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_image_format_follows_the_suffix_and_files_are_reproducible(runs: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    make_run(runs, rows=FIVE)
    written = []
    for _ in range(2):
        assert logs_command("plot", "--loss-curves", "--smooth", 3, "-o", name) == (0, f"{name}\n", "")
        written.append(Path(name).read_bytes())
    assert written[0].startswith(begins)
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "a.gif"], "a.gif: choose a file name that ends in .png, .svg, .pdf or .html"),
        (["-o", "no/where.png"], "no/where.png: there is no folder no"),
        (
            ["--metrics", "los"],
            "no run has the metric 'los', did you mean 'loss'? choose from time, epoch, loss, learning_rate,",
        ),
        (["--metrics", "zzz"], "no run has the metric 'zzz': choose from time,"),
        (["--metrics", "loss, ,lr"], "no run has the metric '': choose from time,"),
        (["--compare", "nobody"], "there is no run 'nobody' in runs"),
    ],
)
def test_invalid_plots_are_one_message(runs: Path, arguments: list[str], message: str) -> None:
    make_run(runs)
    ended = logs_command("plot", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"paceline logs plot: {message}")


def test_unwritable_image_is_one_message(runs: Path) -> None:
    make_run(runs)
    Path("folder.png").mkdir()
    ended = logs_command("plot", "-o", "folder.png")
    assert ended == (2, "", "paceline logs plot: folder.png: Is a directory\n")


def test_without_matplotlib_images_name_the_extra_and_text_works(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(runs)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = logs_command("plot", "-o", "a.png")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "paceline logs plot: images need matplotlib, which is not installed: pip install 'paceline[plot]' (without "
        "-o and -e the plot is printed as text)\n"
    )
    assert logs_command("plot").code == 0


def test_open_writes_the_image_to_the_run_folder_and_starts_the_viewer(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    files = make_run(runs)
    viewer = tmp_path / "bin" / "xdg-open"
    viewer.parent.mkdir()
    os.mkfifo(tmp_path / "shown")
    viewer.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/shown\n')
    viewer.chmod(viewer.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{viewer.parent}:{os.environ['PATH']}")
    picture = files.plots / "eval_loss-lr.png"
    files.metrics.write_text('{"step": 1, "lr": 1.0, "eval": {"loss": 1.0}}\n')
    assert logs_command("plot", "-e", "--metrics", "eval/loss,lr") == (0, f"{picture}\n", "")
    assert (tmp_path / "shown").read_text() == f"{picture}\n"
    assert picture.is_file()
    monkeypatch.setattr(command, "VIEWERS", ("no-such-viewer",))
    ended = logs_command("plot", "-e")
    assert ended.code == 1
    assert (
        ended.err
        == f"paceline logs plot: no viewer was found (no-such-viewer): open {files.plots}/overview.png yourself\n"
    )
    assert (files.plots / "overview.png").is_file()


@pytest.mark.parametrize("losses", [[1e308, -1e308], [1e308, 1.0], [1.7e308, 1.6e308], [5e-324, 1e-300], [0.0, 1e308]])
@pytest.mark.parametrize("options", ["", "--smooth 5", "--log-scale", "-o plot.png", "--smooth 5 -o plot.png"])
def test_plots_of_extreme_values(
    losses: list[float],
    options: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "large"
    run.mkdir(parents=True)
    lines = [{"step": step, "loss": losses[step % 2]} for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["logs", "plot", "large", *options.split()]) == 0
    output = capsys.readouterr().out
    if "-o" in options:
        assert (tmp_path / "plot.png").stat().st_size > 5000
    else:
        assert "1" in output
        assert max(map(len, output.splitlines())) <= 200
