"""`paceline config show`: a project file with all settings resolved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.commands import CommandError, add_command, add_group
from paceline.cli.config import ConfigError, load_project, show


def add_parser(commands: Any) -> None:
    group = add_group(commands, "config", "look at project files", ("show 2workers.yaml",))
    examples = ("2workers.yaml", "2workers.yaml trainer.seed=3 --workers 4")
    summary = "print a project file resolved, with the origin of each value"
    parser = add_command(group, "show", summary, examples=examples, run=_show)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a project file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that override the file's")
    parser.add_argument("--workers", type=int, metavar="N", help="resolve per-worker values for N workers")


def _show(options: argparse.Namespace) -> int:
    try:
        project = load_project(options.config, options.overrides)
        if options.workers is not None:
            project = project.resolve(options.workers)
    except (ConfigError, ValueError) as error:
        raise CommandError(str(error), 2) from error
    print(show(project), end="")
    return 0
