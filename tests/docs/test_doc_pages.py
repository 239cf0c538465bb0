"""README and docs name what exists, link to what exists, and quote what the code says."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import paceline as pl

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("**/*.md"))]
# In project files `trainer.` is a section of theirs.
ABOUT_CODE = [page for page in PAGES if page.name not in ("project-files.md", "sample-project.md")]
# What pages call by these names.
OWNERS: dict[str, Any] = {
    "pl": pl,
    "trainer": pl.Trainer,
    "handle": pl.compat.flodl.Handle,
    "ddp": pl.Ddp,
    "record": pl.StepRecord,
}


def code_of(page: Path) -> Iterator[str]:
    """Python blocks, and code inside of sentences and tables; not what other systems call, a table's first column."""
    text = page.read_text()
    yield from re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    if page.name == "coming-from.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def unknown_names(code: str) -> Iterator[str]:
    for owner, name in re.findall(rf"(?<![\w.])({'|'.join(OWNERS)})\.([A-Za-z]\w*)", code):
        if not hasattr(OWNERS[owner], name) and name not in getattr(OWNERS[owner], "__annotations__", {}):
            yield f"{owner}.{name}"


def unknown_arguments(code: str) -> Iterator[str]:
    """Keyword arguments that a function of ours does not take."""
    try:
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return
    for call in calls:
        name = ast.unparse(call.func)
        owner, *path = name.split(".")
        function = OWNERS.get(owner) if path and all(part.isidentifier() for part in path) else None
        for part in path:
            function = getattr(function, part, None)
        if not callable(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            continue
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        yield from (f"{name}({argument}=)" for argument in sorted(given - {p.name for p in parameters}))


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.name)
def test_pages_name_only_what_there_is(page: Path) -> None:
    unknown = {name for code in code_of(page) for check in (unknown_names, unknown_arguments) for name in check(code)}
    assert not unknown, f"{page.name} names what does not exist: {sorted(unknown)}"


def test_a_name_or_an_argument_that_does_not_exist_is_found() -> None:
    assert list(unknown_names("pl.Trainer; pl.Trainr; trainer.step(); trainer.stop()")) == ["pl.Trainr", "trainer.stop"]
    assert list(unknown_arguments("pl.launch(fn, num_worker=2, args=())")) == ["pl.launch(num_worker=)"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", page.read_text())
    for file, anchor in targets:
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {file}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor[1:] in anchors(target), f"{page.name} links to {file}{anchor}, which is no heading there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_are_read_alike_by_git_hosts_and_by_the_site(page: Path) -> None:
    """Python-Markdown wants an empty line above a list, and four spaces before an inner one."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = text.splitlines()
    for above, line in pairwise(lines):
        is_first = re.match(r"([-*]|\d+\.) ", line) and above.strip() and not re.match(r"([-*]|\d+\.) |  ", above)
        assert not is_first, f"{page.name}: put an empty line above {line!r}"
        assert not re.match(r" {1,3}([-*]|\d+\.) ", line), f"{page.name}: indent by four spaces: {line!r}"


def test_the_readme_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def messages() -> str:
    """Every string of the source, with ... where a value is put in, whitespace evened out."""
    texts = []
    for path in (DOCS.parent / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return re.sub(r"\s+", " ", "\n".join(texts))


def test_troubleshooting_quotes_messages_that_the_code_has() -> None:
    page, known = (DOCS / "troubleshooting.md").read_text(), messages()
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    quoted = [line for block in blocks for line in block.splitlines() if "..." in line]
    quoted += re.findall(r'^\| "(.*?)" \|', page, re.MULTILINE)
    assert len(quoted) > 20
    for message in quoted:
        pieces = [piece.strip(" :.") for piece in message.split("...")]
        missing = [piece for piece in pieces if piece not in known]
        assert not missing, f"no message of the code says {missing[0]!r}, which troubleshooting.md quotes"
