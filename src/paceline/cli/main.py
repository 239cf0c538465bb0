"""The `paceline` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from paceline import __version__
from paceline.cli.commands import add_command, escaped_output
from paceline.core.errors import WorkerError
from paceline.run.launching import launch, worker
from paceline.run.launching.allocator import restart_with_allocator_settings
from paceline.run.launching.nodes import DEFAULT_JOIN_TIMEOUT_S, Nodes, NodesError
from paceline.run.launching.worker import STOPPED_EXIT_CODE
from paceline.run.saving.stopping import Stopped

_EXAMPLE = """\
`paceline COMMAND --help` describes each command, with examples.

example:
  paceline init spirals            a project to start from
  paceline train 2workers.yaml     a run from a project file
  paceline run train.py            a script of your own, on all devices
  paceline logs plot               how the newest run goes
"""
_RUN_EXAMPLE = """\
Options of paceline stand before SCRIPT; everything after it belongs to the
script. For several machines, give the same command on each; HOST is one of
them. Exit codes: those of `paceline train`, see there.

example:
  paceline run train.py --epochs 3
  paceline run --workers 2 --logs logs train.py --epochs 3
  paceline run --nodes 2 --address HOST:29500 train.py
"""

# In the order of the help text. Each is in the module of its name under `paceline.cli` but for those named here.
_COMMANDS = ("init", "train", "run", "config", "logs", "timeline", "runs", "checkpoints", "devices", "completion")
_MODULES = {"config": "config_commands"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _with_config_last(sys.argv[1:] if argv is None else list(argv))
    if argv is None and arguments[:1] in (["run"], ["train"]):
        restart_with_allocator_settings()
    parser = make_parser(arguments[0] if arguments else None)
    options, others = parser.parse_known_args(arguments)
    # argparse takes positional arguments only where they stand together; KEY=VALUE may stand anywhere.
    if others and not (hasattr(options, "overrides") and all("=" in word and word[0] != "-" for word in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        options.overrides += others
    # What workers print is theirs; everything else may show what is in somebody's files.
    with nullcontext() if arguments[0] in ("run", "train") else escaped_output():
        code: int = options.run(options)
    return code


def _with_config_last(arguments: list[str]) -> list[str]:
    """`-t CONFIG train ...`, as some know it, is `train CONFIG ...`."""
    if len(arguments) >= 3 and arguments[0] == "-t":
        _, config, command, *rest = arguments
        return [command, config, *rest]
    return arguments


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser with all commands; if `command` is one, with that alone: the others' imports would delay it."""
    parser = _Parser(
        prog="paceline",
        description="One training run, any hardware.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [command] if command in _COMMANDS and command != "completion" else _COMMANDS:
        if name == "run":
            _add_run(commands)
        elif name == "completion":  # it completes all the others
            import_module("paceline.cli.completion").add_parser(commands, parser)
        else:
            import_module(f"paceline.cli.{_MODULES.get(name, name)}").add_parser(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = add_command(commands, "run", "start a script on all devices of this machine, or of several", _RUN_EXAMPLE)
    run.add_argument("--workers", type=_count, metavar="N", help="number of workers (default: one per device)")
    run.add_argument(
        "--logs",
        metavar="DIR",
        help="append the output of each rank to DIR/rank-R.out and DIR/rank-R.err; rank 0's is shown here too",
    )
    run.add_argument(
        "--max-restarts",
        type=partial(_count, least=0),
        default=0,
        metavar="N",
        help="start the workers again when one fails, at most N times (default: 0)",
    )
    run.add_argument("--nodes", type=_count, default=1, metavar="N", help="number of machines (default: 1)")
    run.add_argument("--address", metavar="HOST:PORT", help="where they meet: one of them, and a free port on it")
    run.add_argument(
        "--join-timeout",
        type=_count,
        default=int(DEFAULT_JOIN_TIMEOUT_S),
        metavar="S",
        help="how many seconds to wait for the other machines (default: %(default)s)",
    )
    run.add_argument(
        "--secret-file",
        metavar="FILE",
        help="what the machines know each other by: a random text, the same on all, that only you can read",
    )
    run.add_argument("script", metavar="SCRIPT", help="a Python file")
    arguments = run.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    arguments.required = False  # else argparse names it among what is missing when nothing is given
    run.set_defaults(run=partial(_run, run))


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: choose an integer >= {least}")
    return int(text)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        parser.error(f"no such file: {options.script}")
    try:
        nodes = Nodes(options.nodes, options.address, options.join_timeout, options.secret_file)
        count = launch.workers_to_start(options.workers)
        how = launch.Launch(count, options.max_restarts, options.logs, nodes)
    except ValueError as error:
        parser.error(str(error))
    try:
        launch.run_script(options.script, options.args, how)
    except KeyboardInterrupt:
        return 130
    except Stopped:
        return STOPPED_EXIT_CODE
    except (WorkerError, NodesError) as error:
        print(f"paceline run: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(worker.user_traceback(error, __file__, launch.__file__), file=sys.stderr, end="")
        return 1
    return 0
