"""`paceline completion`: the completions that bash, zsh and fish offer, and the content of the scripts."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from in_process import invoke
from zsh_session import Zsh

from paceline.cli import checkpoints, completion, doctor, runs


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="paceline")
    root.add_argument("--version", action="store_true", help="it's shown")
    commands = root.add_subparsers()
    completion.add_parser(commands)
    runs.add_parser(commands)
    checkpoints.add_parser(commands)
    doctor.add_parser(commands)
    return root


def offered(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    (folder / "paceline.bash").write_text(completion.script(parser(), "bash"))
    ended = subprocess.run(
        ["bash", "--norc", "-c", 'source ./paceline.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _paceline; '
         'printf "%s\n" "${COMPREPLY[@]}"', "bash", "paceline", *words],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    return ended.stdout.split()


# The words on the command line, and their completions.
FOLLOWS = [
    ([""], ["completion", "runs", "checkpoints", "doctor"]),
    (["r"], ["runs"]),
    (["--"], ["--help", "--version"]),
    (["runs", ""], ["status", "save", "stop", "leave", "abort"]),
    (["runs", "s"], ["status", "save", "stop"]),
    (["runs", "save", "--w"], ["--wait"]),
    (["runs", "save", "a", "--t"], ["--timeout"]),
    (["runs", "stop", "ti"], ["tiny_1", "tiny_2"]),
    (["checkpoints", "export", "--format", ""], ["safetensors", "torch"]),
    (["checkpoints", "export", "--component", "e"], ["ema"]),
    (["completion", ""], ["bash", "zsh", "fish"]),
    (["doctor", "--j"], ["--json"]),
    (["doctor", "ti"], ["tiny_1", "tiny_2"]),
    (["nothing", ""], ["completion", "runs", "checkpoints", "doctor"]),
]
FOLLOWS_FILE = [["runs", "save", "--timeout", ""], ["checkpoints", "export", "-o", ""]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with runs."""
    for name in ("tiny_1", "tiny_2", "big"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *FOLLOWS,
        *((words, []) for words in FOLLOWS_FILE),
        (["runs", "--", ""], ["status", "save", "stop", "leave", "abort"]),
    ],
    ids=" ".join,
)
def test_bash_completions(place: Path, words: list[str], expected: list[str]) -> None:
    assert offered(place, *words) == expected


def test_zsh_completions(place: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    with Zsh(place, completion.script(parser(), "zsh")) as zsh:
        for words, expected in FOLLOWS:
            assert sorted(zsh.offered(f"paceline {' '.join(words)}")) == sorted(expected), words
        for words in FOLLOWS_FILE:
            assert zsh.offered(f"paceline {' '.join(words)}") == ["functions", "runs"], words


def test_fish_completions(place: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (place / "paceline.fish").write_text(completion.script(parser(), "fish"))
    lines = [f"paceline {' '.join(words)}" for words in [*(words for words, _ in FOLLOWS), *FOLLOWS_FILE]]
    asking = "source paceline.fish; for line in $argv; complete -C $line; echo .; end"
    ended = subprocess.run(
        ["fish", "--no-config", "-c", asking, *lines],
        cwd=place, env=os.environ | {"HOME": str(place)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    answers = [
        sorted(row.partition("\t")[0] for row in answer.splitlines()) for answer in ended.stdout.split(".\n")[:-1]
    ]
    files = ["paceline.fish", "runs/"]
    assert answers == [*(sorted(expected) for _, expected in FOLLOWS), *[files] * len(FOLLOWS_FILE)]


def test_bash_completes_names_of_runs(place: Path) -> None:
    assert offered(place, "checkpoints", "verify", "") == ["big", "tiny_1", "tiny_2"]
    assert offered(place, "checkpoints", "export", "--output", "ti") == []


def test_bash_falls_back_to_file_names(tmp_path: Path) -> None:
    (tmp_path / "paceline.bash").write_text(completion.script(parser(), "bash"))
    said = subprocess.run(
        ["bash", "--norc", "-c", "source ./paceline.bash; complete -p paceline"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "complete -o bashdefault -o default -F _paceline paceline\n"


def test_zsh_script_describes_commands_and_options() -> None:
    lines = completion.script(parser(), "zsh").splitlines()
    assert lines[0] == "#compdef paceline"
    assert "('runs save') at=\"$longer\" ;;" in lines
    assert "('checkpoints export --format') compadd -- safetensors torch; return ;;" in lines
    assert "('checkpoints export -o') _files; return ;;" in lines
    (root,) = (line for line in lines if line.startswith("('') offered=(-h") or "--version" in line)
    assert "'--version:it'\"'\"'s shown'" in root


def test_fish_script_has_a_line_per_word() -> None:
    lines = completion.script(parser(), "fish").splitlines()
    at_export = "complete -c paceline -n '__paceline_at \"checkpoints export\"'"
    assert f"{at_export} -l force -d 'overwrite an existing file'" in lines
    assert f"{at_export} -l output -r -d 'the file to write'" in lines
    assert any(line.startswith(f"{at_export} -l format -x -a 'safetensors torch' -d ") for line in lines)
    assert "complete -c paceline -n '__paceline_at \"\"' -l version -d 'it\\'s shown'" in lines
    assert "complete -c paceline -n '__paceline_at \"runs stop\"' -a '(command ls runs 2> /dev/null)'" in lines


def test_command_prints_a_script_for_all_commands() -> None:
    ended = invoke("completion", "bash")
    assert ended.code == 0
    assert "('runs abort')" in ended.out
    assert "('logs plot')" in ended.out
    assert invoke("completion", "tcsh").code == 2
