"""docs/project-files.md lists what the schema declares. Run this file to write its tables anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from paceline.cli.config.aliases import MEANINGS
from paceline.cli.config.keys import Key, keys

PAGE = Path(__file__).parents[3] / "docs" / "project-files.md"


def aliases() -> str:
    return "\n".join(["| name | becomes |", "| --- | --- |", *(f"| `{n}` | {m} |" for n, m in MEANINGS.items())])


def settings() -> str:
    return "\n\n".join(
        "\n".join(
            [heading(section, kind), "", "| key | value | default | |", "| --- | --- | --- | --- |", *rows(group)]
        )
        for (section, kind), group in groupby(keys(), lambda key: (key.section, key.kind))
    )


def heading(section: str, kind: str) -> str:
    name = f"`{section}`" if section else "The file itself"
    return f"### {name}" + (f", `kind: {kind}`" if kind else "")


def rows(group: Iterator[Key]) -> Iterator[str]:
    for key in group:
        yield f"| `{key.name}` | {key.allowed} | {f'`{key.default}`' if key.default else ''} | {key.help} |"


TABLES = {"aliases": aliases, "settings": settings}


def written(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", page, re.DOTALL)
    assert found, f"the page has no place for the {name}"
    return found[1].strip()


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_schema(name: str) -> None:
    assert written(PAGE.read_text(), name) == TABLES[name](), f"run python {Path(__file__).name} to write it anew"


def test_every_setting_says_what_it_is_for() -> None:
    for key in keys():
        assert key.help, key
        assert not key.help.endswith("."), key


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, table in TABLES.items():
        text = f"<!-- {name} -->\n\n{table()}\n\n<!-- end -->"
        page = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, text=text: text, page, flags=re.DOTALL)
    PAGE.write_text(page)
