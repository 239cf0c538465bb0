"""`paceline init`: a small project to start from."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.cli.commands import CommandError, add_command, reporting

FILES = ("config.yaml", "model.py", "data.py", "README.md")
# What stands for the project's name in them.
_NAME = "PROJECT_NAME"
# A folder under version control counts as empty.
_MAY_BE_THERE = {".git"}
_MAX_LISTED = 10

_EXAMPLE = """\
The project classifies points on spirals: it trains at once, in seconds, and
its files say what to put in place of what.

exit codes:
  0    the files are written
  1    they could not be
  2    the command is wrong, or the folder has files; nothing was written

example:
  paceline init spirals
  cd spirals
  paceline train config.yaml
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "init", "write a small project that trains at once", _EXAMPLE)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    parser.add_argument("--name", metavar="NAME", help="what the project is called (default: as the folder)")
    parser.set_defaults(run=reporting("init", init))


def init(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    name = folder.resolve().name if options.name is None else options.name
    if not name.strip() or not name.isprintable():
        raise CommandError(f"the project cannot be called {name!r}: give it a --name of one line", code=2)
    _check_is_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        text = files("paceline.cli.templates").joinpath(file).read_text(encoding="utf-8")
        with (folder / file).open("x", encoding="utf-8") as target:
            target.write(text.replace(_NAME, name))
    print(_next_steps(folder))
    return 0


def _check_is_empty(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CommandError(f"{folder} is a file: name a new folder, or an empty one", code=2)
    found = sorted(path.name for path in folder.iterdir() if path.name not in _MAY_BE_THERE)
    if found:
        shown = ", ".join(found[:_MAX_LISTED]) + (", ..." if len(found) > _MAX_LISTED else "")
        raise CommandError(
            f"{folder} has files, and none is overwritten: {shown}; name a new folder, or an empty one", code=2
        )


def _next_steps(folder: Path) -> str:
    go_there = "" if folder.resolve() == Path.cwd() else f"  cd {folder}\n"
    return f"""\
{folder} has {", ".join(FILES)}

next:
{go_there}\
  paceline train config.yaml --dry-run   what a run would be
  paceline train config.yaml             train, on all devices
  paceline logs plot                     how it went"""
