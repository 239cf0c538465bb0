"""Files that extend others, variables, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from project_files import LEAST, error_of, load

BASE = """\
model:
  factory: parts:build_model
  arguments: {width: 8, depth: 2, names: [a, b]}
data:
  train: {factory: "parts:samples"}
trainer:
  epochs: 1
  global_batch: 8
  learning_rate: 0.1
  strategy: {kind: averaging, every: 4, first_step: 9}
"""

# A file that extends BASE, and what comes of it: where, and what.
MERGED: dict[str, tuple[str, Any]] = {
    "": ("model.arguments", {"width": 8, "depth": 2, "names": ["a", "b"]}),
    "model: {arguments: {width: 9}}": ("model.arguments", {"width": 9, "depth": 2, "names": ["a", "b"]}),
    "model: {arguments: {names: [c]}}": ("model.arguments", {"width": 8, "depth": 2, "names": ["c"]}),
    "model: {arguments: null}": ("model.arguments", {}),
    "model: {arguments: {width: null}}": ("model.arguments", {"width": None, "depth": 2, "names": ["a", "b"]}),
    "model: {factory: 'parts:other'}": ("model.arguments", {}),
    "model: {factory: 'parts:build_model', arguments: {width: 9}}": (
        "model.arguments",
        {"width": 9, "depth": 2, "names": ["a", "b"]},
    ),
    "trainer: {seed: 3}": ("trainer.epochs", 1),
    "trainer: {epochs: 3}": ("trainer.epochs", 3),
    "trainer:": ("trainer.epochs", 1),
    "trainer: {strategy: {every: 5}}": ("trainer.strategy.first_step", 9),
    "trainer: {strategy: {kind: averaging, every: 5}}": ("trainer.strategy.first_step", 9),
    "trainer: {strategy: averaging}": ("trainer.strategy.first_step", 0),
    "trainer: {global_batch: null, micro_batch: 2, strategy: {kind: cadence}}": ("trainer.strategy.anchor", 10),
    "checkpoints: {keep_last: null}": ("checkpoints.keep_last", None),
    "checkpoints:": ("checkpoints.keep_last", 3),
}


@pytest.mark.parametrize("over", MERGED)
def test_a_file_says_what_it_says_and_what_it_extends_says_the_rest(over: str, tmp_path: Path) -> None:
    key, expected = MERGED[over]
    assert at(load(tmp_path, f"extends: base.yaml\n{over}", base=BASE), key) == expected


def at(project: Any, key: str) -> Any:
    value = project.settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_of_several_files_the_later_wins_and_the_own_one_over_all(tmp_path: Path) -> None:
    first, second = "trainer: {seed: 1, readers: 1, threads: 1}", "trainer: {readers: 2, threads: 2}"
    own = LEAST.replace("epochs: 1", "epochs: 1, threads: 3")
    trainer = load(tmp_path, f"extends: [one.yaml, two.yaml]\n{own}", one=first, two=second).settings.trainer
    assert (trainer.seed, trainer.readers, trainer.threads) == (1, 2, 3)


def test_a_path_is_relative_to_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/low.yaml").write_text("trainer: {seed: 5}")
    (tmp_path / "shared/high.yaml").write_text("extends: low.yaml")
    assert load(tmp_path, f"extends: shared/high.yaml\n{LEAST}").settings.trainer.seed == 5


def test_one_file_may_be_extended_on_two_ways(tmp_path: Path) -> None:
    project = load(
        tmp_path,
        f"extends: [one.yaml, two.yaml]\n{LEAST}",
        one="extends: base.yaml",
        two="extends: base.yaml\ntrainer: {seed: 2}",
        base="trainer: {seed: 1}",
    )
    assert project.settings.trainer.seed == 2


def test_a_circle_of_files_is_named(tmp_path: Path) -> None:
    message = error_of(tmp_path, "extends: a.yaml", a="extends: b.yaml", b="extends: ./p.yaml")
    assert message == ("b.yaml:1:1: files extend one another in a circle: p.yaml -> a.yaml -> b.yaml -> p.yaml")


def test_a_missing_file_is_named_with_who_wanted_it(tmp_path: Path) -> None:
    message = error_of(tmp_path, "extends: a.yaml", a="\nextends: [b.yaml]")
    assert message == "a.yaml:2:11: the file b.yaml to extend does not exist: p.yaml -> a.yaml -> b.yaml"


def test_files_without_end_are_an_error(tmp_path: Path) -> None:
    files = {f"f{i}": f"extends: [f{i + 1}.yaml, f{i + 1}.yaml]" for i in range(9)} | {"f9": ""}
    assert "more than 100 files extend one another" in error_of(tmp_path, "extends: f0.yaml", **files)


@pytest.mark.parametrize("value", ["3", "[a.yaml, 3]", "{a: b}", "''"])
def test_extends_takes_files_alone(value: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, f"extends: {value}", a="").endswith(": expected a file, or a list of files")


# What is written as an argument, where `variables` are those below, and what the function would be given.
VARIABLES = """\
variables:
  width: 64
  rate: 1e-3
  name: big
  flag: true
  nothing: null
  list: [1, "${width}"]
  twice: ${name}-${name}
  deep: ${twice}
