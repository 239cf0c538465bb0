"""Writes docs/figures.md: docs/benchmarks.md on one page. Run it after the benchmarks: python docs/make_figures.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent / "figures.md"
BENCHMARKS = Path(__file__).parent / "benchmarks.md"
HEAD = """\
# Measured figures

The tables of [benchmarks.md](benchmarks.md) on one page, by `python docs/make_figures.py`. Every line is one run in
which the contestants took turns. All figures are ratios to the limit, medians over the turns. The others are named best
first, so that the strictest comparison comes first. The last column has the version of Paceline and the day: figures of
an older version are those of that version. [performance.md](performance.md) says what costs what and which setting to
change.
"""
COLUMNS = ("`python -m bench`", "unit", "limit, = 1", "Paceline", "others", "measured")
PICTURES = {
    "Overhead on one worker": "overhead",
    "Two equal workers": "scaling",
    "Two unequal workers": "hetero",
    "A CNN on one GPU": "gpu-cnn",
}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """By table: its title, such as `gpu: cnn`, and the text down to the next."""
    bench = ""
    for level, title, body in re.findall(r"^(##+) ([^\n]*)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        if level == "##":
            bench = title
        if "| --- |" in body:
            yield bench if level == "##" else f"{bench}: {title}", body


def row(title: str, body: str) -> list[str]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", body, re.M)]
    (_, unit, limit, *_), _, *contestants = lines
    ratios = {name: ratio.partition(" ")[0] for name, _, ratio, *_ in contestants}
    (ours,) = (name for name in ratios if name.startswith("**"))
    limit = limit.removeprefix("to ")
    others = [f"{name} {ratio}" for name, ratio in ratios.items() if name not in (ours, limit)]
    version, day = re.search(r"paceline (\d[\d.]*\d)", body), re.search(r"\d{4}-\d\d-\d\d", body)
    measured = ", ".join(filter(None, [version and version[1], day and day[0]]))
    return [f"`{title}`", unit, limit, f"**{ratios[ours]}**", "; ".join(others), measured]


def page() -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(row(*each) for each in sections(BENCHMARKS.read_text()))]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    pictures = [f"## {title}\n\n![{name}](images/bench-{name}.png)\n" for title, name in PICTURES.items()]
    return "\n".join([HEAD, table, *pictures])


if __name__ == "__main__":
    PAGE.write_text(page())
