"""`paceline config show`: a project file as the run would see it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.cli.commands import add_command
from paceline.cli.config import ConfigError, load_project, show

_EXAMPLE = """\
example:
  paceline config show 2workers.yaml
  paceline config show 2workers.yaml trainer.seed=3 --workers 4
"""


def add_parser(commands: Any) -> None:
    config = add_command(commands, "config", "look at project files", _EXAMPLE)
    kinds = config.add_subparsers(metavar="COMMAND", required=True)
    parser = add_command(kinds, "show", "print a project file resolved, and where each value came from", _EXAMPLE)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a project file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that win over the file's")
    parser.add_argument("--workers", type=int, metavar="N", help="resolve what is given per worker for so many")
    parser.set_defaults(run=run_show)


def run_show(options: argparse.Namespace) -> int:
    try:
        project = load_project(options.config, options.overrides)
        if options.workers is not None:
            project = project.resolve(options.workers)
    except (ConfigError, ValueError) as error:
        print(f"paceline config show: {error}", file=sys.stderr)
        return 2
    print(show(project), end="")
    return 0