"""
SUBSTITUTED: dict[str, Any] = {
    "${width}": 64,
    "${rate}": 0.001,
    "${flag}": True,
    "${nothing}": None,
    "${list}": [1, 64],
    "[${width}]": "[64]",
    "${name}_${width}_${flag}_${nothing}_${rate}": "big_64_true_null_0.001",
    "${deep}": "big-big",
    "${none:5}": 5,
    "${none:}": None,
    "${none:a:b}": "a:b",
    "x${none:5}": "x5",
    "${width:5}": 64,
    "${env:HOME}": "/home/me",
    "${env:HOME}/data": "/home/me/data",
    "${env:COUNT}": 3,
    "${env:NONE:7}": 7,
    "$${width}": "${width}",
    "$$${width}": "$${width}",
    "$width $ {": "$width $ {",
    "a $${b} ${width}": "a ${b} 64",
}


@pytest.mark.parametrize("written", SUBSTITUTED)
def test_a_reference_is_replaced_and_keeps_its_type_where_it_stands_alone(written: str, tmp_path: Path) -> None:
    text = VARIABLES + LEAST.replace(
        '{factory: "parts:build_model"}', f"""{{factory: "parts:build_model", arguments: {{x: '{written}'}}}}"""
    )
    value = load(tmp_path, text).settings.model.arguments["x"]
    assert value == SUBSTITUTED[written]
    assert type(value) is type(SUBSTITUTED[written])


WRONG_REFERENCES = {
    "${widht}": ("unknown variable 'widht': did you mean width? (choose from width, one, two, a)"),
    "${zzz}": ("unknown variable 'zzz': choose from width, one, two, a"),
    "${env:NO_HOME}": ("the environment variable NO_HOME is not set: set it, or write ${env:NO_HOME:default}"),
    "${wid": ("a reference is not closed: write ${name}, or $${ for a literal ${"),
    "${a b}": ("${a b} is not a reference: write ${name}, ${name:default} or ${env:NAME}"),
    "${}": ("${} is not a reference: write ${name}, ${name:default} or ${env:NAME}"),
    "x${a}": ("${a} is a list of 1: only scalars can be part of a longer text"),
}


@pytest.mark.parametrize("written", WRONG_REFERENCES)
def test_a_reference_to_nothing_is_explained(written: str, tmp_path: Path) -> None:
    text = f"variables: {{width: 3, one: 1, two: 2, a: [1]}}\n{LEAST}output: '{written}'"
    assert error_of(tmp_path, text) == f"p.yaml:5:1: {WRONG_REFERENCES[written]}"


def test_a_circle_of_variables_is_named(tmp_path: Path) -> None:
    text = f'variables: {{a: "${{b}}", b: "x${{c}}", c: "${{a}}"}}\n{LEAST}output: ${{a}}'
    message = "variables refer to one another in a circle: a -> b -> c -> a"
    assert error_of(tmp_path, text) == f"p.yaml:1:36: {message}"


@pytest.mark.parametrize("piece", ['["${%s}", "${%s}"]', '"${%s}${%s}"'])
def test_variables_that_double_each_other_end_in_an_error(piece: str, tmp_path: Path) -> None:
    lines = ["  v0: 'a long text that will be there often'"]
    lines += [f"  v{i}: {piece.replace('%s', f'v{i - 1}')}" for i in range(1, 40)]
    message = error_of(tmp_path, "variables:\n" + "\n".join(lines) + f"\n{LEAST}output: ${{v39}}")
    assert "more than 100000" in message


def test_a_variable_may_not_be_called_env(tmp_path: Path) -> None:
    message = error_of(tmp_path, f"variables: {{env: 3}}\n{LEAST}")
    assert message == "p.yaml:1:13: 'env' is not allowed as a variable name: use letters, digits and _, and not env"


def test_variables_of_an_extended_file_are_set_by_the_one_that_extends_it(tmp_path: Path) -> None:
    base = "variables: {steps: 10}\ntrainer: {max_steps: '${steps}'}"
    project = load(tmp_path, f"extends: base.yaml\nvariables: {{steps: 20}}\n{LEAST}", base=base)
    assert project.settings.trainer.max_steps == 20


# Of the command line, over BASE.
OVERRIDES: dict[tuple[str, ...], tuple[str, Any]] = {
    ("trainer.seed=3",): ("trainer.seed", 3),
    ("trainer.seed=3", "trainer.seed=4"): ("trainer.seed", 4),
    ("trainer.learning_rate=1e-3",): ("trainer.learning_rate", 0.001),
    ("trainer.shares=[1, 2]",): ("trainer.shares", (1.0, 2.0)),
    ("output=a=b",): ("output", "a=b"),
    ("output=no",): ("output", "no"),
    ("model.arguments.width=9",): ("model.arguments", {"width": 9, "depth": 2, "names": ["a", "b"]}),
    ("model.factory=parts:other", "model.arguments.x=1"): ("model.arguments", {"x": 1}),
    ("trainer.max_grad_norm=",): ("trainer.max_grad_norm", None),
    ("trainer.num_train_epochs=7", "trainer.epochs=null"): ("trainer.epochs", 7),
    ("variables.n=5", "trainer.seed=${n}"): ("trainer.seed", 5),
}


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_the_command_line_wins(overrides: tuple[str, ...], tmp_path: Path) -> None:
    key, expected = OVERRIDES[overrides]
    project = load(tmp_path, BASE, *overrides)
    assert at(project, key) == expected


WRONG_OVERRIDES = {
    "trainer.seed": ("'trainer.seed' is not a setting: write key=value, such as trainer.seed=3"),
    "=3": ("'=3' is not a setting: write key=value, such as trainer.seed=3"),
    "trainer..seed=3": ("'trainer..seed=3' is not a setting: write key=value, such as trainer.seed=3"),
    "extends=a.yaml": ("'extends=a.yaml': `extends` is allowed in files only"),
    "trainer.sed=3": ("trainer.sed is an unknown setting: did you mean seed?"),
    "trainer.seed=x": ("trainer.seed is 'x': expected an integer"),
    "trainer.seed=[1": ("invalid YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>'"),
    "workers={a: 1}": ("workers is a mapping of a: expected an integer >= 1 and <= 1024 or null"),
}


def test_a_variable_of_the_command_line_that_nothing_refers_to_is_an_error(tmp_path: Path) -> None:
    message = "command line: variables.{0} has no effect, since nothing refers to ${{{0}}}: "
    assert error_of(tmp_path, BASE, "variables.n=5") == f"{message.format('n')}leave it out"
    text = f"variables: {{width: 3, unused: 1, of_other: '${{unused}}'}}\n{LEAST}output: ${{width}}${{of_other}}"
    assert load(tmp_path, text, "variables.unused=2").settings.output == "32"
    found = error_of(tmp_path, text, "variables.wdith=5")
    assert found == f"{message.format('wdith')}did you mean width? (choose from width, unused, of_other)"


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_what_is_wrong_on_the_command_line_is_said_to_stand_there(override: str, tmp_path: Path) -> None:
    assert error_of(tmp_path, BASE, override) == f"command line: {WRONG_OVERRIDES[override]}"


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    project = load(tmp_path, "extends: base.yaml\ntrainer: {epochs: 2}", "trainer.seed=3", base=BASE)
    origins = {key: str(project.origin(f"trainer.{key}")) for key in ("epochs", "seed", "global_batch", "exact")}
    assert origins == {
        "epochs": f"{tmp_path}/p.yaml:2:11",
        "seed": "command line",
        "global_batch": f"{tmp_path}/base.yaml:8:3",
        "exact": "default",
    }
