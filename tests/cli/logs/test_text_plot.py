"""`paceline logs plot` as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import Ended, invoke
from made_runs import make_run

from paceline.cli.logs.panels import Panel, Series
from paceline.cli.logs.text_plot import HEIGHT, text_plot


def falling(label: str = "training", color: int = 0, low: float = 1.0, **more: Any) -> Series:
    return Series(label, np.arange(1.0, 101.0), np.linspace(5.0, low, 100), color, **more)


def test_text_plot_has_axes_a_curve_and_a_label() -> None:
    text = text_plot(Panel("loss", "step", "loss", (falling(),)), 60, has_unicode=False)
    assert text.splitlines() == [
        "loss",
        "5 |**",
        "  |  ****",
        "  |      *****",
        "  |           ***",
        "  |              *****",
        "  |                   ***",
        "  |                      *****",
        "  |                           ***",
        "  |                              *****",
        "  |                                   ***",
        "  |                                      ****",
        "1 |                                          *** training 1",
        "  +---------------------------------------------",
        "   1                   step                  100",
    ]


def test_braille_plot_marks_evaluations() -> None:
    evaluation = Series("evaluation", np.array([50.0, 100.0]), np.array([4.0, 3.0]), 1, is_sparse=True)
    text = text_plot(Panel("loss", "step", "loss", (falling(), evaluation)), 70)
    assert text.count("●") == 2
    assert any(0x2800 < ord(character) < 0x2900 for character in text)
    lines = text.splitlines()
    assert [line.split()[-2:] for line in (lines[7], lines[12])] == [["evaluation", "3"], ["training", "1"]]


def test_many_evaluations_are_a_line_and_steps_have_all_digits() -> None:
    """Marks in every column would hide the training loss."""
    steps = np.linspace(1.0, 1_234_567.0, 400)
    evaluations = Series("evaluation", steps, np.linspace(5.0, 1.0, 400), 1, is_sparse=True)
    training = Series("training", steps, np.linspace(4.0, 2.0, 400), 0)
    text = text_plot(Panel("loss", "step", "loss", (training, evaluations)), 70)
    assert "●" not in text
    assert text.splitlines()[-1].split() == ["1", "step", "1234567"]


def test_a_long_label_keeps_the_name_of_the_metric_and_the_value() -> None:
    long = "epochs=2, max_steps=default, seed=3"
    text = text_plot(Panel("loss", "step", "loss", (falling(f"{long} training", low=0.04512),)))
    assert "epochs=2, max...d=3 training 0.04512" in text


def test_colors_are_optional() -> None:
    panel = Panel("loss", "step", "loss", (falling(), falling("other", 1, low=2.0)))
    assert "\x1b" not in text_plot(panel)
    colored = text_plot(panel, has_color=True)
    assert "\x1b[34mtraining 1\x1b[0m" in colored
    assert "\x1b[33mother 2\x1b[0m" in colored


@pytest.mark.parametrize("has_unicode", [True, False])
@pytest.mark.parametrize("width", [30, 31, 40, 80, 110])
def test_text_plot_fits_its_width(width: int, has_unicode: bool) -> None:
    many = tuple(falling(f"a run with a long name {i}", i, low=float(i)) for i in range(20))
    one_point = Series("x", np.array([3.0]), np.array([2.0]), 0)
    for series in ((falling(),), many, (one_point,)):
        text = text_plot(Panel("loss", "step", "loss", series), width, has_unicode=has_unicode)
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) == HEIGHT + 3


def test_logarithmic_text_plot_of_an_exponential_is_straight() -> None:
    x = np.linspace(1.0, 50.0, 50)
    panel = Panel("loss", "step", "loss", (Series("a", x, 10.0 ** (-x / 10), 0),), is_log=True)
    text = text_plot(panel, 60, has_unicode=False)
    assert text.startswith("loss (log)\n")
    stars = [line.count("*") for line in text.splitlines()[1 : HEIGHT + 1]]
    assert max(stars) - min(stars) <= 2


def logs_command(*arguments: object) -> Ended:
    return invoke("logs", *arguments)


def test_text_plot_shows_only_the_loss_by_default(runs: Path) -> None:
    files = make_run(runs)
    out = logs_command("plot").out
    assert out.startswith(f"{files.root.name}\n\nloss\n")
    assert "learning rate" not in out
    assert "learning rate" in logs_command("plot", "--metrics", "lr,loss").out
