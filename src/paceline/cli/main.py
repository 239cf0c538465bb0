"""The `paceline` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from paceline import __version__
from paceline.core.errors import WorkerError
from paceline.run import launch, worker
from paceline.run.stopping import Stopped
from paceline.run.worker import STOPPED_EXIT_CODE

_RUN_EXAMPLE = """\
example:
  paceline run train.py --epochs 3              one worker per device
  paceline run --workers 2 train.py --epochs 3  two workers

Options of paceline stand before SCRIPT; everything after it belongs to the script.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    return _run(parser, options)


def _parser() -> _Parser:
    parser = _Parser(prog="paceline", description="One training run, any hardware.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="start a script on all devices of this machine",
        description="Start a script on all devices of this machine, one worker process per device.",
        epilog=_RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--workers", type=_count, metavar="N", help="number of workers (default: one per device)")
    run.add_argument(
        "--max-restarts",
        type=partial(_count, least=0),
        default=0,
        metavar="N",
        help="start the workers again when one fails, at most N times (default: 0)",
    )
    run.add_argument("script", metavar="SCRIPT", help="a Python file")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an integer >= {least}")
    return int(text)


def _run(parser: _Parser, options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        parser.error(f"no such file: {options.script}")
    try:
        launch.workers_to_start(options.workers)
    except ValueError as error:
        parser.error(str(error))
    try:
        launch.run_script(options.script, options.args, options.workers, options.max_restarts)
    except KeyboardInterrupt:
        return 130
    except Stopped:
        return STOPPED_EXIT_CODE
    except WorkerError as error:
        print(f"paceline run: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(worker.user_traceback(error, __file__, launch.__file__), file=sys.stderr, end="")
        return 1
    return 0
