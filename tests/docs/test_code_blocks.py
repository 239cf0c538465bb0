"""Every Python block of README.md and docs/ runs, in order, one namespace per file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli.config import load_project

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCED = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "yaml", "console", "text"}


def python_blocks(text: str) -> list[str]:
    """The Python blocks, each after as many empty lines as stand above it, so that tracebacks show the page's lines."""
    return [
        "\n" * text.count("\n", 0, block.start("code")) + block["code"]
        for block in FENCED.finditer(text)
        if block["language"] == "python"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_pages_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"code_of_{page.stem}"}
    for code in python_blocks(page.read_text()):
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    unknown = {block["language"] for block in FENCED.finditer(page.read_text())} - LANGUAGES
    assert not unknown, (
        f"{page.name} has blocks marked {unknown}, which no test would run: mark them python, yaml, console or text"
    )


def test_the_readme_has_python_to_run() -> None:
    assert python_blocks((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_pages_project_files_load(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(FENCED.finditer(page.read_text())):
        if block["language"] == "yaml":
            path = tmp_path / f"block-{number}.yaml"
            path.write_text(block["code"])
            load_project(path)


def test_blocks_are_found_at_their_lines_and_others_left_out() -> None:
    page = "# Title\n\n```python\nx = 1\n```\n\n```console\n$ make test\n```\n\n```python\ny = x\n```\n"
    assert python_blocks(page) == ["\n\n\nx = 1\n", "\n" * 11 + "y = x\n"]
