"""The documentation site builds without warnings and without a network, and shows what the code says."""

from __future__ import annotations

import html
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

import paceline as pl

ROOT = Path(__file__).parents[2]
MODULES = [
    *("paceline", "paceline.data", "paceline.errors", "paceline.reports"),
    *("paceline.compat.flodl", "paceline.compat.ggmlr", "paceline.compat.resnetimagenet"),
]

LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")


def script(name: str) -> ModuleType:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """As `make docs` does; a link that leads nowhere is an error. One test, so that it is built once."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    every_public_name_has_an_entry(tmp_path)
    settings_have_their_help_and_their_default(tmp_path)
    nothing_is_loaded_from_a_network(tmp_path)
    the_search_finds_pages_and_names(tmp_path)
    the_site_has_four_kinds_of_pages_and_a_dark_mode(tmp_path)
    the_page_of_the_reference_shows_the_whole_file(tmp_path)


def anchors(page: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text()))


def every_public_name_has_an_entry(site: Path) -> None:
    pages = [site / "api" / path.with_suffix(".html").name for path in (ROOT / "docs" / "api").glob("*.md")]
    entries = set().union(*map(anchors, pages))
    names = {
        name: f"{module}.{name}" for module in reversed(MODULES) for name in importlib.import_module(module).__all__
    }
    missing = [path for path in names.values() if path not in entries]
    assert not missing, f"add `::: {missing[0]}` to a page of docs/api"
    assert "paceline.Trainer.setup" in entries
    overview = (ROOT / "docs" / "api" / "index.md").read_text()
    assert [name for name in names if f"`{name}`" not in overview] == []


def test_every_public_name_says_what_it_is() -> None:
    for name in pl.__all__:
        assert not callable(getattr(pl, name)) or getattr(pl, name).__doc__, f"{name} has no docstring"


def settings_have_their_help_and_their_default(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api" / "settings.html").read_text())
    assert "shuffle_buffer: samples of a stream to draw the next one from (affects the course)" in text
    assert re.search(r"shuffle_buffer:\s*int\s*=\s*0", text)
    assert "setting(" not in text


def nothing_is_loaded_from_a_network(site: Path) -> None:
    loaded = [(page.name, found) for page in site.rglob("*.html") for found in LOADED.findall(page.read_text())]
    assert loaded == []
    assert (site / "javascripts" / "iframe-worker.js").exists()


def the_search_finds_pages_and_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {each["location"] for each in index}
    assert {"index.html", "elastic.html", "api/trainer.html#paceline.Trainer.setup"} <= places


def the_site_has_four_kinds_of_pages_and_a_dark_mode(site: Path) -> None:
    text = (site / "index.html").read_text()
    tabs = re.findall(r'class="md-tabs__link"[^>]*>\s*(?:<[^>]*>\s*)*([\w-]+)', text)
    assert tabs == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    assert 'data-md-color-scheme="slate"' in text


def the_page_of_the_reference_shows_the_whole_file(site: Path) -> None:
    """Every line of examples/reference.py below its imports, but comments between definitions and the class's head."""
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "in-300-lines.html").read_text()))
    shown = {line.strip() for line in text.splitlines()}
    source = (ROOT / "examples" / "reference.py").read_text()
    body = source[source.index("GOLDEN, MASK") : source.index('if __name__ == "__main__"')]
    body = re.sub(r'^class Reference:\n    """.*?"""|^#.*$', "", body, flags=re.MULTILINE)
    assert [line for line in body.splitlines() if line.strip() not in shown] == []


def test_a_page_cannot_show_what_a_file_does_not_define() -> None:
    with pytest.raises(Exception, match=r"examples/reference.py does not define nothing"):
        script("site_hooks").definitions("examples/reference.py", ["mix", "nothing"])


def test_definitions_of_arguments_become_a_list() -> None:
    text = "First line.\n\na, b: numbers,\n    both of them.\nc: text.\n\nLast line: no definition."
    wanted = "First line.\n\n- `a`, `b`: numbers, both of them.\n- `c`: text.\n\nLast line: no definition."
    as_markdown = script("api_docstrings").as_markdown
    assert as_markdown(text) == wanted
    assert as_markdown("What it does.\n\nArgs:\n    a: one,\n        and more.") == (
        "What it does.\n\n- `a`: one, and more."
    )


def test_the_page_of_figures_is_up_to_date() -> None:
    figures = script("make_figures")
    assert figures.PAGE.read_text() == figures.page(), "run: python docs/make_figures.py"


def test_a_table_of_a_benchmark_becomes_a_line() -> None:
    table = "|  | ms, lower is better | to bare loop | peak |\n| --- | ---: | ---: | ---: |\n"
    table += "| **paceline** | 1 (1 .. 2) | 0.9 (0.8 .. 1.0) | 1 |\n| bare loop | 1 | 1.000 (1 .. 1) | 1 |\n"
    table += "| Fabric | 2 (1 .. 3) | 1.2 (1 .. 2) | 1 |\n\nAMD, 2026-11-16; paceline 0.3.0, torch 2.13.0.\n"
    ((title, body),) = script("make_figures").sections(f"# Benchmarks\n\n## gpu\n\nText.\n\n### cnn\n\n{table}")
    cells = ["`gpu: cnn`", "ms, lower is better", "bare loop", "**0.9**", "Fabric 1.2", "0.3.0, 2026-11-16"]
    assert script("make_figures").row(title, body) == cells
