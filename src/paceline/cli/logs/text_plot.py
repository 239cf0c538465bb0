"""Panels as text. Lines are made of braille dots, two across and four down per character, or of asterisks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.cli.commands import shortened
from paceline.cli.logs.panels import Numbers, Panel, Series
from paceline.observe import formats
from paceline.observe.formats import printable

HEIGHT = 12
MIN_WIDTH = 30
COLUMNS_PER_MARK = 2
_MAX_LABEL = 36
_LABEL_END = 20  # for what the line is, and its last value: "evaluation 0.04512"
_ANSI_COLORS = (34, 33, 32, 35, 36, 31)
# The bit of each dot in a braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def text_plot(panel: Panel, width: int = 80, *, has_unicode: bool = True, has_color: bool = False) -> str:
    """A plot of `HEIGHT` + 3 lines, at most `width` wide. Without smoothed lines' original values."""

    def colored(text: str, color: int) -> str:
        return f"\x1b[{_ANSI_COLORS[color % len(_ANSI_COLORS)]}m{text}\x1b[0m" if has_color else text

    series = [one for one in panel.series if not one.is_faint]
    low, high = _range([one.y for one in series])
    ticks = {0: formats.loss(high), HEIGHT - 1: formats.loss(low)} if low < high else {HEIGHT // 2: formats.loss(low)}
    gutter = max(map(len, ticks.values()))
    names = [_name(one) for one in series]
    columns = width - gutter - 4 - max(map(len, names))
    if columns < MIN_WIDTH // 2:  # too narrow for labels
        names, columns = [], max(width - gutter - 3, 8)
    across = _scaled([one.x for one in series])
    down = [1 - y for y in _scaled([np.log(one.y) if panel.is_log else one.y for one in series])]
    labels: dict[int, str] = {}
    for one, name, y in zip(series, names, down, strict=False):
        # In the row in which the line ends, or the nearest free one. Labels that find no row are left out.
        end = round(float(y[np.isfinite(one.y)][-1]) * (HEIGHT - 1))
        if free := [row for row in range(HEIGHT) if row not in labels]:
            labels[min(free, key=lambda row: abs(row - end))] = colored(name, one.color)
    drawn = _draw(series, across, down, columns, has_unicode)
    cells = [[colored(*drawn[i, j]) if (i, j) in drawn else " " for j in range(columns)] for i in range(HEIGHT)]
    corner, side, bar = "└│─" if has_unicode else "+|-"
    begin, end_text = (f"{x:.0f}" if x.is_integer() else f"{x:.4g}" for x in _range([one.x for one in series]))
    middle = panel.x_label.center(max(columns - len(begin) - len(end_text), 0))
    return "\n".join(
        [
            f"{printable(panel.y_label)}{' (log)' if panel.is_log else ''}",
            *(
                f"{ticks.get(i, ''):>{gutter}} {side}{''.join(cells[i])} {labels.get(i, '')}".rstrip()
                for i in range(HEIGHT)
            ),
            f"{'':>{gutter}} {corner}{bar * columns}",
            f"{'':>{gutter}}  {begin}{middle}{end_text}"[:width].rstrip(),
        ]
    )


def _name(one: Series) -> str:
    """The label and the last value. A long label is cut in the middle: its end says what the line is."""
    name = printable(f"{one.label} {formats.loss(one.last)}")
    return name if len(name) <= _MAX_LABEL else f"{shortened(name, _MAX_LABEL - _LABEL_END)}{name[-_LABEL_END:]}"


def _range(parts: Sequence[Numbers]) -> tuple[float, float]:
    """The smallest and the largest finite value."""
    values = np.concatenate(parts)
    values = values[np.isfinite(values)]
    return float(values.min()), float(values.max())


def _scaled(parts: Sequence[Numbers]) -> list[Numbers]:
    """Values of 0 to 1 for the range of all parts; 0.5 if all are equal."""
    low, high = _range(parts)
    # Halved, since the difference of values near 1e308 would overflow.
    length = high / 2 - low / 2
    return [np.clip((part / 2 - low / 2) / length, 0.0, 1.0) if length else np.full_like(part, 0.5) for part in parts]


def _draw(
    series: Sequence[Series], across: Sequence[Numbers], down: Sequence[Numbers], columns: int, has_unicode: bool
) -> dict[tuple[int, int], tuple[str, int]]:
    """The characters and their colors, by row and column. Where lines cross, the later one determines the color."""
    dots_across, dots_down = (2, 4) if has_unicode else (1, 1)
    bits: dict[tuple[int, int], int] = {}
    characters: dict[tuple[int, int], tuple[str, int]] = {}
    for one, x, y in zip(series, across, down, strict=True):
        finite = np.isfinite(one.y)
        is_marked = one.is_sparse and finite.sum() * COLUMNS_PER_MARK <= columns  # many marks would hide other lines
        dot_columns = np.round(x[finite] * (columns * dots_across - 1)).astype(int)
        for column, row in _dots(dot_columns, y[finite] * (HEIGHT * dots_down - 1), is_connected=not is_marked):
            cell = row // dots_down, column // dots_across
            bits[cell] = bits.get(cell, 0) | _DOTS[row % dots_down][column % dots_across]
            mark, dot = ("●", chr(0x2800 + bits[cell])) if has_unicode else ("o", "*")
            bits[cell] |= 0x100 * is_marked  # a mark stays
            characters[cell] = mark if bits[cell] >= 0x100 else dot, one.color
    return characters


def _dots(x: Numbers, y: Numbers, *, is_connected: bool) -> Iterator[tuple[int, int]]:
    """The mean of the values in each column, connected by lines."""
    used, inverse = np.unique(x, return_inverse=True)
    means = np.bincount(inverse, y) / np.bincount(inverse)
    columns = np.arange(used[0], used[-1] + 1) if is_connected else used
    rows = np.round(np.interp(columns, used, means)).astype(int).tolist()
    for i, (column, row) in enumerate(zip(columns.tolist(), rows, strict=True)):
        before = rows[i - 1] if i and is_connected else row
        step = 1 if row >= before else -1
        yield from ((column, between) for between in range(before + step, row, step))
        yield column, row
