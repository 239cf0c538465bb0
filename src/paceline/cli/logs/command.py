"""`paceline logs list`, `summary` and `plot`: looking at runs, also while they go on and after they were broken off."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.commands import add_command, add_runs_option, print_raw, reporting
from paceline.cli.logs.panels import Panel, load_runs, make_panels
from paceline.cli.logs.picture import check_output, draw, write
from paceline.cli.logs.runs import LogsError, choose_run, choose_runs, find_runs
from paceline.cli.logs.summary import FORMATS, render, table
from paceline.cli.logs.text_plot import MIN_WIDTH, TextStyle, text_plot
from paceline.observe.run_files import RUNS_FOLDER, RunFiles
from paceline.observe.summary import glance, summarize

# A text plot wider than this is no easier to read.
MAX_TEXT_WIDTH = 110
VIEWERS = ("xdg-open", "open")

_LOGS_EXAMPLE = """\
example:
  paceline logs list
  paceline logs summary --all --format md
  paceline logs plot --compare 2workers 4workers -o losses.png
"""
_LIST_EXAMPLE = """\
A run is "live", "finished", "stopped" (it was asked to), "failed" (with an
error) or "broken off" (its process is gone and left no word).

example:
  paceline logs list
  paceline logs list /data/runs
"""
_SUMMARY_EXAMPLE = """\
RUN is a run's folder, its name, or the beginning of a name that no other
run has.

example:
  paceline logs summary
  paceline logs summary 2workers_2026-11-15 --format json
  paceline logs summary --all --format one-line
"""
_PLOT_EXAMPLE = """\
RUN is a run's folder, its name, or the beginning of a name that no other
run has. Without -o and -e the plot is drawn in the terminal.

example:
  paceline logs plot
  paceline logs plot 2workers --smooth 20 -o 2workers.png
  paceline logs plot 2workers --compare 1worker 4workers --x-axis time
  paceline logs plot --metrics eval/accuracy,waiting -e
"""


def add_parser(commands: Any) -> None:
    """Add `logs` to the parser's commands; each of its commands sets `run`, a function from options to exit code."""
    logs = add_command(commands, "logs", "look at runs: list, summary, plot", _LOGS_EXAMPLE)
    kinds = logs.add_subparsers(metavar="COMMAND", required=True)
    _add_list(kinds)
    _add_summary(kinds)
    _add_plot(kinds)


def run_list(options: argparse.Namespace) -> int:
    return reporting("logs list", _list, LogsError)(options)


def run_summary(options: argparse.Namespace) -> int:
    return reporting("logs summary", _summary, LogsError)(options)


def run_plot(options: argparse.Namespace) -> int:
    return reporting("logs plot", _plot, LogsError)(options)


def _add_list(kinds: Any) -> None:
    parser = add_command(kinds, "list", "list the runs in a folder, the oldest first", _LIST_EXAMPLE)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(RUNS_FOLDER),
        metavar="DIR",
        help="the folder that holds the runs' folders (default: %(default)s)",
    )
    parser.set_defaults(run=run_list)


def _add_summary(kinds: Any) -> None:
    parser = add_command(kinds, "summary", "tell a run's state, losses and speed", _SUMMARY_EXAMPLE)
    parser.add_argument("named", nargs="*", metavar="RUN", help="the runs (default: the newest)")
    parser.add_argument("--all", action="store_true", help="all runs in the folder")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        metavar="FORMAT",
        help=f"one of {', '.join(FORMATS)} (default: %(default)s)",
    )
    add_runs_option(parser)
    parser.set_defaults(run=run_summary)


