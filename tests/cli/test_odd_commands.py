"""Unusual command lines: each prints one error message and exits with 2; nothing blocks or is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from train_project import write_project

from paceline.cli.main import main

MORE_PARTS = """

def one_argument(model):
    return 1


def no_scheduler(optimizer):
    return "none"


def no_optimizer(params):
    return "none"


def no_model():
    return 3


def no_loss(model, batch):
    return "none"


partial_loss = __import__("functools").partial(loss)
"""
PYTHON = "belongs to Python itself: use a function or class of the project or a package"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    config = write_project(folder, "odd_parts")
    with (folder / "odd_parts.py").open("a") as file:
        file.write(MORE_PARTS)
    return config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss=os:sep", "command line: loss: os:sep is not callable: it is of type str"),
        ("metrics=os:path", "metrics: os:path is not callable: it is of type module"),
        ("scheduler=os:system", f"scheduler: os:system {PYTHON}"),
        (
            "scheduler={factory: os:system, arguments: {command: touch EXECUTED}}",
            f"scheduler.factory: os:system {PYTHON}",
        ),
        ("scheduler=subprocess:run", f"scheduler: subprocess:run {PYTHON}"),
        ("loss=builtins:print", f"loss: builtins:print {PYTHON}"),
        ("model=os:getcwd", f"model: os:getcwd {PYTHON}"),
        ("after=os:remove", f"after: os:remove {PYTHON}"),
        ("data.collate=os:system", f"data.collate: os:system {PYTHON}"),
        ("data.weight=shutil:rmtree", f"data.weight: shutil:rmtree {PYTHON}"),
        ("scheduler=torch.nn:Linear", "is a class that is not derived from torch.optim.lr_scheduler.LRScheduler"),
        ("scheduler=torch:save", "torch:save(obj, f, "),
        ("loss=odd_parts:one_argument", "odd_parts:one_argument(model) cannot be called with model, batch"),
        ("model=odd_parts:loss", "odd_parts:loss(model, batch) cannot be called with no arguments"),
        (
            "scheduler=odd_parts:no_scheduler",
            "scheduler made a str without step(): pass a function from the optimizer to a torch",
        ),
        ("model=odd_parts:no_model", "the model is a int without a parameters() method"),
        ("loss=odd_parts:no_loss", "the loss is a str: it must be a tensor with one number"),
        ("trainer.global_batch=4000000000000000", "1000000000000000 micro-batches, more than 1048576"),
    ],
)
def test_invalid_parts_are_refused_without_a_call(
    setting: str, message: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    assert main(["train", project.name, "--dry-run", setting]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (project.parent / "EXECUTED").exists()


def test_partial_objects_are_valid_parts(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    assert main(["train", project.name, "--dry-run", "loss=odd_parts:partial_loss"]) == 0, capsys.readouterr().err


LONG = "x" * 5000
NULL = "a\0b"


@pytest.mark.parametrize(
    "command",
    [
        ["config", "show", "FIFO"],
        ["config", "show", "/dev/null"],
        ["config", "show", NULL],
        ["config", "show", LONG],
        ["config", "show", "trainer.seed=3"],
        ["config", "show", "PROJECT", f"x={LONG}"],
        ["train", "FIFO"],
        ["train", "PROJECT", "--run-folder", NULL],
        ["train", "PROJECT", "--resume", NULL],
        ["train", "PROJECT", "--run-folder", "/proc/x"],
        ["logs", "list", LONG],
        ["logs", "summary", LONG],
        ["logs", "plot", LONG],
        ["runs", "status", LONG],
        ["timeline", LONG],
        ["checkpoints", "list", LONG],
        ["init", LONG],
        ["init", "/proc/x"],
    ],
    ids=lambda words: " ".join(words)[:40].encode("unicode_escape").decode(),
)
def test_unusable_paths(
    command: list[str],
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("runs").mkdir()
    places = {"FIFO": "fifo", "PROJECT": str(project)}
    code = main([places.get(word, word) for word in command])
    error = capsys.readouterr().err
    assert code == 2, error[:300]
    assert error.startswith(f"paceline {command[0]}")
    assert error.count("\n") == 1


def test_pipes_in_a_run_folder_do_not_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5}\n')
    for name in ("status.json", "report.json"):
        os.mkfifo(run / name)
    assert main(["logs", "summary", str(run)]) == 0
    assert main(["logs", "list", str(tmp_path)]) == 0
    assert "1.5" in capsys.readouterr().out
