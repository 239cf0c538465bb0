"""`show`: the resolved file, with where each value came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from project_files import FULL, LEAST, PAGE, load

from paceline.cli.config import load_project, show


def test_every_line_with_a_value_says_where_it_came_from(tmp_path: Path) -> None:
    base = "variables: {n: 3}\ntrainer: {save_steps: 4, seed: '${n}'}"
    shown = show(load(tmp_path, f"extends: base.yaml\n{LEAST}", "workers=2", base=base))
    lines = dict(line.split("  # ") for line in shown.splitlines() if "  # " in line)
    origins = {key.strip(): origin for key, origin in lines.items()}
    assert origins["seed: 3"] == "base.yaml:2, ${n} of base.yaml:1"
    assert origins["every_steps: 4"] == "base.yaml:2 (trainer.save_steps)"
    assert origins["epochs: 1"] == "p.yaml:4"
    assert origins["workers: 2"] == "command line"
    assert origins["exact: false"] == "default"
    assert origins["factory: parts:samples"] == "p.yaml:3"
    bare = [line.split(":")[0].strip() for line in shown.splitlines() if "  # " not in line]
    assert bare == ["model", "data", "train", "trainer", "strategy", "checkpoints"]


@pytest.mark.parametrize("text", [LEAST, FULL])
def test_what_is_shown_gives_the_same_settings(text: str, tmp_path: Path) -> None:
    project = load(tmp_path, text)
    for each in (project, project.resolve(2)):
        (tmp_path / "shown.yaml").write_text(show(each))
        again = load_project(tmp_path / "shown.yaml")
        assert again.settings == each.settings
        assert show(again).count("# default") == 0


def test_what_is_shown_is_the_same_for_other_readers_of_yaml(tmp_path: Path) -> None:
    shown = yaml.safe_load(show(load(tmp_path, FULL)))
    assert shown["optimizer"]["arguments"] == {"lr": 0.01}
    assert shown["data"]["train"]["arguments"]["many"] == [1, 2.5, None, "no"]
    assert shown["trainer"]["max_grad_norm"] == math.inf
    assert shown["loss"] == "parts:loss"


def test_all_settings_are_shown(tmp_path: Path) -> None:
    shown = yaml.safe_load(show(load(tmp_path, LEAST)))
    for key in PAGE["keys"]():
        if key.section in ("", "trainer", "checkpoints", "data") and key.default:
            assert key.name in (shown[key.section] if key.section else shown), key


KEYS = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda key: key not in ("factory", "reference", "<<"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.sampled_from(
        ["${x}", "$${", "no", "1e-3", "0x1", "2024-01-01", "a: b", "- a", "a #b", "'", '"', "", "~", "1:30"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_argument_survives_being_shown(tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp() / "shown"
    folder.mkdir(exist_ok=True)
    project = load(folder, LEAST)
    object.__setattr__(project.settings.model, "arguments", arguments)
    (folder / "again.yaml").write_text(show(project))
    assert load_project(folder / "again.yaml").settings.model.arguments == arguments  # type: ignore[union-attr]