def _add_plot(kinds: Any) -> None:
    parser = add_command(kinds, "plot", "draw a run's curves, or several runs' together", _PLOT_EXAMPLE)
    parser.add_argument("named", nargs="?", metavar="RUN", help="the run (default: the newest)")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="further runs, in the same axes")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--metrics",
        type=_names,
        default=[],
        metavar="A,B",
        help="what to draw, a panel each, such as loss,eval/loss,waiting (default: loss, evaluations, learning rate, "
        "gradient norm, throughput; as text only the loss)",
    )
    what.add_argument("--loss-curves", action="store_true", help="only the losses of training and evaluation")
    parser.add_argument(
        "--x-axis",
        choices=("step", "epoch", "time"),
        default="step",
        metavar="AXIS",
        help="step, epoch, or time of training (default: %(default)s)",
    )
    parser.add_argument(
        "--smooth",
        type=_window,
        default=1,
        metavar="N",
        help="draw each value's mean with its neighbours, N in all; what was measured stays in sight, faintly",
    )
    parser.add_argument(
        "--log-scale",
        action="store_true",
        help="logarithmic y axes, for losses and gradient norm or for the chosen metrics, where all values are "
        "positive",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")
    parser.add_argument(
        "-e",
        "--open",
        action="store_true",
        help="open the picture in the system's viewer (without -o it is written to the run's folder plots/)",
    )
    add_runs_option(parser)
    parser.set_defaults(run=run_plot)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r}: give names with a comma between them, such as loss,lr")
    return names


def _window(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an integer >= 1")
    return int(text)


def _list(options: argparse.Namespace) -> int:
    runs = find_runs(options.folder)
    print(table([glance(files) for files in runs]) if runs else f"no runs in {options.folder}")
    return 0


def _summary(options: argparse.Namespace) -> int:
    if options.all and options.named:
        raise LogsError("--all and names of runs were given: leave one of them out")
    runs = choose_runs(options.named, options.runs, all_of_them=options.all)
    print(render([summarize(files) for files in runs], options.format))
    return 0


def _plot(options: argparse.Namespace) -> int:
    runs = [choose_run(options.named, options.runs)]
    if options.compare:
        runs = choose_runs([str(runs[0].root), *options.compare], options.runs, all_of_them=False)
    picture = _picture_path(options, runs)
    if picture is not None:
        check_output(picture)
    # As text one panel after the other would run out of the screen.
    only_loss = options.loss_curves or (picture is None and not options.metrics)
    only = [*(options.metrics or ["loss", "eval/loss"]), options.x_axis] if options.metrics or only_loss else None
    panels = make_panels(
        load_runs(runs, is_smoothed=options.smooth > 1, only=only),
        metrics=options.metrics,
        only_loss=only_loss,
        x_axis=options.x_axis,
        smooth=options.smooth,
        log_scale=options.log_scale,
    )
    if picture is None:
        _print_plots(panels, runs)
        return 0
    title = runs[0].root.name if len(runs) == 1 else f"{len(runs)} runs compared"
    write(draw(panels, title), picture)
    print(picture)
    return _open(picture) if options.open else 0


def _picture_path(options: argparse.Namespace, runs: Sequence[RunFiles]) -> Path | None:
    if options.output is not None or not options.open:
        return options.output  # type: ignore[no-any-return]
    what = "loss" if options.loss_curves else "-".join(options.metrics) or "overview"
    folder = runs[0].plots
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise LogsError(f"{folder} cannot be made ({error.strerror}): name a file with -o") from error
    return folder / f"{re.sub(r'[^a-z0-9_-]+', '_', what.lower())}{'-compared' if len(runs) > 1 else ''}.png"


def _print_plots(panels: Sequence[Panel], runs: Sequence[RunFiles]) -> None:
    style = TextStyle(
        width=max(min(shutil.get_terminal_size().columns, MAX_TEXT_WIDTH), MIN_WIDTH),
        has_unicode="utf" in (sys.stdout.encoding or "").lower(),
        has_color=sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb",
    )
    print(", ".join(files.root.name for files in runs))
    for panel in panels:
        print_raw(f"\n{text_plot(panel, style)}\n")


def _open(picture: Path) -> int:
    viewer = next(filter(None, map(shutil.which, VIEWERS)), None)
    if viewer is None:
        print(
            f"paceline logs plot: no viewer was found ({', '.join(VIEWERS)}): open the file yourself", file=sys.stderr
        )
        return 1
    # Through a shell that ends at once: the viewer belongs to nobody, and stays open when this terminal is closed.
    detached = '"$0" "$1" </dev/null >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", detached, viewer, str(picture)], start_new_session=True, check=False)
    return 0
