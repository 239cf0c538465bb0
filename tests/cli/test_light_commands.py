"""Commands that only look at files start without torch, and Ctrl-C ends any command without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import invoke
from made_runs import make_run
from train_project import write_project

from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.manifest import MANIFEST_NAME, Manifest
from paceline.cli import main as command
from paceline.plan.predict import Device
from paceline.plan.profile import Profile, Subject

# Runs commands in a process that cannot import torch; prints their exit codes.
WITHOUT_TORCH = """
import json, sys
from contextlib import redirect_stdout

sys.modules["torch"] = None
from paceline.cli.main import main

codes = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(sys.stderr):
        try:
            codes.append(main(words))
        except SystemExit as ended:
            codes.append(ended.code)
print(json.dumps(codes))
"""


def test_commands_that_look_at_files_do_not_import_torch(runs: Path, tmp_path: Path) -> None:
    files = make_run(runs)
    folder = step_folder(files.checkpoints, 3)
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(Manifest(step=3, metrics={"loss": 0.5}).render())
    config = write_project(tmp_path / "project", "light_parts")
    subject = Subject("Net", 10, 40, 8)
    (tmp_path / "a.json").write_text(Profile(subject, "A", 2.0, (Device("A", 0.1),), global_batch=64).to_json())
    expected = {
        "--help": 0,
        "train --help": 0,
        "devices --help": 0,
        "plan --help": 0,
        f"plan --profile {tmp_path / 'a.json'} --workers 2xA": 0,
        f"config show {config} trainer.seed=3": 0,
        "completion bash": 0,
        "completion zsh": 0,
        "runs status": 3,
        "checkpoints list": 0,
        "checkpoints inspect": 0,
        "logs list": 0,
        "logs summary": 0,
        "logs plot": 0,
    }
    words = json.dumps([line.split() for line in expected])
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert dict(zip(expected, json.loads(done.stdout), strict=True)) == expected, done.stderr


def test_an_interrupt_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", interrupted)
    assert invoke("--help") == (130, "", "")


@pytest.mark.parametrize("words", ["train", "config show"])
def test_t_names_the_project_file(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = invoke("-t", "nowhere.yaml", *words.split())
    assert (ended.code, "nowhere.yaml: cannot read the file" in ended.err) == (2, True), ended
    assert "-t CONFIG" in invoke("--help").out


def test_t_with_a_command_that_takes_no_project_file_is_an_error() -> None:
    ended = invoke("-t", "small.yaml", "logs", "list")
    assert (ended.code, ended.err) == (
        2,
        "paceline: -t small.yaml is for `train`, `plan` and `config show`: leave it out\n",
    )
