"""Panels as an image. Lines are labelled at their ends."""

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
LABEL_POINTS = 8.5
_LINE_HEIGHT = 1.2
# The margins of an axis up to 1e308 would overflow.
_LARGEST = 1e300
# The approximate height of a panel's title, ticks and labels.
_AROUND_AXES_INCHES = 0.8
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.linewidth": 0.7,
    "axes.formatter.limits": (-4, 5),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.01,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.markersize": 3.5,
    "text.color": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
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
        raise CommandError(
            "images need matplotlib, which is not installed: pip install 'paceline[plot]' "
            "(without -o and -e the plot is printed as text)"
        ) from error


def draw(panels: Sequence[Panel], title: str) -> Figure:
    """In two columns. If the number of panels is odd, the first one takes a whole row."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = (len(panels) + 1) // 2
    width, height = (8.0, 4.5) if len(panels) == 1 else (11.0, 0.6 + 3.1 * rows)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(formats.printable(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        grid = figure.add_gridspec(rows, 2)
        cells = [grid[i // 2, i % 2] for i in range(len(panels) % 2, 2 * rows)]
        if len(panels) % 2:
            cells[0] = grid[0, :]
        for panel, cell in zip(panels, cells, strict=True):
            _draw_panel(figure.add_subplot(cell), panel, 72 * (height / rows - _AROUND_AXES_INCHES))
    return figure


def write(figure: Figure, path: Path) -> None:
    import matplotlib

    undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        with matplotlib.rc_context(_STYLE):
            figure.savefig(path, dpi=120, metadata=undated.get(path.suffix.lower()))
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error


def _draw_panel(axes: Axes, panel: Panel, height_points: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ends = []
    for one in panel.series:
        y = np.clip(one.y, -_LARGEST, _LARGEST)
        color = COLORS[one.color % len(COLORS)]
        if one.is_faint:
            axes.plot(one.x, y, color=color, linewidth=0.8, alpha=0.25, label=one.label)
            continue
        width, dash = 1.1 if one.is_sparse else 1.6, "--" if one.color >= len(COLORS) else "-"
        marker, label = "o" if one.is_sparse or len(one.x) == 1 else "", formats.printable(one.label)
        axes.plot(one.x, y, color=color, linewidth=width, linestyle=dash, marker=marker, label=label)
        last = np.flatnonzero(np.isfinite(y))[-1]
        ends.append((label, color, (float(one.x[last]), float(y[last]))))
    axes.set(xlabel=panel.x_label, ylabel=formats.printable(panel.y_label))
    if panel.is_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    if len(ends) > 1:
        _label_ends(axes, ends, height_points)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, str, tuple[float, float]]], height_points: float) -> None:
    """Put each line's label beside its last point, moved up or down where labels would overlap."""
    axes.get_ylim()  # computes the limits, which the transformation needs
    to_axes = axes.transData + axes.transAxes.inverted()
    size = min(LABEL_POINTS, height_points / len(ends) / _LINE_HEIGHT)
    heights = spread([float(to_axes.transform(end)[1]) for _, _, end in ends], size * _LINE_HEIGHT / height_points)
    for (label, color, end), height in zip(ends, heights, strict=True):
        leader = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5), "color": color}
        axes.annotate(
            label,
            end,
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=color,
            fontsize=size,
            va="center",
            arrowprops={**leader, "shrinkA": 1, "shrinkB": 1},
            annotation_clip=False,
        )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as possible so that neighbors are `gap` apart, in the same order, within 0 and 1 if
    they fit."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    moved = list(positions)
    top = 1.0
    for i in reversed(order):
        moved[i] = top = min(moved[i], top)
        top -= gap
    bottom = 0.0
    for i in order:
        moved[i] = bottom = max(moved[i], bottom)
        bottom += gap
    return moved
