"""What the commands have in common: how they are described, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.core.errors import PacelineError
from paceline.observe import formats
from paceline.observe.run_files import RUNS_FOLDER


class EscapingStream:
    """An output stream on which text from files does no harm: see `formats.printable`."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        shown = formats.printable(text)
        encoding = getattr(self.raw, "encoding", None) or "utf-8"
        self.raw.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """While a command that shows what is in files prints."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, EscapingStream(out)), cast(TextIO, EscapingStream(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def print_raw(text: str) -> None:
    """Print text that holds sequences of our own for the terminal, such as colours."""
    stream = sys.stdout.raw if isinstance(sys.stdout, EscapingStream) else sys.stdout
    stream.write(text)


class CommandError(Exception):
    """What the user should know instead of a traceback, and the command's exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def add_command(commands: Any, name: str, what: str, epilog: str) -> argparse.ArgumentParser:
    """A command with its line in the list of commands, and its own help, which ends with `epilog`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_runs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path(RUNS_FOLDER),
        metavar="DIR",
        help="the folder in which runs are looked for (default: %(default)s)",
    )


def reporting(
    name: str, command: Callable[[argparse.Namespace], int], *expected: type[Exception]
) -> Callable[[argparse.Namespace], int]:
    """The command, with `CommandError`, Paceline's errors and those `expected` as one message on stderr.

    A reader that has seen enough (`| head`) is no error.
    """

    reported: tuple[type[Exception], ...] = (CommandError, PacelineError, *expected)

    def run(options: argparse.Namespace) -> int:
        try:
            code = command(options)
            sys.stdout.flush()  # here, where a reader that is gone can be told from an error
            return code
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except reported as error:
            print(f"paceline {name}: {error}", file=sys.stderr)
            return error.code if isinstance(error, CommandError) else 1
        except OSError as error:  # a place that was named cannot be used: a name too long, no permission
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"paceline {name}: {where}{error.strerror or error}", file=sys.stderr)
            return 2
        except ValueError as error:
            if "null byte" not in str(error) and "null character" not in str(error):
                raise
            print(f"paceline {name}: a path cannot hold a null byte", file=sys.stderr)
            return 2

    return run


def columns(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Aligned; the columns with these `numbers` to the right."""
    rows = [[formats.one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def size(num_bytes: float) -> str:
    """ "812 B", "1.23 GB"."""
    text = formats.rate(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{num_bytes:.0f} B"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
