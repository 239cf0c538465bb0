"""Panels as a picture. Lines are labelled where they end: there is no legend to look up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cli.logs.panels import Panel, Series
from paceline.cli.logs.runs import LogsError
from paceline.observe import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
# Told apart by most people who do not see all colours, and dark enough for text on white.
COLORS = ("#0b5394", "#b45309", "#1a7f4b", "#a3195b", "#5b3fa0", "#0e7c86", "#8a6d00", "#555555")
INK, FAINT = "#333333", "#e4e4e4"
LABEL_POINTS = 8.5
_LINE_HEIGHT = 1.2
_LARGEST = 1e300
# What titles, ticks and labels take of a panel's height, about.
_AROUND_AXES_INCHES = 0.8
# From a name to the end of its line, where the two are not beside each other.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "linewidth": 0.5,
    "alpha": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 1,
    "shrinkB": 1,
}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.formatter.limits": (-4, 5),
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "svg.hashsalt": "paceline",  # the same picture twice is the same file
}


def check_output(path: Path) -> None:
    """Before anything is read: that a picture can be written there, and drawn at all."""
    if path.suffix.lower() not in FORMATS:
        raise LogsError(f"{path}: choose a file name that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not path.parent.is_dir():
        raise LogsError(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise LogsError(
            "matplotlib is not installed, and pictures need it: pip install 'paceline[plot]' "
            "(without -o and -e the plot is drawn as text)"
        ) from error


def draw(panels: Sequence[Panel], title: str) -> Figure:
    from matplotlib.figure import Figure

    with _style():
        rows = (len(panels) + 1) // 2
        size = (8.0, 4.5) if len(panels) == 1 else (11.0, 0.6 + 3.1 * rows)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(formats.printable(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        for panel, axes in zip(panels, _places(figure, len(panels)), strict=True):
            _draw_panel(axes, panel)
            if len(panel.series) > 1:
                _label_ends(axes, panel.series, 72 * (size[1] / rows - _AROUND_AXES_INCHES))
    return figure


def write(figure: Figure, path: Path) -> None:
    undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        with _style():
            figure.savefig(path, dpi=120, metadata=undated.get(path.suffix.lower()))
    except OSError as error:
        raise LogsError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _places(figure: Figure, count: int) -> list[Axes]:
    """Two columns; the first panel takes a whole row where the number is odd."""
    if count == 1:
        return [figure.add_subplot()]
    grid = figure.add_gridspec((count + 1) // 2, 2)
    cells = [grid[i // 2, i % 2] for i in range(count)]
    if count % 2:
        cells = [grid[0, :], *(grid[1 + i // 2, i % 2] for i in range(count - 1))]
    return [figure.add_subplot(cell) for cell in cells]


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for series in map(_drawable, panel.series):
        color = COLORS[series.color % len(COLORS)]
        if series.raw is not None:
            axes.plot(series.x, series.raw, color=color, linewidth=0.8, alpha=0.25, label="_raw")
        dash = "--" if series.color >= len(COLORS) else "-"
        marker = "o" if series.is_sparse or len(series.x) == 1 else ""
        axes.plot(
            series.x,
            series.y,
            color=color,
            linewidth=1.1 if series.is_sparse else 1.6,
            linestyle=dash,
            marker=marker,
            markersize=3.5,
            label=series.label,
        )
    if panel.is_log:
        _make_log(axes)
    axes.set(xlabel=panel.x_label, ylabel=formats.printable(panel.y_label))
    axes.margins(x=0.01)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _drawable(series: Series) -> Series:
    """Within what matplotlib can lay out: the margins of an axis to 1e308 would be infinite."""
    raw = None if series.raw is None else np.clip(series.raw, -_LARGEST, _LARGEST)
    return replace(series, y=np.clip(series.y, -_LARGEST, _LARGEST), raw=raw, label=formats.printable(series.label))


def _make_log(axes: Axes) -> None:
    """With ticks as people write numbers, and enough of them where the axis spans few powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _label_ends(axes: Axes, series: Sequence[Series], height_points: float) -> None:
    """Each line's name beside its last point, moved up or down where names would lie over one another."""
    series = [_drawable(one) for one in series]
    last = [np.flatnonzero(np.isfinite(one.y))[-1] for one in series]
    ends = [(float(one.x[i]), float(one.y[i])) for one, i in zip(series, last, strict=True)]
    axes.get_ylim()  # settles what the axis spans, which the transformation needs
    to_axes = axes.transData + axes.transAxes.inverted()
    size = min(LABEL_POINTS, height_points / len(series) / _LINE_HEIGHT)
    heights = spread([float(to_axes.transform(end)[1]) for end in ends], size * _LINE_HEIGHT / height_points)
    for one, end, height in zip(series, ends, heights, strict=True):
        color = COLORS[one.color % len(COLORS)]
        axes.annotate(
            one.label,
            end,
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=color,
            fontsize=size,
            va="center",
            arrowprops={**_LEADER, "color": color},
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The places, moved as little as keeps their order and `gap` between neighbours, inside 0 to 1 if they fit."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    top = 1.0
    for i in reversed(order):
        moved[i] = top = min(moved[i], top)
        top -= gap
    bottom = 0.0
    for i in order:
        moved[i] = bottom = max(moved[i], bottom)
        bottom += gap
    return moved
