"""`paceline watch`: the command line."""

from __future__ import annotations

import argparse
import getpass
import os
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cli import commands as cli
from paceline.cli.commands import CommandError
from paceline.observe.run_files import RunFiles

# The run that a page shows often uses all cores of this machine: it goes first.
NICENESS = 10
_NOTE = """\
RUN is a run's folder, its name, an unambiguous prefix of its name, or a folder
that holds runs. The page shows them while they train and afterwards. It is
served to this machine only; the address contains a secret token. The training
processes are not slowed down: the page reads the files that they write anyway.
"""


def add_parser(commands: Any) -> None:
    examples = ("", "2workers --open", "/data/runs --port 9000", "2workers --export run.html")
    summary = "show runs in the browser, live"
    parser = cli.add_command(commands, "watch", summary, _NOTE, examples=examples, run=_watch)
    cli.add_run_argument(parser, "the runs, or a folder that holds runs (default: all in --runs)", nargs="*")
    what = "the port to listen on (default: 8642, or a free one; 0: a free one)"
    parser.add_argument("--port", type=_port, metavar="N", help=what)
    what = "the address to listen on (default: %(default)s); with others, other machines can connect, with the token"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=what)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    what = "write one page with the runs (default: the newest) to FILE and exit; it opens without a server"
    parser.add_argument("--export", type=Path, metavar="FILE", help=what)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: choose a port from 0 to 65535")
    return int(text)


def _watch(options: argparse.Namespace) -> None:
    if options.export is not None:
        _export(options)
        return
    folder, chosen = _selection(options)
    try:
        from paceline.cli.watch.runs import Runs
        from paceline.cli.watch.server import WatchServer
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11", "anyio"):
            raise
        raise CommandError(f"{error.name} is not installed: pip install 'paceline[watch]'") from error

    server = WatchServer(Runs(folder, chosen), options.host, options.port)
    print(f"{server.address}\nCtrl-C ends the server; runs go on.", flush=True)
    if line := tunnel_line(os.environ.get("SSH_CONNECTION", ""), server.port):
        print(f"On your own machine, for the address above: {line}", flush=True)
    if options.open:
        webbrowser.open(server.address)
    with suppress(OSError, AttributeError):  # the latter on macOS
        os.nice(NICENESS)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # when it wakes up, it interrupts nobody
    server.run()


def tunnel_line(connection: str, port: int) -> str | None:
    """The command that makes the page reachable from where the SSH connection comes from; None without one."""
    match connection.split():
        case [_, _, host, ssh_port]:
            other_port = "" if ssh_port == "22" else f" -p {ssh_port}"
            return f"ssh -N -L {port}:127.0.0.1:{port}{other_port} {getpass.getuser()}@{host}"
    return None


def _selection(options: argparse.Namespace) -> tuple[Path, list[Path] | None]:
    """The folder that holds the runs, and the chosen runs if they are not all in it."""
    named: list[str] = options.named
    if len(named) == 1 and Path(named[0]).is_dir() and not RunFiles(Path(named[0])).is_run:
        return Path(named[0]).resolve(), None
    if not named:
        if not options.runs.is_dir():
            raise CommandError(f"{options.runs} does not exist: choose the folder that holds your runs")
        return options.runs.resolve(), None
    paths = list({cli.choose_run(name, options.runs).root.resolve(): None for name in named})
    return paths[0].parent, paths


def _export(options: argparse.Namespace) -> None:
    from paceline.cli.watch.export import export_html

    cli.refuse_ignored(options, ("--port", "--host", "--open"), "with --export")
    if not options.named:
        options.named = [str(cli.choose_run(None, options.runs).root)]
    options.export.write_text(export_html(*_selection(options)), encoding="utf-8")
    print(options.export)
