"""Every example runs as a user would run it and finds its own result right."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import preloaded_python
import pytest

from paceline.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
# Programs of other systems, ported with docs/coming-from.md.
PORTED = EXAMPLES / "ported"
# Importing torch costs seconds, so an example with one worker runs in this process, as `python FILE` would.
IN_PROCESS = [
    *("array_loader_loop", "dp_train_iris", "dp_train_matrix", "first_steps", "gan", "low_level"),
    *("policy_gradient", "resnet_images", "gradient_logging", "profile_loop"),
]
SHARED_MODULES = ["iris"]


@pytest.fixture
def script_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python does for a script: its folder is where imports look first. Modules found there are dropped after."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]


def run(*arguments: str, timeout_s: float, cwd: Path) -> str:
    """Run an example in a process of its own; its output. Fails with that output unless it exits with 0."""
    done = preloaded_python.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{arguments} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("script_path")
@pytest.mark.parametrize("name", IN_PROCESS)
def test_example_with_one_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("script_path")
@pytest.mark.parametrize("path", sorted(PORTED.glob("from_*.py")), ids=lambda path: path.stem)
def test_ported_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "from_hf_trainer":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(PORTED))
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0


@pytest.mark.timeout(180)
def test_ported_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """forgather's project: `-t 2gpu.yaml`, a dry run, and a run that is saved."""
    project = PORTED / "from_forgather"
    assert main(["train", str(project / "2gpu.yaml"), "--dry-run"]) == 0
    assert "2 on CPU" in capsys.readouterr().out
    folder = tmp_path / "run"
    train = ("train", str(project / "checkpoint_train.yaml"), "--run-folder", str(folder))
    run("-m", "paceline", *train, timeout_s=150, cwd=tmp_path)
    assert (folder / "checkpoints" / "step-00000010" / "manifest.json").is_file()


@pytest.mark.timeout(120)
def test_regression_example(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "dp_train_regression.py"), timeout_s=110, cwd=tmp_path)
    assert "weights equal True, losses equal True" in output


def code_of_cells(notebook: Path) -> str:
    """The code cells; what a notebook would show below a cell is printed."""
    statements: list[ast.stmt] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            *first, last = ast.parse("".join(cell["source"])).body
            shown = ast.parse(f"print({ast.unparse(last)})").body if isinstance(last, ast.Expr) else [last]
            statements += [*first, *shown]
    return ast.unparse(ast.Module(statements, []))


@pytest.mark.timeout(120)
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells run as in a kernel: in a `__main__` that is no file. Two workers and one end with the same weights."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    code = code_of_cells(EXAMPLES / "first_steps.ipynb")
    code += "\nassert [len(line.get_xdata()) for line in axes.lines] == [48, 48]"
    lines = run("-W", "ignore", "-c", code, timeout_s=110, cwd=tmp_path).splitlines()
    of_two, of_one = (re.search(r"^(\d) workers?: +(loss .*)$", line) for line in lines[:2])
    assert of_two is not None
    assert of_one is not None
    assert (of_two[1], of_one[1]) == ("2", "1")
    assert of_two[2] == of_one[2]
    assert "True" in lines[2:]


def test_every_example_is_run_here() -> None:
    assert [path.stem for path in EXAMPLES.glob("*.ipynb")] == ["first_steps"]
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - set(SHARED_MODULES)
    assert scripts == {*IN_PROCESS, "dp_train_regression", "reference"}  # the last in test_reference.py
