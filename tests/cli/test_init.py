"""`paceline init`: the new project trains, and existing files are not changed."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from paceline.cli.config import load_project
from paceline.cli.init import FILES
from paceline.cli.main import main
from paceline.observe.json_lines import LineReader
from paceline.observe.run_files import RunFiles


@pytest.mark.timeout(200)
def test_new_project_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first/two spirals"]) == 0
    steps = capfd.readouterr().out
    assert "  cd 'first/two spirals'\n" in steps
    assert "  paceline train config.yaml " in steps
    monkeypatch.chdir("first/two spirals")
    assert main(["train", "config.yaml", "--workers", "1", "trainer.epochs=3"]) == 0
    (root,) = Path("runs").iterdir()
    run = RunFiles(root)
    for path in (run.config, run.environment, run.metrics, run.events, run.report, run.plots / "training.png"):
        assert path.is_file(), path
    assert json.loads(run.status.read_text())["state"] == "finished"
    assert (run.checkpoints / "step-00000141" / "manifest.json").is_file()
    assert (run.ranks / "rank-0.out").is_file()
    accuracies = [row["eval"]["accuracy"] for row in LineReader(run.metrics).read() if "eval" in row]
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.8  # a third of the points lies on each spiral


def test_project_name_is_the_folder_name_or_the_option(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "spirals")]) == 0
    assert main(["init", str(tmp_path / "other"), "--name", "Three arms"]) == 0
    for folder, name in (("spirals", "spirals"), ("other", "Three arms")):
        assert (tmp_path / folder / "README.md").read_text().startswith(f"# {name}\n")
        assert (tmp_path / folder / "config.yaml").read_text().startswith(f"# {name}: what to train, and how.\n")
        assert "PROJECT_NAME" not in "".join((tmp_path / folder / file).read_text() for file in FILES)


def test_commented_out_settings_are_valid(tmp_path: Path) -> None:
    main(["init", str(tmp_path), "--name", "Three arms"])
    config = tmp_path / "config.yaml"
    text, num_taken_in = re.subn(r"^( *)# (\w+: )", r"\1\2", config.read_text(), flags=re.MULTILINE)
    assert num_taken_in == 4
    config.write_text(text)
    settings = load_project(config).settings
    assert (settings.workers, settings.loggers) == (2, ("tensorboard",))
    assert (settings.trainer.exact, settings.trainer.precision) == (True, "bf16")


def test_all_templates_are_written(tmp_path: Path) -> None:
    templates = {path.name for path in files("paceline.cli.templates").iterdir()} - {"__init__.py", "__pycache__"}
    assert templates == set(FILES)
    main(["init", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == templates


def test_non_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == (f"paceline init: {tmp_path} is not empty: choose a new or empty folder\n")
    assert not captured.out
    assert {path.name for path in tmp_path.iterdir()} == {".hidden", "a.txt", "b.txt"}


def test_current_folder_with_an_empty_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0
    assert "  cd " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["file"], 2, "file is a file: choose a new or empty folder"),
        (["file/inside"], 2, "file/inside: Not a directory"),
        (
            ["new", "--name", "two\nlines"],
            2,
            r"invalid project name 'two\nlines': choose a --name of one line",
        ),
        (["new", "--name", ""], 2, "invalid project name '': choose a --name of one line"),
    ],
)
def test_unwritable_folders_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["init", *arguments]) == code
    assert text in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
