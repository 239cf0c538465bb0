"""`paceline train --resume`: runs by name, their own settings, and what is said about differences."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from in_process import invoke
from made_runs import make_run
from train_project import run_here, write_project

from paceline.checkpoint.folders import MANIFEST_NAME
from paceline.cli.commands import CommandError
from paceline.cli.config import load_project, show
from paceline.cli.train import NEWEST, resume
from paceline.cli.train.resume import differences, find_run, own_project
from paceline.cli.train.user_errors import in_command_words
from paceline.observe.run_files import RunFiles, process_started, read_json, write_json


def saved_run(runs: Path, config: Path, *overrides: str) -> RunFiles:
    """A run that was started from the project file, without its training."""
    files = make_run(runs, "small")
    files.config.write_text(show(load_project(config, overrides)))
    write_json(files.environment, {resume.PROJECT_KEY: str(config)})
    return files


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project", "resumed_settings_parts")


@pytest.mark.parametrize("named", ["small_2026-11-15_12-00-00", "small", "runs/small_2026-11-15_12-00-00", NEWEST])
def test_a_run_is_found_by_the_name_that_the_list_prints(named: str, runs: Path, config: Path) -> None:
    files = saved_run(runs, config)
    assert files.root.name in invoke("logs", "list").out
    assert find_run(named, runs, "small")[0].root.resolve() == files.root.resolve()


def test_a_wrong_name_and_a_live_run_are_errors(runs: Path, config: Path) -> None:
    saved_run(runs, config)
    with pytest.raises(CommandError, match=r"no run 'smal_2026' in runs; did you mean small_2026-11-15_12-00-00\?"):
        find_run("smal_2026", runs, None)
    with pytest.raises(CommandError, match=r"--resume: runs has no run of other: start one without --resume"):
        find_run(NEWEST, runs, "other")


def test_a_checkpoint_is_resumed_in_its_run_unless_that_is_running(runs: Path) -> None:
    files = make_run(runs, "small")
    checkpoint = files.checkpoints / "step-00000004"
    checkpoint.mkdir()
    (checkpoint / MANIFEST_NAME).touch()
    assert find_run(str(checkpoint), runs, None) == (RunFiles(files.root.absolute()), checkpoint.absolute())
    own = {"host": socket.gethostname(), "pid": os.getpid(), "process_started": process_started(os.getpid())}
    write_json(files.status, read_json(files.status) | own | {"state": "running"})
    with pytest.raises(CommandError, match=r"small_2026-11-15_12-00-00 is running: wait for it, or end it with"):
        find_run(str(checkpoint), runs, None)


def test_a_checkpoint_outside_of_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "saved" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST_NAME).touch()
    with pytest.raises(CommandError, match=rf"not in a run's folder: start .* with checkpoints.resume={checkpoint}$"):
        find_run(str(checkpoint), tmp_path / "runs", None)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_config_is_compared_even_if_it_no_longer_fits_the_run(runs: Path, config: Path) -> None:
    """The global batch of the run, 16, is not a multiple of the file's new micro-batch."""
    per_worker = ["trainer.global_batch=null", "trainer.micro_batches_per_worker=2"]
    files = make_run(runs, "small")
    files.config.write_text(show(load_project(config, per_worker).resolve(2)))
    config.write_text(
        config.read_text().replace("global_batch: 8, micro_batch: 4", "micro_batch: 3, micro_batches_per_worker: 2")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cli.train.command.dry_run", lambda *_: 0)
        ended = invoke("train", config, "--resume", "--dry-run", "--workers", "2")
    assert ended.code == 0, ended
    assert "trainer.micro_batch=3 (the run: 4)" in ended.err


def test_settings_that_the_run_could_not_write_are_written_when_it_is_resumed(runs: Path, config: Path) -> None:
    files = saved_run(runs, config)
    files.config.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cli.train.command._launch", lambda *_: None)
        assert invoke("train", config, "--resume").code == 0
    assert load_project(files.config, folder=config.parent).settings == load_project(config).resolve(1).settings


def test_a_run_that_does_not_save_cannot_be_resumed(runs: Path, config: Path) -> None:
    files = saved_run(runs, config)
    ended = invoke("train", "--resume", files.root, "checkpoints.save=false")
    assert ended.code == 2
    assert "command line: checkpoints.save is false: --resume needs a saved run" in ended.err


def test_a_resumed_run_has_its_own_settings_and_those_of_the_command_line(runs: Path, config: Path) -> None:
    files = saved_run(runs, config, "trainer.max_steps=12", "trainer.seed=5")
    project = own_project(files, ["trainer.epochs=3"], None)
    trainer = project.settings.trainer
    assert (trainer.max_steps, trainer.seed, trainer.epochs) == (12, 5, 3)
    assert (project.path, project.folder) == (config, config.parent)


def test_variables_of_the_first_start_may_be_given_again_with_their_file(runs: Path, config: Path) -> None:
    config.write_text(f"variables: {{rate: 0.5}}\n{config.read_text()}checkpoints: {{every_minutes: '${{rate}}'}}\n")
    again = ["variables.rate=0.25", "variables.seed=3", "trainer.seed=${seed}"]
    files = saved_run(runs, config, *again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cli.train.command.dry_run", lambda *_: 0)
        assert invoke("train", config, "--resume", "--dry-run", *again) == (0, "", "")
        ended = invoke("train", "--resume", files.root, "--dry-run", *again)
    assert ended.code == 2
    assert "variables.rate has no effect, since nothing refers to ${rate}" in ended.err


def test_differences_are_told_with_the_remedy(runs: Path, config: Path) -> None:
    files = saved_run(runs, config, "trainer.max_steps=12", "trainer.schedule=cosine")
    before = own_project(files, (), None)
    assert list(differences(before, before, None)) == []
    now = own_project(files, ["trainer.max_steps=20", "workers=3"], None)
    assert list(differences(before, now, load_project(config))) == [
        "changed for this run: trainer.max_steps 12 -> 20",
        "the schedule ends after 20 steps, not 12 steps: the learning rate differs from here on; "
        "trainer.schedule_steps=12 keeps it",
        "the run's own settings are used, which differ from small.yaml: trainer.max_steps=null (the run: 20), "
        "trainer.schedule=null (the run: cosine); to change one, give it on the command line",
    ]


@pytest.mark.parametrize(
    ("python", "command"),
    [
        (
            "Use the settings that the checkpoint was saved with, or list in allow=[...] those that may differ",
            "Use the settings that the checkpoint was saved with, or name those that may differ: --allow NAME,NAME",
        ),
        ("allow=['sed', 'x']: unknown setting", "--allow sed,x: unknown setting"),
        ("does not hold loggers: set skip=['loggers'] to start without", "does not hold loggers: use --skip loggers"),
        ("set resume='auto' to continue from there", "use --resume to continue from there"),
    ],
)
def test_messages_name_options_of_the_command(python: str, command: str) -> None:
    assert in_command_words(python).startswith(command)


def test_another_setting_than_the_checkpoints_names_allow(
    runs: Path, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the command line to the check in the worker, which is in this process: torchrun's variables are set."""
    files = run_here(config, runs / "small_2026-11-15_12-00-00", "trainer.max_steps=4")
    files.config.write_text(show(load_project(config, ["trainer.max_steps=4"])))
    write_json(files.environment, {resume.PROJECT_KEY: str(config)})
    write_json(files.status, {"state": "stopped"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
            patch.setenv(name, str(value))
        ended = invoke("train", "--resume", "small_2026", "trainer.seed=3", "trainer.max_steps=6")
    assert ended.code == 2, ended
    assert "changed for this run: trainer.max_steps 4 -> 6, trainer.seed 0 -> 3" in ended.err
    assert "seed: 0 in the checkpoint, 3 now" in ended.err
    assert ended.err.rstrip().endswith("or name those that may differ: --allow NAME,NAME")
    capfd.readouterr()


@pytest.mark.usefixtures("runs")
def test_words_after_resume_are_understood(config: Path) -> None:
    for words in (["--resume"], ["trainer.seed=3", "--resume", "nobody"], ["--resume", "trainer.seed=3"]):
        ended = invoke("train", *words)
        assert ended.code == 2
        assert "no run" in ended.err, (words, ended)
    assert "CONFIG is missing: give a project file, or a run with --resume" in invoke("train").err
    assert "has no run of small: start one" in invoke("train", "--resume", config).err
