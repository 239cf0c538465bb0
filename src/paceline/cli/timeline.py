"""`paceline timeline`: what each worker of a run did when, in numbers, as a page, or for other viewers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cli.commands import CommandError, add_command, add_runs_option, reporting
from paceline.cli.logs.runs import LogsError, choose_run
from paceline.observe.timeline.sessions import timeline_files
from paceline.observe.timeline.timeline import Timeline

FORMATS: dict[str, Callable[[Timeline], str]] = {
    "html": Timeline.to_html,
    "chrome": Timeline.to_chrome,
    "json": Timeline.to_json,
    "csv": Timeline.to_csv,
}
# Idle times that the text mentions.
MAX_GAPS = 5

_EXAMPLE = """\
RUN is a run's folder, its name, or the beginning of a name that no other
run has; or a folder that was given to Runtime(timeline=...).

  text    a table of where each worker's time went
  html    one page with lanes per worker; it opens offline
  chrome  a trace for ui.perfetto.dev and chrome://tracing
  json, csv   everything, for programs of your own

The columns: compute (forward and backward), data (waiting for it), wait (for
slower workers), sync (exchanging), optim(izer), saving (copying a
checkpoint), eval(uation), and other, which is time beside all that.

example:
  paceline timeline
  paceline timeline 2workers --format html
  paceline timeline 2workers --from 100 --to 200 --format chrome -o trace.json
"""


def add_parser(commands: Any) -> None:
    """Add `timeline` to the parser's commands; it sets `run`, a function from options to exit code."""
    parser = add_command(commands, "timeline", "show what each worker did when", _EXAMPLE)
    parser.add_argument("named", nargs="?", metavar="RUN", help="the run (default: the newest)")
    parser.add_argument(
        "--format",
        choices=("text", *FORMATS),
        metavar="FORMAT",
        help="text, html, chrome, json or csv (default: as -o ends, without -o text)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write a file (default: timeline.html in the run's folder for html, else the terminal)",
    )
    parser.add_argument("--from", type=_step, dest="first", metavar="STEP", help="leave out the steps before this one")
    parser.add_argument("--to", type=_step, dest="last", metavar="STEP", help="leave out the steps after this one")
    parser.add_argument(
        "--idle",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="mention times in which a worker had nothing to compute for at least S seconds (default: %(default)g)",
    )
    add_runs_option(parser)
    parser.set_defaults(run=reporting("timeline", _show, LogsError))


def _show(options: argparse.Namespace) -> int:
    folder = _folder(options.named, options.runs)
    name = _format(options)
    try:
        timeline = Timeline.load(folder)
        if options.first is not None or options.last is not None:
            timeline = timeline.between(options.first, options.last)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    text = _text(timeline, options.idle) if name == "text" else FORMATS[name](timeline)
    output = options.output or (folder / "timeline.html" if name == "html" else None)
    if output is None:
        print(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise CommandError(f"{output} cannot be written ({error.strerror}): name another file with -o") from error
    print(output)
    return 0


def _folder(named: str | None, runs: Path) -> Path:
    if named is not None and timeline_files(Path(named)):
        return Path(named)
    return choose_run(named, runs).root


def _format(options: argparse.Namespace) -> str:
    if options.format is not None:
        return str(options.format)
    if options.output is None:
        return "text"
    suffix = options.output.suffix.lower()
    by_suffix = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv", ".txt": "text"}
    if suffix not in by_suffix:
        raise CommandError(
            f"-o {options.output} does not tell a format: end it with .html, .json or .csv, or --format", 2
        )
    return by_suffix[suffix]


def _text(timeline: Timeline, idle_s: float) -> str:
    lines = [f"{timeline.name}: {timeline.duration_s:.1f} s", "", str(timeline.summary())]
    gaps = timeline.idle_gaps(idle_s)
    if gaps:
        longest = "" if len(gaps) <= MAX_GAPS else f", the longest {MAX_GAPS} of them"
        lines += ["", f"{len(gaps)} times of {idle_s:g} s and more with nothing to compute{longest}:"]
        lines += [
            f"  rank {gap.rank} after step {gap.step}, at {gap.start:.1f} s: {gap.seconds:.1f} s, mostly {gap.cause}"
            for gap in gaps[:MAX_GAPS]
        ]
    alarms = [event for event in timeline.events if event.name in ("fault", "broken off", "restart", "stop")]
    lines += [""] * bool(alarms)
    lines += [
        f"  rank {event.rank} after step {event.step}, at {event.time:.1f} s: {event.name}"
        + (f" ({event.details['error']}: {event.details.get('text', '')})" if "error" in event.details else "")
        for event in alarms[-MAX_GAPS:]
    ]
    return "\n".join(lines)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: choose the number of a step, such as 100")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: choose a number of seconds > 0")
    return seconds
