"""The guide shows what the files under examples/ hold; the files run, alone and on two workers."""

from __future__ import annotations

import ast
import re
import runpy
from contextlib import chdir
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from worker_pool import WorkerPool

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / "examples" / "guide").glob("0*.py"))
PORTS = ["cnn", "char_gpt", "bert_classifier"]
MOST_CHANGED_LINES = 5
GUIDE = ROOT / "docs" / "guide.md"


def blocks_of_step(number: int) -> list[str]:
    """The Python blocks between this step's heading and the next heading."""
    (section,) = re.findall(rf"^## Step {number}: .*?(?=^## )", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def statements(code: str) -> list[str]:
    """The text of every statement at the top level, without the docstring."""
    docstring, *body = ast.parse(code).body
    assert isinstance(docstring, ast.Expr)
    return [ast.get_source_segment(code, statement) or "" for statement in body]


def diff(name: str) -> str:
    """From the plain program to its Paceline version, as the guide shows it."""
    plain, ported = ((ROOT / "examples" / folder / f"{name}.py").read_text() for folder in ("plain", "guide"))
    _, _, *lines = unified_diff(plain.splitlines(keepends=True), ported.splitlines(keepends=True), n=1)
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def run(path: Path, folder: Path) -> dict[str, Any]:
    """What `python PATH` does, in this process and this folder; the names the script leaves."""
    with chdir(folder):
        return runpy.run_path(str(path), run_name="__main__")


def run_steps(folder: Path) -> tuple[list[float], str]:
    """On every worker the third to the fifth step: their losses, and the digest of the last one's weights."""
    left = [run(path, folder) for path in STEPS[2:]]
    return [names["test_loss"] for names in left], left[-1]["digest"]


def test_there_are_five_steps() -> None:
    assert [path.name[:2] for path in STEPS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_the_guide_shows_the_steps_file(path: Path) -> None:
    number, code = int(path.name[:2]), path.read_text()
    for block in blocks_of_step(number):
        assert block in code, f"step {number} of docs/guide.md shows what examples/guide/{path.name} does not hold"
    shown = "".join(block for step in range(1, number + 1) for block in blocks_of_step(step))
    missing = [statement for statement in statements(code) if statement not in shown]
    assert not missing, f"docs/guide.md shows nowhere up to step {number} what {path.name} holds:\n{missing[0]}"


@pytest.mark.timeout(200)
def test_the_steps_give_the_same_on_one_worker_and_on_two(pool: WorkerPool, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    losses, digest = run_steps(alone)
    for other_losses, other_digest in pool.run(run_steps, 2, together):
        assert other_losses == pytest.approx(losses, rel=1e-3)
        assert other_digest == digest


def test_the_checkpoints_step_can_be_run_again(tmp_path: Path) -> None:
    once, again = (run(STEPS[3], tmp_path) for _ in range(2))
    assert once["first_loss"] > once["test_loss"] == again["first_loss"] == again["test_loss"]


@pytest.mark.parametrize("name", PORTS)
def test_a_plain_program_is_ported_by_changing_few_lines_which_the_guide_shows(name: str) -> None:
    changes = diff(name)
    added = [line for line in changes.splitlines() if line.startswith("+") and line[1:].strip()]
    assert 1 <= len(added) <= MOST_CHANGED_LINES, "\n".join(added)
    assert f"```text\n{changes}```\n" in GUIDE.read_text(), f"docs/guide.md must show this diff of {name}:\n{changes}"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", PORTS)
def test_a_program_and_its_port_reach_about_the_same_loss(name: str, tmp_path: Path) -> None:
    if name == "bert_classifier":
        pytest.importorskip("transformers")
    plain, ported = (
        run(ROOT / "examples" / folder / f"{name}.py", tmp_path)["test_loss"] for folder in ("plain", "guide")
    )
    assert ported == pytest.approx(plain, abs=0.05)


def test_every_program_of_the_guide_is_tested_here() -> None:
    folders = ROOT / "examples"
    assert {path.stem for path in (folders / "plain").glob("*.py")} == set(PORTS)
    assert {path.stem for path in (folders / "guide").glob("*.py")} == {*PORTS, *(path.stem for path in STEPS)}
