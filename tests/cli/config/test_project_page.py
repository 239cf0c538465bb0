"""docs/project-files.md has the settings and aliases that the code has."""

from __future__ import annotations

from project_files import PAGE

from paceline.cli.config.aliases import ACCEPTED_IN


def test_the_tables_are_up_to_date() -> None:
    assert PAGE["PAGE"].read_text() == PAGE["page"](), "run: python docs/make_project_files.py"


def test_every_alias_is_documented() -> None:
    assert set().union(*ACCEPTED_IN.values()) == set(PAGE["ALIASES"])


def test_every_setting_has_a_help_text() -> None:
    for key in PAGE["keys"]():
        assert key.help, key
        assert not key.help.endswith("."), key
