"""Panels as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cli.commands import CommandError
from paceline.cli.logs.panels import Panel
from paceline.observe import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
# Distinguishable with most color vision deficiencies, and dark enough for text on white.
COLORS = ("#0b5394", "#b45309", "#1a7f4b", "#a3195b", "#5b3fa0", "#0e7c86", "#8a6d00", "#555555")
_FONT_POINTS = 9.0
# The margins of an axis up to 1e308 would overflow.
_LARGEST = 1e300
_STYLE: dict[Any, Any] = {
    "font.size": _FONT_POINTS,
    "axes.formatter.limits": (-4, 5),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.01,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "svg.hashsalt": "paceline",  # for reproducible files
}


def check_output(path: Path) -> None:
    """Check that an image can be drawn and written, before metrics are read."""
    if path.suffix.lower() not in FORMATS:
        raise CommandError(f"{path}: choose a file name that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not path.parent.is_dir():
        raise CommandError(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        remedy = "pip install 'paceline[plot]' (without -o and -e the plot is printed as text)"
        raise CommandError(f"images need matplotlib, which is not installed: {remedy}") from error


def draw(panels: Sequence[Panel], title: str) -> Figure:
    """In two columns. If the number of panels is odd, the first one takes a whole row."""
    import matplotlib
    from matplotlib.figure import Figure

    cells = [*([0] * (len(panels) % 2)), *range(len(panels))]
    rows = [cells[i : i + 2] for i in range(0, len(cells), 2)]
    width, height = (8.0, 4.5) if len(panels) == 1 else (11.0, 0.6 + 3.1 * len(rows))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(formats.printable(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        for i, axes in figure.subplot_mosaic(rows).items():
            _draw_panel(axes, panels[i], 72 * height / len(rows))
    return figure


def write(figure: Figure, path: Path) -> None:
    import matplotlib

    undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, dpi=120, metadata=undated.get(path.suffix.lower()))


def _draw_panel(axes: Axes, panel: Panel, height_points: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    lines = {}
    for one in panel.series:
        y = np.clip(one.y, -_LARGEST, _LARGEST)
        color = COLORS[one.color % len(COLORS)]
        if one.is_faint:
            axes.plot(one.x, y, color=color, linewidth=0.8, alpha=0.25, label=one.label)
            continue
        width, dash = 1.1 if one.is_sparse else 1.6, "--" if one.color >= len(COLORS) else "-"
        marker, label = "o" if one.is_sparse or len(one.x) == 1 else "", formats.printable(one.label)
        (lines[one],) = axes.plot(one.x, y, color=color, linewidth=width, linestyle=dash, marker=marker, label=label)
    axes.set(xlabel=panel.x_label, ylabel=formats.printable(panel.y_label))
    if panel.is_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    if len(lines) > 1:
        # Beside the axes, in the order in which the lines end.
        ordered = [lines[one] for one in sorted(lines, key=lambda one: -one.last)]
        points = min(_FONT_POINTS, height_points / len(lines) / 1.5)
        axes.legend(handles=ordered, loc="center left", bbox_to_anchor=(1.0, 0.5), labelspacing=0.2, fontsize=points)
