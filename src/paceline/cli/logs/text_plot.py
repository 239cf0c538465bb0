"""Panels as text: a curve of braille dots, two across and four down in each character, or of asterisks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cli.logs.panels import Numbers, Panel, Series
from paceline.observe import formats
from paceline.observe.formats import printable

HEIGHT = 12
MIN_WIDTH = 30
_MAX_LABEL = 28
_ANSI_COLORS = (34, 33, 32, 35, 36, 31)
_BRAILLE = 0x2800
# The bit of each dot in a braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class TextStyle:
    """What the terminal can show."""

    width: int = 80
    has_unicode: bool = True
    has_color: bool = False

    @property
    def dots(self) -> tuple[int, int]:
        """Across and down, in one character."""
        return (2, 4) if self.has_unicode else (1, 1)


def text_plot(panel: Panel, style: TextStyle) -> str:
    """A few lines, no wider than the style says."""
    scale = _Scale(panel)
    gutter = max(len(scale.top), len(scale.bottom))
    names = [_shortened(printable(f"{one.label} {formats.loss(_last(one))}"), _MAX_LABEL) for one in panel.series]
    columns = style.width - gutter - 3 - max(map(len, names)) - 1
    if columns < MIN_WIDTH // 2:  # too narrow for names beside the curve
        names, columns = ["" for _ in names], max(style.width - gutter - 3, 8)
    cells = _draw(panel.series, scale, columns, style)
    labels = _label_rows(panel.series, names, scale, style)
    corner, side, bar = ("└", "│", "─") if style.has_unicode else ("+", "|", "-")
    left = [scale.top, *[""] * (HEIGHT - 2), scale.bottom]
    if scale.top == scale.bottom:  # one value, drawn in the middle
        left = [scale.top if row == HEIGHT // 2 else "" for row in range(HEIGHT)]
    lines = [f"{left[row]:>{gutter}} {side}{cells[row]} {labels[row]}".rstrip() for row in range(HEIGHT)]
    begin, end = f"{scale.x_low:g}", f"{scale.x_high:g}"
    middle = panel.x_label.center(max(columns - len(begin) - len(end), 0))
    return "\n".join(
        [
            f"{printable(panel.y_label)}{' (log)' if panel.is_log else ''}",
            *lines,
            f"{'':>{gutter}} {corner}{bar * columns}",
            f"{'':>{gutter}}  {begin}{middle}{end}"[: style.width].rstrip(),
        ]
    )


class _Scale:
    """From numbers to places between 0 and 1."""

    def __init__(self, panel: Panel) -> None:
        xs = np.concatenate([one.x for one in panel.series])
        ys = np.concatenate([one.y[np.isfinite(one.y)] for one in panel.series])
        self._is_log = panel.is_log
        self.x_low, self.x_high = float(xs.min()), float(xs.max())
        self._low, self._high = self._of(float(ys.min())), self._of(float(ys.max()))
        self.bottom, self.top = formats.loss(float(ys.min())), formats.loss(float(ys.max()))

    def x(self, values: Numbers) -> Numbers:
        return (values - self.x_low) / ((self.x_high - self.x_low) or 1.0)

    def y(self, values: Numbers) -> Numbers:
        if not self._high > self._low:
            return np.full_like(values, 0.5)
        # Halves: the difference of two numbers near 1e308 may be infinite.
        numbers = (np.log(values) if self._is_log else values) / 2
        return np.clip((numbers - self._low / 2) / (self._high / 2 - self._low / 2), 0.0, 1.0)

    def _of(self, value: float) -> float:
        return math.log(value) if self._is_log else value


def _draw(series: Sequence[Series], scale: _Scale, columns: int, style: TextStyle) -> list[str]:
    """The rows of characters. Where lines cross, the later one gives the colour."""
    across, down = style.dots
    bits = np.zeros((HEIGHT, columns), np.int64)
    colors = np.full((HEIGHT, columns), -1)
    marks = np.zeros((HEIGHT, columns), bool)
    for one in series:
        for column, row in _dots(one, scale, columns * across, HEIGHT * down):
            place = row // down, column // across
            bits[place] |= _DOTS[row % down][column % across] if style.has_unicode else 1
            colors[place] = one.color
            marks[place] |= one.is_sparse
    mark = "●" if style.has_unicode else "o"
    return [
        "".join(
            _colored(_character(bits[row, column], marks[row, column], mark, style), colors[row, column], style)
            for column in range(columns)
        )
        for row in range(HEIGHT)
    ]


def _dots(one: Series, scale: _Scale, num_columns: int, num_rows: int) -> list[tuple[int, int]]:
    finite = np.isfinite(one.y)
    columns = np.round(scale.x(one.x[finite]) * (num_columns - 1)).astype(int)
    rows = (1.0 - scale.y(one.y[finite])) * (num_rows - 1)
    # Where there are more points than columns, each column shows its points' mean.
    used, inverse = np.unique(columns, return_inverse=True)
    means = np.bincount(inverse, rows) / np.bincount(inverse)
    if one.is_sparse:
        return [(int(c), round(float(r))) for c, r in zip(used, means, strict=True)]
    filled = np.arange(used[0], used[-1] + 1)
    path = np.round(np.interp(filled, used, means)).astype(int)
    dots = [(int(filled[0]), int(path[0]))]
    for i in range(1, len(filled)):
        step = 1 if path[i] >= path[i - 1] else -1
        dots += [(int(filled[i]), row) for row in range(int(path[i - 1]) + step, int(path[i]), step)]
        dots.append((int(filled[i]), int(path[i])))
    return dots


def _character(bits: int, is_mark: bool, mark: str, style: TextStyle) -> str:
    if is_mark:
        return mark
    if not bits:
        return " "
    return chr(_BRAILLE + bits) if style.has_unicode else "*"


def _label_rows(series: Sequence[Series], names: Sequence[str], scale: _Scale, style: TextStyle) -> list[str]:
    """Each name in the row where its line ends, or in the nearest free one; the rest, if rows run out, are left out."""
    labels = [""] * HEIGHT
    for one, name in zip(series, names, strict=True):
        wanted = round(float(1.0 - scale.y(np.array([_last(one)]))[0]) * (HEIGHT - 1))
        free = [row for row in range(HEIGHT) if not labels[row]]
        if name and free:
            labels[min(free, key=lambda row: abs(row - wanted))] = _colored(name, one.color, style)
    return labels


def _colored(text: str, color: int, style: TextStyle) -> str:
    if not style.has_color or color < 0 or text == " ":
        return text
    return f"\x1b[{_ANSI_COLORS[color % len(_ANSI_COLORS)]}m{text}\x1b[0m"


def _last(one: Series) -> float:
    return float(one.y[np.isfinite(one.y)][-1])


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
