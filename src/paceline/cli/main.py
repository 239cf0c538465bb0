"""The `paceline` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from paceline import __version__
from paceline.cli.commands import INTERRUPTED_EXIT_CODE, CommandError, add_command, add_group, execute, integer

_EPILOG = """\
`paceline COMMAND --help` describes each command, with examples.

example:
  paceline init spirals            create a project
  paceline train 2workers.yaml     train from a project file
  paceline -t 2workers.yaml train  the same
  paceline run train.py            run your own script on all devices
  paceline watch --open            show runs in the browser, live
  paceline logs plot               plot the newest run
"""
_RUN_NOTE = """\
Options of paceline come before SCRIPT. Everything after it is passed to the
script. On several machines, use the same command on each; HOST is one of
them. The exit codes are the same as of `paceline train`.
"""
_RENDEZVOUS_NOTE = """\
Serves the nodes of `paceline run --nodes MIN:MAX --address HOST:PORT`. Without
this command the first node serves the rendezvous, and the run ends with that
node.
"""
# In the order of the help text. `run`, `rendezvous` and `config` are in this file, every other one in the module of its
# name.
_COMMANDS = (
    *("init", "train", "run", "rendezvous", "config", "plan", "watch", "logs", "doctor", "timeline", "runs"),
    *("checkpoints", "devices", "completion"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(sys.argv[1:] if argv is None else list(argv), is_command=argv is None)
    except KeyboardInterrupt:  # mostly while modules are imported
        return INTERRUPTED_EXIT_CODE


def _main(arguments: list[str], *, is_command: bool) -> int:
    command = "".join((arguments[2:] if arguments[:1] == ["-t"] else arguments)[:1])
    if is_command and command in ("run", "train"):
        from paceline.run.launching.allocator import restart_with_allocator_settings

        restart_with_allocator_settings()
    parser = make_parser(command)
    options, others = parser.parse_known_args(arguments)
    if hasattr(options, "overrides") and not any(word.startswith("-") for word in others):
        _sort_words(options, others)
    elif others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.run is None:  # `paceline`, `paceline runs`
        options.parser.print_help(sys.stderr)
        return 2
    if options.project_file is not None:
        parser.error(f"-t {options.project_file} is for `train`, `plan` and `config show`: leave it out")
    # The output of workers is passed on unchanged. Other commands print the content of files.
    return int(options.run(options)) if command in ("run", "train", "rendezvous") else execute(options)


def _sort_words(options: argparse.Namespace, others: list[str]) -> None:
    """CONFIG and KEY=VALUE may be given anywhere, CONFIG also with -t. argparse accepts them only in one place."""
    words = [str(word) for word in (options.project_file, options.config) if word is not None]
    words += [*options.overrides, *others]
    config = next((word for word in words if "=" not in word or os.path.lexists(word)), None)
    if config is not None:
        words.remove(config)
    options.config, options.overrides = None if config is None else Path(config), words
    options.project_file = None


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The parser with all commands, or with `command` alone: importing the others takes time."""
    parser = _Parser(
        prog="paceline",
        description="One training run, any hardware.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    what = "the project file of `train`, `plan` and `config show`: `-t CONFIG train` is `train CONFIG`"
    parser.add_argument("-t", dest="project_file", metavar="CONFIG", help=what)
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    own = {"run": _add_run, "rendezvous": _add_rendezvous, "config": _add_config}
    for name in [command] if command in _COMMANDS else _COMMANDS:
        add_parser = own.get(name) or import_module(f"paceline.cli.{name}").add_parser
        add_parser(commands)
    return parser


def _add_config(commands: Any) -> None:
    group = add_group(commands, "config", "inspect project files", ("show 2workers.yaml",))
    examples = ("2workers.yaml", "2workers.yaml trainer.seed=3 --workers 4")
    summary = "print a project file resolved, with the origin of each value"
    parser = add_command(group, "show", summary, examples=examples, run=_show)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a project file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that override the file's")
    parser.add_argument("--workers", type=integer(1), metavar="N", help="resolve per-worker values for N workers")


def _show(options: argparse.Namespace) -> None:
    from paceline.cli.config import load_project, show

    if options.config is None:
        raise CommandError("CONFIG is missing: give a project file", 2)
    try:
        project = load_project(options.config, options.overrides)
        print(show(project if options.workers is None else project.resolve(options.workers)), end="")
    except ValueError as error:
        raise CommandError(str(error), 2) from error


def _add_run(commands: Any) -> None:
    from paceline.run.launching.nodes import DEFAULT_JOIN_TIMEOUT_S

    summary = "run a script on all devices of this machine, or of several machines"
    examples = (
        "train.py --epochs 3",
        "--workers 2 --logs logs train.py --epochs 3",
        "--nodes 2 --address HOST:29500 train.py",
    )
    parser = add_command(commands, "run", summary, _RUN_NOTE, examples=examples, run=_run)
    add = parser.add_argument
    add("--workers", type=integer(1), metavar="N", help="number of workers (default: one per device)")
    what = "append the output of each rank to DIR/rank-R.out and DIR/rank-R.err; rank 0's is also shown here"
    add("--logs", type=Path, metavar="DIR", help=what)
    what = "restart the workers when one fails, at most N times (default: 0); with --min-workers only the one that died"
    add("--max-restarts", type=integer(0), default=0, metavar="N", help=what)
    what = "continue without workers that die, as long as N are left"
    add("--min-workers", type=integer(1), metavar="N", help=what)
    what = "with --min-workers: a micro-batch that takes longer counts as a death (default: from measured times)"
    add("--stall", type=float, metavar="S", help=what)
    what = "number of machines (default: 1); MIN:MAX for machines that may come and go"
    add("--nodes", type=_nodes, default=(1, 0), metavar="N", help=what)
    add("--address", metavar="HOST:PORT", help="the rendezvous: one of the machines, and a free port on it")
    what = "how many seconds to wait for the other machines (default: %(default)s)"
    add("--join-timeout", type=integer(1), default=int(DEFAULT_JOIN_TIMEOUT_S), metavar="S", help=what)
    what = "a secret that authenticates the machines: a random text, the same on all, readable only by you"
    add("--secret-file", metavar="FILE", help=what)
    add("script", metavar="SCRIPT", help="a Python file")
    arguments = add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    arguments.required = False  # otherwise argparse lists it among the missing arguments


def _add_rendezvous(commands: Any) -> None:
    summary = "serve the rendezvous of machines that may come and go"
    examples = ("--address HOST:29500",)
    parser = add_command(commands, "rendezvous", summary, _RENDEZVOUS_NOTE, examples=examples, run=_rendezvous)
    what = "an address of this machine that all nodes can reach, and a free port"
    parser.add_argument("--address", metavar="HOST:PORT", required=True, help=what)


def _rendezvous(options: argparse.Namespace) -> int:
    from paceline.run.launching.nodes import NodesError, keep_store

    try:
        keep_store(options.address)
    except ValueError as error:
        options.parser.error(str(error))
    except NodesError as error:
        print(f"paceline rendezvous: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _nodes(text: str) -> tuple[int, int]:
    """The number of machines, as its minimum and its maximum; 0 for the maximum if the number is fixed."""
    least, colon, most = text.partition(":")
    if not least.isdecimal() or int(least) < 1 or (colon and not most.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: choose an integer >= 1, or MIN:MAX such as 1:4")
    return int(least), int(most or 0)


def _run(options: argparse.Namespace) -> int:
    from paceline.core.errors import WorkerError
    from paceline.run.launching import launch, worker
    from paceline.run.launching.nodes import Nodes, NodesError
    from paceline.run.saving.stopping import Stopped

    if not Path(options.script).is_file():
        options.parser.error(f"no such file: {options.script}")
    try:
        least, most = options.nodes
        nodes = Nodes(least, options.address, options.join_timeout, options.secret_file, most)
        count = launch.workers_to_start(options.workers)
        how = launch.Launch(
            count, options.max_restarts, options.logs, nodes, min_workers=options.min_workers, stall_s=options.stall
        )
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        options.parser.error(str(error))
    except OSError as error:
        options.parser.error(f"--logs {options.logs} cannot be created: {error.strerror}")
    try:
        launch.run_script(options.script, options.args, how)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except Stopped:
        return worker.STOPPED_EXIT_CODE
    except (WorkerError, NodesError) as error:
        print(f"paceline run: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(worker.user_traceback(error, __file__, launch.__file__), file=sys.stderr, end="")
        return 1
    return 0
