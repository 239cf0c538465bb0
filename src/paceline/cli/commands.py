"""Shared by all commands: declaring a command, finding runs, reporting errors, and printing."""

from __future__ import annotations

import argparse
import io
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.core.errors import PacelineError
from paceline.observe import formats
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import RUNS_FOLDER, RunFiles, last_sign, read_status

RUN_NOTE = "RUN is a run's name, an unambiguous prefix of it, its folder, or a file in it.\n"
INTERRUPTED_EXIT_CODE = 130  # as after SIGINT
# How cells with these texts are shown on a terminal with colors.
_STYLES = {"live": "cyan", "finished": "green", "stopped": "yellow", "failed": "red", "crashed": "red"}
_NO_LIMIT = 100_000  # the width of tables

Command = Callable[[argparse.Namespace], int | None]


class CommandError(Exception):
    """An error that is printed without a traceback. `code` is the command's exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def add_command(
    commands: Any, name: str, summary: str, notes: str = "", *, examples: Iterable[str] = (), run: Command | None = None
) -> argparse.ArgumentParser:
    """Add a command to the subparsers `commands`. Its help ends with `notes` and `examples`.

    examples: command lines, without the words that lead to the command.
    run: the function that executes the command and returns its exit code; None is 0. See `execute`. Its options have
    the `parser`, for errors of the command line.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = [f"  {parser.prog} {example}".rstrip() for example in examples]
    parser.epilog = "\n".join(filter(None, [notes, "example:" if lines else "", *lines]))
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_group(commands: Any, name: str, summary: str, examples: Iterable[str]) -> Any:
    """Add a command that consists of further commands; returns their subparsers."""
    return add_command(commands, name, summary, examples=examples).add_subparsers(metavar="COMMAND")


def add_run_argument(parser: argparse.ArgumentParser, what: str, metavar: str = "RUN", nargs: str = "?") -> None:
    """The name of a run, and `--runs`."""
    parser.add_argument("named", nargs=nargs, metavar=metavar, help=what)
    what = "the folder that holds the runs (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Path(RUNS_FOLDER), metavar="DIR", help=what)


def refuse_ignored(options: argparse.Namespace, ignored: Iterable[str], why: str) -> None:
    """Options that the command would ignore are an error, if they are given. why: such as "without --wait"."""
    for option in ignored:
        if is_given(options, option):
            raise CommandError(f"{option} would be ignored {why}: leave it out", 2)


def is_given(options: argparse.Namespace, option: str) -> bool:
    """Whether an option, such as "--wait", differs from its default."""
    action = options.parser._option_string_actions[option]
    return bool(getattr(options, action.dest) != action.default)


def integer(minimum: int) -> Callable[[str], int]:
    """A type of command-line arguments."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r}: choose an integer >= {minimum}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """A type of command-line arguments."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: choose a number of seconds > 0")
    return value


def find_runs(folder: Path) -> list[RunFiles]:
    """The runs in a folder, the oldest first. Other entries are skipped."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise CommandError(f"{folder} {problem}: choose the folder that holds your runs")
    runs = [files for path in folder.iterdir() if (files := RunFiles(path)).is_run]

    def started(files: RunFiles) -> float:
        status = read_status(files)
        return status.started if status else last_sign(files)

    return sorted(runs, key=lambda files: (started(files), files.root.name))


def all_runs(folder: Path) -> list[RunFiles]:
    """As `find_runs`, but a folder without runs is an error."""
    if runs := find_runs(folder):
        return runs
    raise CommandError(f"there is no run in {folder}: a run's folder has a status.json or a metrics.jsonl")


def choose_run(named: str | None, folder: Path) -> RunFiles:
    """The run with this path, name in `folder`, or unambiguous prefix of a name. None is the newest run."""
    if named is None:
        return all_runs(folder)[-1]
    path = Path(named)
    if path.is_file():  # one of its files, such as metrics.jsonl or ranks/rank-0.err
        path = next((folder for folder in list(path.absolute().parents)[:2] if RunFiles(folder).is_run), path)
    if RunFiles(path).is_run:
        return RunFiles(path)
    if path.is_dir() and ("/" in named or not folder.is_dir()):
        raise CommandError(f"{path} is not a run: it has neither status.json nor metrics.jsonl")
    runs = {files.root.name: files for files in find_runs(folder)}
    found = [named] if named in runs else [name for name in runs if name.startswith(named)]
    if len(found) == 1:
        return runs[found[0]]
    if found:
        names = "".join(f"\n  {name}" for name in found)
        raise CommandError(f"{named!r} matches {len(found)} runs: use a longer prefix{names}")
    nearest = get_close_matches(named, runs, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise CommandError(f"there is no run {named!r} in {folder}{hint} (`paceline logs list {folder}` lists all runs)")


def execute(options: argparse.Namespace) -> int:
    """Run a command that prints the content of files, and return its exit code.

    Control characters in its output are escaped. Expected errors are printed to stderr. A closed output pipe, as of
    `| head`, is not an error.
    """
    out, err = (cast(TextIO, _EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: int = options.run(options) or 0
            sys.stdout.flush()  # raises BrokenPipeError here rather than at interpreter exit
            return code
        except KeyboardInterrupt:
            return INTERRUPTED_EXIT_CODE
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (CommandError, PacelineError) as error:
            message, code = str(error), getattr(error, "code", 1)
        except OSError as error:  # a path from the command line is too long or not permitted
            message, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), 2
        print_message(options.parser.prog, message)
        return code


class _EscapingStream:
    """An output stream that escapes control characters, and characters that the stream's encoding lacks."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self.raw.write(formats.printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream without escaping, for terminal sequences such as colors."""
    return stream.raw if isinstance(stream, _EscapingStream) else stream


def print_message(prog: str, text: str) -> None:
    """To stderr; on a terminal, broken between words."""
    shown, stream = f"{prog}: {formats.printable(text)}", raw(sys.stderr)
    if stream.isatty():
        shown = formats.wrapped(shown, terminal_width() - 1)
    if has_color(stream):
        shown = f"\x1b[1m{prog}:\x1b[0m{shown.removeprefix(f'{prog}:')}"
    print(shown, file=stream, flush=True)


def has_color(stream: TextIO) -> bool:
    """See https://no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def print_json(value: Any, indent: int | None = 2) -> None:
    print(to_json(value, indent=indent))


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = (), optional: Sequence[int] = ()) -> None:
    """Print rows in aligned columns, those with an index in `right` to the right. The first row is the header.

    optional: columns to leave out, in this order, until the table fits the terminal's width. No cell is cut or wrapped.
    The output is plain text; on a terminal the header is bold and states have colors, unless NO_COLOR is set.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    widths = [max(len(line) for row in rows for line in row[i].split("\n")) for i in range(len(rows[0]))]
    shown, left_out = list(range(len(widths))), list(optional)
    while left_out and sum(widths[i] + 2 for i in shown) - 2 > terminal_width():
        shown.remove(left_out.pop(0))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in shown:
        table.add_column(rows[0][i], justify="right" if i in right else "left")
    for row in rows[1:]:
        table.add_row(*(Text(formats.one_line(row[i]), _STYLES.get(row[i], "")) for i in shown))
    text = io.StringIO()
    Console(file=text, force_terminal=sys.stdout.isatty(), width=_NO_LIMIT, markup=False, emoji=False).print(table)
    raw(sys.stdout).writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    shown = {formats.one_line(name): formats.one_line(value) for name, value in fields.items()}
    for name, value in shown.items():
        print(f"{name:<{max(map(len, shown))}}  {value}".rstrip())


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def count(number: int, noun: str) -> str:
    """ "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
