"""Writes docs/commands.md: the help of every command. Run it after changing a command: python docs/make_commands.py"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.main import make_parser

PAGE = Path(__file__).parent / "commands.md"
HEAD = """\
# Commands

What `paceline COMMAND --help` says, for all commands. Written by `python docs/make_commands.py`.
"""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands, in the order of its help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from parsers(command)


def page() -> str:
    os.environ["COLUMNS"] = "80"  # argparse asks the terminal otherwise
    parts = [f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n" for parser in parsers(make_parser())]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
