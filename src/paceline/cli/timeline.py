"""`paceline timeline`: the workers' activities as a table, a page, or a trace for other viewers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli import commands as cli
from paceline.cli.commands import CommandError
from paceline.observe.timeline.files import timeline_files
from paceline.observe.timeline.timeline import Timeline

FORMATS = ("text", "html", "chrome", "json", "csv")
SUFFIXES = {".html": "html", ".htm": "html", ".json": "json", ".csv": "csv", ".txt": "text"}
# The text lists at most this many idle times and events.
MAX_LISTED = 5

_NOTE = """\
RUN is a run's folder, its name, an unambiguous prefix of its name, or the
folder that was given to Runtime(timeline=...).

  text    a table of where each worker's time went
  html    a page with one lane per worker; opens offline
  chrome  a trace for ui.perfetto.dev and chrome://tracing
  json, csv   all recorded data

The columns of the table: compute (forward and backward), data (waiting for
data), wait (waiting for slower workers), sync (exchanging gradients),
optim(izer), saving (copying a checkpoint), eval(uation), and other.
"""


def add_parser(commands: Any) -> None:
    examples = ("", "2workers --format html", "2workers --from 100 --to 200 --format chrome -o trace.json")
    summary = "show where each worker's time went"
    parser = cli.add_command(commands, "timeline", summary, _NOTE, examples=examples, run=_timeline)
    cli.add_run_argument(parser, "the run (default: the newest)")
    what = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} (default: from the suffix of FILE, text without -o)"
    parser.add_argument("--format", choices=FORMATS, metavar="FORMAT", help=what)
    what = "write to a file (default: the terminal; for html, timeline.html in the run's folder)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    parser.add_argument("--from", type=cli.integer(0), dest="first", metavar="STEP", help="leave out earlier steps")
    parser.add_argument("--to", type=cli.integer(0), dest="last", metavar="STEP", help="leave out later steps")
    what = "list times in which a worker did not compute for at least S seconds (default: %(default)g)"
    parser.add_argument("--idle", type=cli.seconds, default=1.0, metavar="S", help=what)


def _timeline(options: argparse.Namespace) -> None:
    has_files = options.named is not None and timeline_files(Path(options.named))
    folder = Path(options.named) if has_files else cli.choose_run(options.named, options.runs).root
    output: Path | None = options.output
    form = options.format or ("text" if output is None else SUFFIXES.get(output.suffix.lower()))
    if form is None:
        raise CommandError(f"-o {output}: unknown suffix: choose .html, .json or .csv, or give --format", 2)
    if form != "text":
        cli.refuse_ignored(options, ("--idle",), f"with --format {form}")
    try:
        timeline = Timeline.load(folder)
        if options.first is not None or options.last is not None:
            timeline = timeline.between(options.first, options.last)
    except ValueError as error:
        raise CommandError(str(error)) from error
    text = _text(timeline, options.idle) if form == "text" else getattr(timeline, f"to_{form}")()
    if output is None and form != "html":
        print(text)
    else:
        path = output or folder / "timeline.html"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        print(path)


def _text(timeline: Timeline, idle_s: float) -> str:
    lines = [f"{timeline.name}: {timeline.duration_s:.1f} s", "", str(timeline.summary())]
    if gaps := timeline.idle_gaps(idle_s):
        longest = f", the longest {MAX_LISTED}" if len(gaps) > MAX_LISTED else ""
        lines += ["", f"{len(gaps)} idle times of at least {idle_s:g} s{longest}:"]
        lines += [
            f"  rank {gap.rank} after step {gap.step}, at {gap.start:.1f} s: {gap.seconds:.1f} s, mostly {gap.cause}"
            for gap in gaps[:MAX_LISTED]
        ]
    alarms = [event for event in timeline.events if event.name in ("fault", "crashed", "restart", "stop")]
    lines += [""] * bool(alarms)
    for event in alarms[-MAX_LISTED:]:
        error = f" ({event.details['error']}: {event.details.get('text', '')})" if "error" in event.details else ""
        lines.append(f"  rank {event.rank} after step {event.step}, at {event.time:.1f} s: {event.name}{error}")
    return "\n".join(lines)
