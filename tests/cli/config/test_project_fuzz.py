"""Whatever stands in a file: a project or a `ConfigError`, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from project_files import FULL, PAGE, load

from paceline.cli.config import ConfigError, Project, load_project, show

NAMES = st.sampled_from(
    [
        *dict.fromkeys(key.name for key in PAGE["keys"]()),
        *PAGE["ALIASES"],
        *(
            "extends",
            "variables",
            "model",
            "data",
            "trainer",
            "checkpoints",
            "factory",
            "reference",
            "arguments",
            "kind",
        ),
    ]
)
WORDS = st.sampled_from(["a:b", "${x}", "${env:HOME}", "cadence", "averaging", "tokens", "auto", "no", "p.yaml", "cpu"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 10) | st.integers() | st.floats() | WORDS | st.text(max_size=20)
STRUCTURES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=5),
    max_leaves=25,
)
# Characters that mean something in YAML, or in a project file.
TEXTS = st.text(st.sampled_from("abx019 \n\t:-[]{},&*!|>'\"%@`#?~$.\\\u2028\x85\xe9\U0001f600"), max_size=200)

FEW = settings(max_examples=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def outcome(folder: Path, data: bytes, overrides: tuple[str, ...] = ()) -> Project | ConfigError:
    """Loads it; anything else than these two is raised."""
    path = folder / "p.yaml"
    path.write_bytes(data)
    try:
        project = load_project(path, overrides, {"HOME": "/home"})
        show(project.resolve(2))
    except ConfigError as error:
        str(error).encode()  # can be printed
        return error
    return project


@FEW
@given(st.binary(max_size=200))
def test_any_bytes(folder: Path, data: bytes) -> None:
    outcome(folder, data)


@FEW
@given(TEXTS)
def test_any_text_that_looks_like_yaml(folder: Path, text: str) -> None:
    outcome(folder, text.encode("utf-8", "surrogatepass"))


@FEW
@given(st.dictionaries(NAMES, STRUCTURES, max_size=8))
def test_any_structure(folder: Path, structure: dict[str, Any]) -> None:
    outcome(folder, yaml.safe_dump(structure, allow_unicode=True).encode("utf-8", "surrogatepass"))


@FEW
@given(st.data())
def test_any_change_of_a_file_that_is_right(folder: Path, data: st.DataObject) -> None:
    load_changed(folder, data)


@pytest.mark.soak
@pytest.mark.timeout(600)
@settings(max_examples=500)
@given(st.data())
def test_many_changes_of_a_file_that_is_right(folder: Path, data: st.DataObject) -> None:
    load_changed(folder, data)


def load_changed(folder: Path, data: st.DataObject) -> None:
    """FULL with some values replaced, which reaches deeper than a file that is all random."""
    structure = yaml.safe_load(FULL)
    for _ in range(data.draw(st.integers(1, 3))):
        holder = structure
        while True:
            key = data.draw(st.sampled_from(sorted(holder))) if holder else data.draw(NAMES)
            if isinstance(holder.get(key), dict) and data.draw(st.booleans()):
                holder = holder[key]
                continue
            if data.draw(st.booleans()):
                key = data.draw(NAMES)
            holder[key] = data.draw(STRUCTURES)
            break
    outcome(folder, yaml.safe_dump(structure, allow_unicode=True).encode("utf-8", "surrogatepass"))


@FEW
@given(st.data())
def test_any_slip_in_the_text_of_a_file_that_is_right(folder: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(FULL)))
    end = data.draw(st.integers(start, min(len(FULL), start + 20)))
    outcome(folder, (FULL[:start] + data.draw(TEXTS) + FULL[end:]).encode("utf-8", "surrogatepass"))


@FEW
@given(
    st.lists(st.tuples(NAMES, NAMES, TEXTS).map(lambda o: f"{o[0]}.{o[1]}={o[2]}") | st.text(max_size=20), max_size=3)
)
def test_any_command_line(folder: Path, overrides: list[str]) -> None:
    outcome(folder, FULL.encode(), tuple(overrides))


def test_the_file_that_the_slips_are_made_in_is_right(tmp_path: Path) -> None:
    assert load(tmp_path, FULL).settings.trainer.max_steps == 100
