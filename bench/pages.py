"""Write docs/benchmarks.md and its pictures from what the benchmarks found.

    python -m bench overhead --json > runs/bench/overhead.txt
    python -m bench pages runs/bench -o docs/benchmarks.md

Every file of the folder whose last line is a result in JSON becomes a section, or one part of a benchmark that was run
part by part. `make bench` fills the folder and writes the page; results from another machine, such as one with a GPU,
can be put beside them. Benchmarks without a result keep the section that the page has. The same results give the same
page and pictures, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.__main__ import BENCHMARKS

INTRODUCTION = """# Benchmarks

Written by `python -m bench pages`; do not edit. Every table is one run on one machine, in which the contestants took
turns: only the ratios inside a table mean anything. Figures are medians, in brackets the quartiles; ratios are medians
of the ratios within a turn. The peers come with `pip install -e '.[bench]'`, and `make bench` runs everything.
"""
BAR_COLOURS = {"ours": "#1b6ca8", "limit": "#8a8a8a", "": "#d0c8b8"}

Json = Mapping[str, Any]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder; parts that were run one by one are put together."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        result = _last_line(path)
        if result is None:
            continue
        for part in result.get("parts", {}).values():
            part["detail"].setdefault("others_cores", result["detail"].get("others_cores", 0.0))
        known = found.setdefault(result["bench"], result)
        if known is not result:
            if "parts" not in result or "parts" not in known:
                raise ValueError(f"{path}: there is another result of {result['bench']} in {folder}: keep one of them")
            known["parts"] |= result["parts"]
    if not found:
        raise ValueError(f"{folder} has no results: run `python -m bench NAME --json > {folder}/NAME.txt` first")
    return list(found.values())


def _last_line(path: Path) -> dict[str, Any] | None:
    """What a benchmark's output ends with; None for a file that is no such output."""
    lines = path.read_text(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, dict) and "bench" in result else None


def page(results: Iterable[Json], images: Path, *, beside: str, previous: str = "") -> str:
    """The page's text. The pictures are written to `images`, which the page calls `beside`.

    previous: the page so far.
    """
    sections = {section.partition("\n")[0]: section for section in re.split(r"^## ", previous, flags=re.MULTILINE)[1:]}
    for result in results:
        name = _command(result["bench"])
        sections[name] = "\n".join(_section(name, result, images, beside))
    known = list(BENCHMARKS)
    order = sorted(sections, key=lambda name: (known.index(name) if name in known else len(known), name))
    return "\n".join([INTRODUCTION, *(f"## {sections[name].rstrip()}\n" for name in order)])


def _section(name: str, result: Json, images: Path, beside: str) -> list[str]:
    known = BENCHMARKS.get(name)
    lines = [f"{name}\n", f"{_sentence(known.description)}\n" if known else ""]
    lines.append(f"Repeat it with `python -m bench {name} --json`.\n")
    parts: Mapping[str, Json] = result.get("parts") or {"": result}
    for part, measured in parts.items():
        if "spread" not in measured.get("detail", {}):
            lines.append(f"```json\n{json.dumps(measured, indent=1, sort_keys=True)[:2000]}\n```\n")
            continue
        title = f"{result['bench']} {part}".strip()
        picture = f"bench-{title.replace(' ', '-').replace('_', '-')}.png"
        draw(measured, images / picture)
        lines += [f"### {part}\n"] if part else []
        lines += [table(measured), f"![{title}]({beside}/{picture})\n", *_remarks(measured)]
    return [line for line in lines if line]


def _command(bench: str) -> str:
    """The name on the command line, which may have a hyphen where the result has none."""
    return next((name for name in BENCHMARKS if name.replace("-", "_") == bench.replace("-", "_")), bench)


def table(result: Json) -> str:
    """One row per contestant, the best first."""
    detail = result["detail"]
    peaks = detail.get("peak_bytes", {})
    has_peaks = any(peaks.values())
    head = ["", f"{result['unit']}, {detail['better']} is better", f"to {detail['limit']}", *["peak GiB"] * has_peaks]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in _best_first(result):
        spread, ratio = detail["spread"][name], detail["ratio_by_turn"][name]
        shown = f"**{name}**" if name == detail["ours"] else name
        figures = f"{short(spread['median'])} ({short(spread['q1'])} .. {short(spread['q3'])})"
        row = [shown, figures, f"{ratio['median']:.3f} ({ratio['q1']:.3f} .. {ratio['q3']:.3f})"]
        rows.append([*row, *[f"{peaks.get(name, 0) / 2**30:.2f}"] * has_peaks])
    rows += [[name, f"skipped: {why}", *[""] * (len(head) - 2)] for name, why in sorted(detail["skipped"].items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _best_first(result: Json) -> list[str]:
    detail = result["detail"]
    sign = 1 if detail["better"] == "lower" else -1
    return sorted(detail["spread"], key=lambda name: (sign * detail["spread"][name]["median"], name))


def _remarks(result: Json) -> list[str]:
    detail, machine = result["detail"], result["detail"]["machine"]
    lines = []
    if "goal" in result:
        verdict = "reached" if result["reached"] else "missed"
        lines.append(f"Goal: {result['goal']} {result['bound']:g}. Measured: {result['value']:.3f}, {verdict}.\n")
    if detail["notes"] and not detail.get("peak_bytes"):
        lines.append("```text\n" + "\n".join(detail["notes"]) + "\n```\n")
    where = f"{machine['gpu']}, {machine['cpu']}" if machine["gpu"] else machine["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in detail["versions"].items())
    settings = ", ".join(f"{name} {value}" for name, value in detail["settings"].items())
    lines.append(
        f"{where}, {machine['cores']} cores, {detail['date'][:10]}; Python {machine['python']}, {versions}; "
        f"{detail['turns']} turns, while other processes used {detail.get('others_cores', 0.0):.2f} cores. "
        f"{_sentence(settings)}\n"
    )
    return lines


def draw(result: Json, path: Path) -> None:
    """Bars of the medians, with the quartiles as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    detail = result["detail"]
    names = _best_first(result)[::-1]  # the lowest bar comes first
    spreads = [detail["spread"][name] for name in names]
    medians = [spread["median"] for spread in spreads]
    whiskers = [
        [max(0.0, spread["median"] - spread["q1"]) for spread in spreads],
        [max(0.0, spread["q3"] - spread["median"]) for spread in spreads],
    ]
    roles = {detail["limit"]: "limit", detail["ours"]: "ours"}
    figure, axes = pyplot.subplots(figsize=(6.4, 0.6 + 0.32 * len(names)), layout="constrained")
    axes.barh(names, medians, xerr=whiskers, color=[BAR_COLOURS[roles.get(n, "")] for n in names], height=0.65)
    axes.set_xlabel(f"{result['unit']}, {detail['better']} is better")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Neither the date nor matplotlib's version: the same results give the same bytes.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def short(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS_DIR", help="the folder with the benchmarks' output")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/benchmarks.md"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.results.is_dir():
        parser.error(f"{options.results} is no folder: run `make bench` first, which leaves its results in runs/bench")
    try:
        results = read_results(options.results)
    except ValueError as error:
        parser.error(str(error))
    previous = options.output.read_text() if options.output.exists() else ""
    text = page(results, options.output.parent / "images", beside="images", previous=previous)
    options.output.write_text(text)
