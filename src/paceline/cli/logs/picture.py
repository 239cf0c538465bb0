"""Panels as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cli.commands import CommandError
from paceline.cli.logs.panels import Mark, Panel, Series
from paceline.observe import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FORMATS = (".png", ".svg", ".pdf")
# Distinguishable with most color vision deficiencies, and dark enough for text on white.
COLORS = ("#0b5394", "#b45309", "#1a7f4b", "#a3195b", "#5b3fa0", "#0e7c86", "#8a6d00", "#555555")
_FONT_POINTS = 9.0
_MARK_COLOR = "#777777"
_EXPLAINED = {"checkpoint": "▲ checkpoint", "best": "★ best evaluation", "world": "±n workers"}
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
    "svg.hashsalt": "paceline",  # for reproducible files
}


def check_output(path: Path) -> None:
    """Check that an image can be drawn and written, before metrics are read."""
    if path.suffix.lower() not in FORMATS:
        raise CommandError(f"{path}: choose a file name that ends in {', '.join(FORMATS)} or .html")
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
        explained = [text for kind, text in _EXPLAINED.items() if any(m.kind == kind for p in panels for m in p.marks)]
        figure.text(0.995, 0.995, "   ".join(explained), color=_MARK_COLOR, fontsize=_FONT_POINTS, ha="right", va="top")
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
    _draw_marks(axes, panel.marks)
    # Evaluations have the color of their run, which is named at the end of its other line.
    named = {one.color for one in lines if not one.is_sparse}
    labelled = {one: line for one, line in lines.items() if not one.is_sparse or len(named) < 2}
    if len(lines) > 1:
        label_ends(axes, labelled, height_points)


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    bottom = axes.get_xaxis_transform()  # x in data, y from 0 to 1
    for kind in dict.fromkeys(mark.kind for mark in marks):
        at = [mark for mark in marks if mark.kind == kind]
        if kind in ("resume", "world"):
            for mark in at:  # workers join soon after others left: lower, so that both texts are readable
                axes.axvline(mark.x, color=_MARK_COLOR, linewidth=0.8, linestyle=":")
                axes.annotate(
                    mark.text or "resumed", (mark.x, 1.0), xytext=(3, -11 if mark.text.startswith("+") else -2),
                    xycoords=bottom, textcoords="offset points",
                    color=_MARK_COLOR, fontsize=_FONT_POINTS - 2, va="top", in_layout=False,
                )  # fmt: skip
        elif kind == "checkpoint":
            axes.plot(
                [mark.x for mark in at], [0.0] * len(at), transform=bottom, linestyle="", marker="^", markersize=5,
                color=_MARK_COLOR, clip_on=False, label="_checkpoint",
            )  # fmt: skip
        else:
            for mark in at:
                color = COLORS[mark.color % len(COLORS)]
                axes.plot(
                    [mark.x], [mark.y or 0.0], linestyle="", marker="*", markersize=9, color=color,
                    markeredgecolor="white", markeredgewidth=0.5, zorder=3, label="_best",
                )  # fmt: skip


def label_ends(axes: Axes, lines: Mapping[Series, Line2D], height_points: float) -> None:
    """Write each line's name where it ends: beside the axes, or in them if it ends early. Labels do not overlap."""
    room = 0.78 * height_points - 2 * _FONT_POINTS  # of the axes, without title and x axis
    points = min(_FONT_POINTS, room / len(lines) / 1.2)
    axes.get_xlim(), axes.get_ylim()  # scales the axes now
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {}
    for one, line in lines.items():
        finite = np.isfinite(one.y)
        x, y = to_axes.transform((one.x[finite][-1], np.clip(one.y[finite][-1], -_LARGEST, _LARGEST)))
        is_early = x < 1.0 - 0.012 * (len(str(line.get_label())) + 4)  # with room for the text inside
        ends[one] = (float(x) if is_early else 1.0, min(max(float(y), 0.0), 1.0))
    for is_beside in (True, False):
        group = [one for one, (x, _) in ends.items() if (x == 1.0) == is_beside]
        heights = spread([ends[one][1] for one in group], 1.2 * points / room)
        for one, y in zip(group, heights, strict=True):
            axes.annotate(
                str(lines[one].get_label()), (ends[one][0], y), xytext=(5, 0), xycoords="axes fraction",
                textcoords="offset points", color=lines[one].get_color(), fontsize=points, va="center",
                annotation_clip=False,
            )  # fmt: skip


def spread(heights: Sequence[float], distance: float) -> list[float]:
    """The heights (0 to 1), moved as little as needed to be `distance` apart, in the same order."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # Groups of touching labels: their number, and the sum of the positions that each wants for the first one.
    groups: list[tuple[int, float]] = []
    for i in order:
        groups.append((1, heights[i]))
        while len(groups) > 1 and _first(groups[-2]) + groups[-2][0] * distance > _first(groups[-1]):
            (count, total), (more, others) = groups[-2:]
            groups[-2:] = [(count + more, total + others - more * count * distance)]
    placed = [_first(group) + k * distance for group in groups for k in range(group[0])]
    low = min(0.0, 1.0 - placed[-1]) if placed else 0.0  # not above the axes
    moved = [max(height + low, k * distance) for k, height in enumerate(placed)]
    return [moved[order.index(i)] for i in range(len(heights))]


def _first(group: tuple[int, float]) -> float:
    return group[1] / group[0]
