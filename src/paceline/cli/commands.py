"""Shared by all commands: how a command is declared, finds runs, reports errors, and prints."""

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

RUN_NOTE = "RUN is a run's folder, its name, or an unambiguous prefix of its name.\n"
INTERRUPTED_EXIT_CODE = 130  # as after SIGINT
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
    run: the function that executes the command and returns its exit code; None is 0. See `execute`.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = [f"  {parser.prog} {example}".rstrip() for example in examples]
    parser.epilog = "\n".join(filter(None, [notes, "example:" if lines else "", *lines]))
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


def add_group(commands: Any, name: str, summary: str, examples: Iterable[str]) -> Any:
    """Add a command that consists of further commands; returns their subparsers."""
    return add_command(commands, name, summary, examples=examples).add_subparsers(metavar="COMMAND", required=True)


def add_run_argument(parser: argparse.ArgumentParser, what: str, metavar: str = "RUN", nargs: str = "?") -> None:
    """The name of a run, and `--runs`."""
    parser.add_argument("named", nargs=nargs, metavar=metavar, help=what)
    what = "the folder that holds the runs (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Path(RUNS_FOLDER), metavar="DIR", help=what)


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
        raise CommandError(f"{named!r} matches {len(found)} runs: give more of the name{names}")
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
        print_message(options.prog, message)
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
    shown = f"{prog}: {formats.printable(text)}"
    is_terminal = sys.stderr.isatty()
    print(formats.wrapped(shown, terminal_width() - 1) if is_terminal else shown, file=sys.stderr, flush=True)


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def print_json(value: Any, indent: int | None = 2) -> None:
    print(to_json(value, indent=indent))


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows in aligned columns, those with an index in `right` to the right. The first row is the header.

    The output is plain text; only on a terminal the header is bold. No cell is cut or wrapped to fit the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i in right else "left")
    for row in rows[1:]:
        table.add_row(*map(formats.one_line, row))
    text = io.StringIO()
    Console(file=text, force_terminal=sys.stdout.isatty(), width=_NO_LIMIT, markup=False, emoji=False).print(table)
    raw(sys.stdout).writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    shown = {formats.one_line(name): formats.one_line(value) for name, value in fields.items()}
    for name, value in shown.items():
        print(f"{name:<{max(map(len, shown))}}  {value}".rstrip())


def size(num_bytes: float) -> str:
    """ "812 B", "1.23 GB"."""
    text = formats.rate(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{num_bytes:.0f} B"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def count(number: int, noun: str) -> str:
    """ "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
