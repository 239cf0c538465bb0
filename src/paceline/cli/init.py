"""`paceline init`: write a small project to start from."""

from __future__ import annotations

import argparse
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.cli.commands import CommandError, add_command

FILES = ("config.yaml", "model.py", "data.py", "README.md")
# The placeholder for the project's name in the templates.
_NAME = "PROJECT_NAME"

_NOTE = """\
The project classifies points on spirals. It trains in seconds, and comments in
its files say what to replace.

exit codes:
  0    the files are written
  2    invalid command line, or the folder is not empty or cannot be written

example:
  paceline init spirals
  cd spirals
  paceline train config.yaml
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "init", "write a small project that is ready to train", _NOTE, run=_init)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--name", metavar="NAME", help="the project's name (default: the folder's name)")


def _init(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    name = folder.resolve().name if options.name is None else options.name
    if not name.strip() or not name.isprintable():
        raise CommandError(f"invalid project name {name!r}: choose a --name of one line", 2)
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file: choose a new or empty folder", 2)
    if any(path.name != ".git" for path in folder.glob("*")):
        raise CommandError(f"{folder} is not empty: choose a new or empty folder", 2)
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        text = files("paceline.cli.templates").joinpath(file).read_text(encoding="utf-8")
        with (folder / file).open("x", encoding="utf-8") as target:
            target.write(text.replace(_NAME, name))
    change_folder = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    print(f"""\
{folder} has {", ".join(FILES)}

next:
{change_folder}\
  paceline train config.yaml --dry-run   check the project without training
  paceline train config.yaml             train on all devices
  paceline logs plot                     plot the loss""")
