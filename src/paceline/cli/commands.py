"""Shared by all commands: how a command is declared, how it reports errors, and how it prints."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.core.errors import PacelineError
from paceline.observe import formats
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import RUNS_FOLDER

RUN_NOTE = "RUN is a run's folder, its name, or an unambiguous prefix of its name.\n"
# The width of tables.
_NO_LIMIT = 100_000

Command = Callable[[argparse.Namespace], int]


class CommandError(Exception):
    """An error that is printed without a traceback. `code` is the command's exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def add_command(
    commands: Any,
    name: str,
    summary: str,
    notes: str = "",
    *,
    examples: Iterable[str] = (),
    run: Command | None = None,
) -> argparse.ArgumentParser:
    """Add a command to the subparsers `commands`. Its help ends with `notes` and `examples`.

    examples: command lines, without the words that lead to the command.
    run: the function that executes the command and returns its exit code. Its errors are printed as one message.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = [f"  {parser.prog} {example}".rstrip() for example in examples]
    parser.epilog = "\n".join([*([notes] if notes else []), *(["example:", *lines] if lines else [])])
    if run is not None:
        parser.set_defaults(run=_reporting_errors(parser.prog, run))
    return parser


def add_group(commands: Any, name: str, summary: str, examples: Iterable[str]) -> Any:
    """Add a command that consists of further commands; returns their subparsers."""
    return add_command(commands, name, summary, examples=examples).add_subparsers(metavar="COMMAND", required=True)


def add_run_argument(parser: argparse.ArgumentParser, what: str, metavar: str = "RUN", nargs: str = "?") -> None:
    """The name of a run, and `--runs`."""
    parser.add_argument("named", nargs=nargs, metavar=metavar, help=what)
    what = "the folder that holds the runs (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Path(RUNS_FOLDER), metavar="DIR", help=what)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


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


def _reporting_errors(prog: str, command: Command) -> Command:
    """The command with expected errors printed to stderr. A closed output pipe (`| head`) is not an error."""

    def run(options: argparse.Namespace) -> int:
        try:
            code = command(options)
            sys.stdout.flush()  # raises BrokenPipeError here rather than at interpreter exit
            return code
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (CommandError, PacelineError) as error:
            message, code = str(error), error.code if isinstance(error, CommandError) else 1
        except OSError as error:  # a path from the command line is too long or not permitted
            message, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), 2
        except ValueError as error:
            if "null byte" not in str(error) and "null character" not in str(error):
                raise
            message, code = "a path cannot contain a null byte", 2
        print(f"{prog}: {message}", file=sys.stderr)
        return code

    return run


class EscapingStream:
    """An output stream that escapes control characters; see `formats.printable`."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        self.raw.write(_encodable(formats.printable(text), self.raw))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape control characters in everything that is printed. For commands that print the content of files."""
    out, err = (cast(TextIO, EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def raw(stream: TextIO) -> TextIO:
    """The stream without escaping, for terminal sequences such as colors."""
    return stream.raw if isinstance(stream, EscapingStream) else stream


def print_raw(text: str) -> None:
    stream = raw(sys.stdout)
    stream.write(_encodable(text, stream))


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(json.loads(to_json(value)), indent=indent, ensure_ascii=False))


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
    is_terminal = sys.stdout.isatty()
    Console(file=text, force_terminal=is_terminal, width=_NO_LIMIT, markup=False, emoji=False).print(table)
    print_raw("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    shown = [(formats.one_line(name), formats.one_line(value)) for name, value in fields]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"{name:<{width}}  {value}".rstrip())


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
