"""`paceline logs list`, `summary` and `plot`, of runs that are live, have ended, or were killed."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli import commands as cli
from paceline.cli.commands import or_dash
from paceline.cli.logs.panels import make_panels
from paceline.cli.logs.picture import check_output, draw, write
from paceline.cli.logs.text_plot import MIN_WIDTH, text_plot
from paceline.observe import formats
from paceline.observe.run_files import RUNS_FOLDER, RunFiles
from paceline.observe.summary import Comparison, Summary, compare, summarize
from paceline.observe.summary import text as summary_text

FORMATS = ("text", "json", "md", "one-line")
# Wider text plots are not easier to read.
MAX_TEXT_WIDTH = 110
VIEWERS = ("xdg-open", "open")

_LIST_NOTE = """\
A run is "live", "finished", "stopped" (on request), "failed" (with an error),
"crashed" (its process died without a report) or "unknown".
"""
_PLOT_NOTE = f"{cli.RUN_NOTE}Without -o and -e, the plot is printed as text.\n"
# Options of images and text plots.
_OF_PLOTS = ("--metrics", "--loss-curves", "--x-axis", "--smooth", "--log-scale")
_MARKDOWN_COLUMNS = (
    *(("run", "---"), ("state", "---"), ("steps", "---:"), ("trained", "---:"), ("loss", "---:"), ("lowest", "---:")),
    *(("evaluation", "---"), ("samples/s", "---:"), ("speed-up", "---:"), ("efficiency", "---:")),
)


def add_parser(commands: Any) -> None:
    examples = ("list", "summary --all --format md", "plot 2workers 4workers -o losses.png")
    group = cli.add_group(commands, "logs", "inspect runs: list, summary, plot", examples)

    summary = "list the runs in a folder, the oldest first"
    parser = cli.add_command(group, "list", summary, _LIST_NOTE, examples=("", "/data/runs"), run=_list)
    what = "the folder that holds the runs (default: %(default)s)"
    parser.add_argument("folder", nargs="?", type=Path, default=Path(RUNS_FOLDER), metavar="DIR", help=what)

    summary = "print a run's state, losses and speed"
    uses = ("", "2workers_2026-11-15 --format json", "--all --format one-line", "4workers --baseline 1worker")
    parser = cli.add_command(group, "summary", summary, cli.RUN_NOTE, examples=uses, run=_summary)
    cli.add_run_argument(parser, "the runs (default: the newest)", nargs="*")
    parser.add_argument("--all", action="store_true", help="all runs in the folder")
    what = "also print the speed-up over this run, and the efficiency: the speed-up per worker"
    parser.add_argument("--baseline", metavar="RUN", help=what)
    what = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} (default: %(default)s)"
    parser.add_argument("--format", choices=FORMATS, default="text", metavar="FORMAT", help=what)

    summary = "plot the metrics of one or several runs"
    plots = (
        "",
        "2workers --smooth 20 -o 2workers.png",
        "1worker 2workers 4workers --x-axis time",
        "--metrics eval/accuracy,waiting -e",
    )
    parser = cli.add_command(group, "plot", summary, _PLOT_NOTE, examples=plots, run=_plot)
    cli.add_run_argument(parser, "the runs, in the same axes (default: the newest)", nargs="*")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="more runs to draw")
    selection = parser.add_mutually_exclusive_group()
    what = (
        "metrics to plot, with a panel for each, such as loss,eval/loss,waiting (default: loss, evaluations, learning "
        "rate, gradient norm, throughput; as text, only the loss)"
    )
    selection.add_argument("--metrics", type=re.compile(r"\s*,\s*").split, default=[], metavar="A,B", help=what)
    selection.add_argument("--loss-curves", action="store_true", help="plot only training and evaluation losses")
    what = "step, epoch, or time of training (default: %(default)s)"
    parser.add_argument("--x-axis", choices=("step", "epoch", "time"), default="step", metavar="AXIS", help=what)
    what = "smooth with a centered moving average over N values; the original values are drawn faintly"
    parser.add_argument("--smooth", type=cli.integer(1), default=1, metavar="N", help=what)
    what = (
        "use logarithmic y axes for the chosen metrics, by default for losses and the gradient norm, if all values "
        "are positive"
    )
    parser.add_argument("--log-scale", action="store_true", help=what)
    what = "write an image (.png, .svg, .pdf), or a page with all metrics (.html)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    what = "open the image in the system's viewer; without -o it is written to plots/ in the run's folder"
    parser.add_argument("-e", "--open", action="store_true", help=what)


def _list(options: argparse.Namespace) -> None:
    rows = [
        (
            run.name,
            run.state,
            _steps(run),
            formats.loss(run.train_loss.last if run.train_loss else None),
            or_dash(run.samples_per_s, formats.rate),
            or_dash(run.training_s or None, formats.duration),
            or_dash(run.started, lambda time: formats.moment(time, "%Y-%m-%d %H:%M")),
        )
        for run in (summarize(files, tail=True) for files in cli.find_runs(options.folder))
    ]
    if rows:
        header = ("run", "state", "step", "loss", "samples/s", "trained", "started")
        cli.print_table([header, *rows], right=range(2, 6), optional=(6, 5, 4, 3))
    else:
        print(f"no runs in {options.folder}")


def _summary(options: argparse.Namespace) -> None:
    if options.all and options.named:
        raise cli.CommandError("--all cannot be combined with names of runs")
    runs = cli.all_runs(options.runs) if options.all else _choose_runs(options.named or [None], options.runs)
    baseline = None if options.baseline is None else summarize(cli.choose_run(options.baseline, options.runs))
    summaries = [(run, None if baseline is None else compare(run, baseline)) for run in map(summarize, runs)]
    if options.format == "json":
        documents = [asdict(run) | ({"comparison": asdict(found)} if found else {}) for run, found in summaries]
        cli.print_json(documents if len(documents) != 1 else documents[0])
    elif options.format == "md":
        columns = zip(*_MARKDOWN_COLUMNS[: None if baseline else -2], strict=True)
        heads = [f"| {' | '.join(cells)} |" for cells in columns]
        print("\n".join([*heads, *(_markdown_row(run, found, baseline is not None) for run, found in summaries)]))
    elif options.format == "one-line":
        print("\n".join(_line(run, found) for run, found in summaries))
    else:
        print("\n\n".join(summary_text(run, found) for run, found in summaries))


def _markdown_row(run: Summary, comparison: Comparison | None, is_compared: bool) -> str:
    cells = [
        run.name,
        run.state,
        _steps(run),
        formats.duration(run.training_s),
        formats.loss(run.train_loss.last if run.train_loss else None),
        formats.loss(run.train_loss.lowest if run.train_loss else None),
        ", ".join(_evaluations(run)) or "-",
        or_dash(run.samples_per_s, formats.rate),
    ]
    if is_compared:
        cells += ["-", "-"] if comparison is None else [f"{comparison.speed_up:.2f}", f"{comparison.efficiency:.0%}"]
    return f"| {' | '.join(formats.one_line(cell).replace('|', '/') for cell in cells)} |"


def _line(run: Summary, comparison: Comparison | None) -> str:
    parts = [f"{run.name}: {run.state}", f"step {_steps(run)}"]
    parts += [f"loss {formats.loss(run.train_loss.last)}"] if run.train_loss else []
    parts += _evaluations(run)
    parts += [f"{formats.rate(run.samples_per_s)} samples/s"] if run.samples_per_s is not None else []
    parts += [f"{comparison.speed_up:.2f} times {comparison.baseline}"] if comparison else []
    return formats.one_line(", ".join([*parts, formats.duration(run.training_s)]))


def _evaluations(run: Summary) -> list[str]:
    return [f"{name} {formats.loss(reached.last)}" for name, reached in run.evaluation.items()]


def _steps(run: Summary) -> str:
    return f"{run.step}" if run.total_steps is None else f"{run.step}/{run.total_steps}"


def _choose_runs(named: Sequence[str | None], folder: Path) -> list[RunFiles]:
    """Several runs, without duplicates."""
    chosen = [cli.choose_run(name, folder) for name in named]
    return list({files.root.resolve(): files for files in chosen}.values())


def _plot(options: argparse.Namespace) -> None:
    runs = _choose_runs([*(options.named or [None]), *options.compare], options.runs)
    image: Path | None = options.output
    if image is None and options.open:
        what = "loss" if options.loss_curves else "-".join(options.metrics) or "overview"
        name = re.sub(r"[^a-z0-9_-]+", "_", what.lower())
        image = runs[0].plots / f"{name}{'-compared' if len(runs) > 1 else ''}.png"
        image.parent.mkdir(exist_ok=True)
    if image is not None and image.suffix.lower() == ".html":
        cli.refuse_ignored(options, _OF_PLOTS, "in a page, which has all metrics and these choices")
        _write_page(runs, image)
        if options.open:
            _open(image)
        return
    if image is not None:
        check_output(image)
    # Several panels as text would not fit on a screen.
    only_loss = options.loss_curves or (image is None and not options.metrics)
    panels = make_panels(
        runs,
        metrics=options.metrics,
        only_loss=only_loss,
        x_axis=options.x_axis,
        smooth=options.smooth,
        log_scale=options.log_scale,
    )
    if image is not None:
        write(draw(panels, runs[0].root.name if len(runs) == 1 else f"{len(runs)} runs"), image)
        print(image)
        if options.open:
            _open(image)
        return
    width = max(min(shutil.get_terminal_size().columns, MAX_TEXT_WIDTH), MIN_WIDTH)
    has_unicode = "utf" in (sys.stdout.encoding or "").lower()
    has_color = cli.has_color(sys.stdout)
    print(", ".join(files.root.name for files in runs))
    for panel in panels:
        text = text_plot(panel, width, has_unicode=has_unicode, has_color=has_color)
        cli.raw(sys.stdout).write(f"\n{text}\n")


def _write_page(runs: Sequence[RunFiles], path: Path) -> None:
    """The page of `paceline watch` in one file."""
    from paceline.cli.watch.export import export_html

    chosen = [files.root.resolve() for files in runs]
    path.write_text(export_html(chosen[0].parent, chosen), encoding="utf-8")
    print(path)


def _open(image: Path) -> None:
    viewer = next(filter(None, map(shutil.which, VIEWERS)), None)
    if viewer is None:
        raise cli.CommandError(f"no viewer was found ({', '.join(VIEWERS)}): open {image} yourself")
    # The shell exits immediately. The viewer is detached and stays open when this terminal is closed.
    detached = '"$0" "$1" </dev/null >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", detached, viewer, str(image)], start_new_session=True, check=False)
