"""What `paceline train` says about mistakes in a project: one message, before anything is trained."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
from train_project import run_here, write_project

from paceline.cli.main import main
from paceline.cli.train.user_errors import ProjectError, UserFacingError, user_facing
from paceline.core.errors import WorkerError
from paceline.observe.run_files import RunFiles

# Arguments of `paceline train`, and what it says before it starts a worker.
BEFORE_ANYTHING_STARTS = {
    "no such file": (["nowhere.yaml"], "nowhere.yaml: cannot read the file: No such file or directory"),
    "a folder": (["."], ".: cannot read the file: Is a directory"),
    "a misspelt key": (["small.yaml", "trainer.global_bach=8"], "did you mean global_batch?"),
    "a bad batch": (["small.yaml", "trainer.micro_batch=3"], "global_batch=8 is not a multiple of micro_batch=3"),
    "no numbers of devices": (["small.yaml", "-d", "first"], "-d first: give GPU numbers, such as 0,1, or cpu"),
    "no such device": (["small.yaml", "-d", "987"], "command line: devices: this machine has 0 of the GPUs 987"),
    "the same device twice": (["small.yaml", "-d", "0,0"], "command line: devices names a GPU twice: name it once;"),
    "nothing to resume": (["small.yaml", "--resume"], "runs has no run of small: start one without --resume"),
    "no run there": (
        ["small.yaml", "--resume", "small.yaml"],
        "--resume small.yaml: not a run, and not a checkpoint; see `paceline logs list`",
    ),
    "no workers": (["small.yaml", "workers=0"], "workers is 0: expected an integer >= 1"),
    "too many workers": (["small.yaml", "--workers", "5000"], "workers is 5000: expected an integer >= 1 and <= 1024"),
    "too many readers": (["small.yaml", "trainer.readers=5000"], "trainer.readers is 5000: expected an integer >= 0"),
    "no checkpoint": (["small.yaml", "checkpoints.resume=a/b"], "command line: checkpoints.resume: "),
    "an unreadable checkpoint": (
        ["small.yaml", f"checkpoints.resume={'x' * 300}"],
        "command line: checkpoints.resume: cannot read ",
    ),
    "a folder without checkpoints": (
        ["small.yaml", "checkpoints.resume=."],
        "is neither a checkpoint nor a folder with checkpoints",
    ),
    "no weights": (["small.yaml", "checkpoints.init_from=w.pt"], "checkpoints.init_from: nothing at "),
    "no weights in a folder": (["small.yaml", "checkpoints.init_from=."], "checkpoints.init_from: "),
    "checkpoints in a file": (
        ["small.yaml", "checkpoints.folder=small.yaml/x"],
        "small.yaml is a file: choose",
    ),
    "runs in a file": (
        ["small.yaml", "output=small.yaml"],
        "output: cannot create the folder small.yaml, because",
    ),
    "a run in a file": (["small.yaml", "--run-folder", "small.yaml"], "cannot create the run's folder: small.yaml"),
    "two folders": (
        ["small.yaml", "--resume", "--run-folder", "x"],
        "--run-folder has no effect with --resume, which continues in the run's own folder",
    ),
    "a limit without its condition": (["small.yaml", "stall_s=5"], "stall_s has no effect without min_workers"),
    "too many survivors": (
        ["small.yaml", "min_workers=3", "--workers", "2"],
        "command line: min_workers is 3, but the run has 2 workers: choose at most that",
    ),
    "too few parts": (
        ["small.yaml", "trainer.shard=optimizer", "trainer.shard_by=[2, 1]", "--workers", "3"],
        "trainer is inconsistent: shard_by=[2.0, 1.0] names 2 workers, the world has 3",
    ),
    "no division": (
        ["small.yaml", "trainer.master_weights=true"],
        "trainer is inconsistent: master_weights=True would be ignored: give shard='optimizer' too",
    ),
    "an unknown component": (["small.yaml", "checkpoints.leave_out=[optimiser]"], "did you mean optimizer?"),
}

# Overrides, and what the worker says, after "paceline train: ".
BY_A_WORKER = {
    "no module": ("model={factory: 'nowhere:model'}", "command line: model.factory: module 'nowhere' is neither in"),
    "no function": ("loss=mistaken_parts:los", "command line: loss: mistaken_parts has no 'los': did you mean loss?"),
    "no last word": (
        "after=mistaken_parts:aftr",
        "after: mistaken_parts has no 'aftr': did you mean after?",
    ),
    "no outer optimizer": (
        "trainer.strategy={kind: averaging, outer: {factory: 'torch.optim:SGX'}}",
        "trainer.strategy.outer.factory: torch.optim has no 'SGX': did you mean SGD?",
    ),
    "no name in an argument": (
        "loss={factory: 'mistaken_parts:loss', arguments: {a: [{reference: 'torch.nn:Rellu'}]}}",
        "loss.*: torch.nn has no 'Rellu'",
    ),
    "no metrics": ("metrics=mistaken_parts:metric", "metrics: mistaken_parts has no 'metric': did you mean metrics?"),
    "no such argument": ("model={factory: 'mistaken_parts:model', arguments: {widht: 3}}", "has no argument 'widht'"),
    "a factory that fails": (
        "model={factory: 'mistaken_parts:broken_model'}",
        r"mistaken_parts:broken_model failed: IndexError: list index out of range \(.*mistaken_parts.py:\d+\)$",
    ),
    "no tokens": ("data.train={kind: tokens, paths: x.bin, length: 8}", "x.bin does not exist: check the path"),
    "no images": ("data.train={kind: images, root: nowhere}", "nowhere is not a folder: check the path"),
    "no data set": ("data.train={kind: hf, path: ./nowhere}", "data.train: there is no data set at"),
    "no samples": ("data.train={factory: 'builtins:list'}", "data is empty: give at least one sample"),
    "no model": ("model={factory: 'torch:Generator'}", r"the model is a Generator without a parameters\(\) method"),
    "a part of Python": ("model={factory: 'builtins:int'}", "builtins:int belongs to Python itself"),
    "no backend": (
        "trainer.backend=glo",
        "torch.distributed has no backend 'glo': did you mean gloo?",
    ),
    "no argument of a logger": ("loggers=[{name: csv, arguments: {a: 1}}]", "logger 'csv' does not take {'a': 1}"),
    "no checkpoint yet": ("checkpoints.resume=true", "has no checkpoint to resume from"),
    "no method of the model": (
        "trainer.gradient_checkpointing=true",
        "a model with gradient_checkpointing_enable",
    ),
}


@pytest.mark.parametrize("case", BEFORE_ANYTHING_STARTS)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    write_project(tmp_path, "wrong_parts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # and what the command sets is gone after the test
    arguments, text = BEFORE_ANYTHING_STARTS[case]
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.startswith("paceline train: ")
    assert not captured.out
    assert not Path("runs").exists()


@pytest.mark.parametrize("case", BY_A_WORKER)
def test_what_only_a_worker_can_notice_is_a_mistake(tmp_path: Path, case: str) -> None:
    config = write_project(tmp_path, "mistaken_parts")
    override, text = BY_A_WORKER[case]
    with pytest.raises(ProjectError, match=text):
        run_here(config, tmp_path / "run", "trainer.exact=false", override)
    sys.modules.pop("mistaken_parts", None)


@pytest.mark.parametrize(
    ("override", "text"),
    [("loss=erring_parts:broken", "in the loss"), ("optimizer=erring_parts:broken_optimizer", "in the optimizer")],
)
def test_an_error_inside_of_the_users_code_stays_what_it_is(tmp_path: Path, override: str, text: str) -> None:
    config = write_project(tmp_path, "erring_parts")
    without_rate = ["trainer.learning_rate=null"] if "optimizer" in override else []
    with pytest.raises(ValueError, match=text) as caught:
        run_here(config, tmp_path / "run", override, *without_rate)
    assert type(caught.value) is ValueError
    sys.modules.pop("erring_parts", None)


def test_what_a_worker_told_is_found_in_its_traceback() -> None:
    for kind in (UserFacingError, ProjectError):
        try:
            try:
                int("x")
            except ValueError as error:
                raise kind("2 problems:\n  one\n  two") from error
        except UserFacingError as error:
            text = "".join(traceback.format_exception(error))
        found = user_facing(WorkerError(f"rank 0 failed: {kind.__name__}: ...", traceback_text=text))
        assert type(found) is kind
        assert str(found) == "2 problems:\n  one\n  two"
    assert (
        user_facing(WorkerError("rank 0 failed: KeyError: 'a'", traceback_text="Traceback:\nKeyError: 'a'\n")) is None
    )


def test_a_workers_message_is_all_that_is_shown_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, "mistaken_run_parts")
    monkeypatch.chdir(tmp_path)
    arguments = ["loss=mistaken_run_parts:nothing", "--workers", "2", "max_restarts=2"]
    assert main(["train", str(config), *arguments]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if not line.startswith("paceline: "))
    assert line.startswith("paceline train: command line: loss: mistaken_run_parts has no 'nothing'")
    assert not list(Path("runs").iterdir())


def test_an_error_in_the_users_code_is_shown_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, "failing_parts")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config), "loss=failing_parts:broken"]) == 1
    err = capfd.readouterr().err
    assert "paceline train: rank 0 failed: ValueError: in the loss\n\nTraceback" in err
    assert 'failing_parts.py", line' in err
    (files,) = (RunFiles(path) for path in Path("runs").iterdir())
    assert json.loads(files.status.read_text())["state"] == "failed"


def test_a_dry_run_says_what_is_wrong_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, "dry_mistaken_parts")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config), "--dry-run", "after=dry_mistaken_parts:aftr"]) == 2
    assert "after: dry_mistaken_parts has no 'aftr': did you mean after?" in capsys.readouterr().err
    assert main(["train", str(config), "--dry-run", "data.train={factory: 'builtins:list'}"]) == 2
    assert capsys.readouterr().err == "paceline train: data is empty: give at least one sample\n"
    assert main(["train", str(config), "--dry-run", "trainer.backend=gloo:glo"]) == 2
    assert "torch.distributed has no backend 'glo': did you mean gloo?" in capsys.readouterr().err
