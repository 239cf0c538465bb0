"""The help text of every command."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import pytest

from paceline.cli.main import make_parser

MAKER = Path(__file__).parents[2] / "docs" / "make_commands.py"
MADE = runpy.run_path(str(MAKER))
PARSERS = {parser.prog: parser for parser in MADE["parsers"](make_parser())}


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_expected_commands_exist() -> None:
    commands = {name.removeprefix("paceline ") for name in PARSERS}
    assert {"train", "init", "run", "config show", "devices", "timeline", "completion"} <= commands
    assert {f"logs {kind}" for kind in ("list", "summary", "plot")} <= commands
    assert {f"runs {kind}" for kind in ("status", "save", "stop", "abort")} <= commands
    assert {f"checkpoints {kind}" for kind in ("list", "inspect", "components", "verify", "export")} <= commands


@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_80_columns_describes_every_option_and_gives_an_example(name: str) -> None:
    parser = PARSERS[name]
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 80
    assert parser.description
    assert "\nexample:\n  paceline" in text
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help, f"{name} says nothing about {action.option_strings or action.dest}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse lays help out differently in other versions")
def test_commands_page_is_up_to_date() -> None:
    assert MADE["PAGE"].read_text() == MADE["page"](), "run: python docs/make_commands.py"
