"""Commands called in the test's own process, and what their help must be."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def invoke(add_parser: Callable[[Any], None], *arguments: object) -> Ended:
    """`paceline ...`, with only those commands that `add_parser` adds."""
    parser = argparse.ArgumentParser(prog="paceline")
    add_parser(parser.add_subparsers())
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            options = parser.parse_args([*map(str, arguments)])
            code = options.run(options)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def check_help(add_parser: Callable[[Any], None]) -> None:
    """Every command's help fits 80 columns, describes every argument, and ends with an example."""
    parser = argparse.ArgumentParser(prog="paceline")
    commands = parser.add_subparsers()
    add_parser(commands)
    for command in _all_below(commands):
        text = command.format_help()
        assert max(map(len, text.splitlines())) <= 80, text
        assert f"\nexample:\n  {command.prog}" in text, text
        for action in command._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{command.prog}: {action}"


def _all_below(commands: Any) -> Iterator[argparse.ArgumentParser]:
    for command in commands.choices.values():
        yield command
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from _all_below(action)
