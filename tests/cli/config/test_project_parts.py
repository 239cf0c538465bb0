"""Python that a project file names: imported when it is built, and explained when it cannot be."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from project_files import FULL, LEAST, load

from paceline.cli.config import ConfigError, Project, load_project, show

PARTS = """
import torch
from torch import nn


def build_model(width=4, depth=1, *, activation=nn.ReLU):
    return nn.Sequential(nn.Linear(2, width), activation(), nn.Linear(width, 1))


def samples(count=8, scale=1.0, inner=None):
    return [(torch.tensor([float(i), scale]), float(i % 2)) for i in range(count)] + list(inner or [])


def fussy(first, second):
    raise KeyError("inside")


def anything(**given):
    return given


def optimizer(params, lr):
    return params, lr


class Maker:
    @staticmethod
    def make():
        return "made"


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A module of the project's with a name of its own, gone after the test."""
    name = f"parts_of_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def project(folder: Path, model: str) -> Project:
    return load(folder, LEAST.replace('{factory: "parts:build_model"}', model))


def model_error(folder: Path, model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        project(folder, model).settings.model.as_function()()
    return str(caught.value).replace(f"{folder}/", "")


def test_loading_imports_no_module_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "parts", raising=False)  # of another test
    (tmp_path / "parts.py").write_text("raise SystemExit('imported')")
    show(load(tmp_path, FULL).resolve(2))
    assert "parts" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_a_factory_is_called_with_its_arguments(module: str, tmp_path: Path) -> None:
    text = (
        f"""{{factory: "{module}:build_model", arguments: {{width: 7, activation: {{reference: "torch.nn:Tanh"}}}}}}"""
    )
    model = project(tmp_path, text).settings.model.as_function()()
    assert model[0].out_features == 7
    assert type(model[1]).__name__ == "Tanh"


def test_a_project_is_built_from_any_folder(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LEAST.replace("parts:build_model", f"{module}:build_model")
    (tmp_path / "p.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    loaded = load_project("p.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert loaded.settings.model.as_function()()[0].out_features == 4
    assert loaded.folder == tmp_path


def test_factories_in_arguments_are_built_first(module: str, tmp_path: Path) -> None:
    inner = f'{{factory: "{module}:samples", arguments: {{count: 2}}}}'
    text = f'{{factory: "{module}:anything", arguments: {{a: [{inner}], b: {{c: {inner}}}, d: 1}}}}'
    given = project(tmp_path, text).settings.model.as_function()()
    assert (len(given["a"][0]), len(given["b"]["c"]), given["d"]) == (2, 2, 1)


def test_a_name_alone_is_the_object_itself(module: str, tmp_path: Path) -> None:
    assert project(tmp_path, f"{module}:number").settings.model.build() == 3
    assert project(tmp_path, f"{module}:Maker.make").settings.model.as_function()() == "made"


def test_what_the_run_adds_comes_before_the_arguments(module: str, tmp_path: Path) -> None:
    text = f"{LEAST}optimizer: {{factory: '{module}:optimizer', arguments: {{lr: 0.5}}}}".replace(
        ", learning_rate: 0.1", ""
    )
    optimizer = load(tmp_path, text).settings.optimizer
    assert optimizer is not None
    assert optimizer.as_function()("parameters") == ("parameters", 0.5)


def test_a_module_that_is_not_there_is_named_with_the_nearest(module: str, tmp_path: Path) -> None:
    message = model_error(tmp_path, f"{{factory: '{module}x:build_model'}}")
    assert message.startswith(f"p.yaml:1:9: model.factory: module '{module}x' is neither in {tmp_path} nor ")
    assert message.endswith(f"did you mean {module}? (choose from {module})")


def test_a_name_that_a_module_does_not_have_is_named_with_the_nearest(module: str, tmp_path: Path) -> None:
    message = model_error(tmp_path, f"{{factory: '{module}:build_modl'}}")
    assert message.startswith(f"p.yaml:1:9: model.factory: {module} has no 'build_modl': did you mean build_model?")
    assert message.endswith("(choose from Maker, anything, build_model, fussy, number, optimizer, samples)")


def test_a_name_that_a_class_does_not_have_is_named(module: str, tmp_path: Path) -> None:
    message = model_error(tmp_path, f"{module}:Maker.mak")
    assert message == "p.yaml:1:1: model: Maker has no 'mak': did you mean make? (choose from make)"


WRONG_ARGUMENTS = {
    "build_model', arguments: {widht: 3": "build_model has no argument 'widht': did you mean width? "
    "(choose from width, depth, activation)",
    "fussy', arguments: {second: 3": "fussy(first, second) cannot be called with second: "
    "missing a required argument: 'first'",
    "fussy', arguments: {first: 1, second: 3": "fussy failed: KeyError: 'inside' (MODULE.py:15)",
    "number', arguments: {": "number is not callable: it is of type int",
}


@pytest.mark.parametrize("written", WRONG_ARGUMENTS)
def test_a_call_that_cannot_be_is_explained(written: str, module: str, tmp_path: Path) -> None:
    message = model_error(tmp_path, f"{{factory: '{module}:{written}}}}}")
    assert message == f"p.yaml:1:9: model.factory: {module}:{WRONG_ARGUMENTS[written].replace('MODULE', module)}"


def test_an_error_inside_a_factory_is_the_cause(module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        project(
            tmp_path, f"{{factory: '{module}:fussy', arguments: {{first: 1, second: 2}}}}"
        ).settings.model.as_function()()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_module_that_cannot_be_imported_is_explained(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import no_such_package_anywhere")
    message = model_error(tmp_path, f"{{factory: '{module}:build_model'}}")
    assert message == (
        f"p.yaml:1:9: model.factory: importing {module} failed: ModuleNotFoundError: "
        f"No module named 'no_such_package_anywhere' ({module}.py:1)"
    )


def test_a_module_is_not_mistaken_for_another_of_its_name(module: str, tmp_path: Path) -> None:
    project(tmp_path, f"{module}:number").settings.model.build()
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text("number = 4")
    message = model_error(other, f"{module}:number")
    assert message == (
        f"p.yaml:1:1: model: {module} is already imported from {tmp_path}/{module}.py, not from {module}.py: rename it"
    )


def test_data_that_cannot_be_opened_is_named_with_its_place(tmp_path: Path) -> None:
    text = LEAST.replace('{factory: "parts:samples"}', "{kind: tokens, paths: t.bin, length: 4}")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text).data("train")
    assert str(caught.value) == (
        f"{tmp_path}/p.yaml:2:8: data.train: {tmp_path}/t.bin does not exist: check the path of the token file"
    )


def test_a_project_travels_to_workers(tmp_path: Path) -> None:
    loaded = load(tmp_path, FULL)
    travelled = pickle.loads(pickle.dumps(loaded))
    assert travelled == loaded
    assert travelled.settings.model.folder == tmp_path


def test_an_error_travels_from_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "a: 1")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
