"""`paceline timeline`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from timeline_files import run_of_two, session, step, write_lines

from paceline.cli.main import main


def command(*arguments: object) -> int:
    return main(["timeline", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_of_two(tmp_path / "runs" / "two_2026-11-15_12-00-00")
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_default_format_is_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "--idle", "0.15") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run.name}: 1.1 s"
    assert lines[3].split() == ["0", "3", "1.1", "26.5%", "2.7%", "53.1%", "5.3%", "8.0%", "0.0%", "0.0%", "4.4%"]
    assert "3 idle times of at least 0.15 s:" in lines
    assert "  rank 0 after step 1, at 0.2 s: 0.2 s, mostly wait" in lines


def test_run_is_found_by_a_prefix_of_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("two", "--runs", run.parent) == 0
    assert command("--runs", run.parent) == 0
    assert capsys.readouterr().out.count(f"{run.name}: 1.1 s") == 2


def test_folder_of_timeline_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run / "timeline") == 0
    assert capsys.readouterr().out.startswith(run.name)


def test_html_is_written_to_the_run_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "--format", "html") == 0
    assert capsys.readouterr().out == f"{run / 'timeline.html'}\n"
    assert (run / "timeline.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(("--format", "chrome", "-o", "a"), "traceEvents"), (("-o", "a.json"), "workers"), (("-o", "a.csv"), None)],
)
def test_output_file_and_its_format(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], key: str | None
) -> None:
    monkeypatch.chdir(run.parent)
    assert command(run, *arguments) == 0
    text = (run.parent / arguments[-1]).read_text()
    assert key in json.loads(text) if key is not None else text.startswith("rank,host,what,")


def test_range_of_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "--from", 2, "--to", 3, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {span[3] for worker in found["workers"] for span in worker["spans"]} == {2, 3}


def test_faults_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = ["fault", 1, 200, {"error": "ValueError", "text": "no"}]
    write_lines(tmp_path / "rank-0.jsonl", session(), {"steps": [step(1, 0)], "events": [fault]}, {"end": 300})
    assert command(tmp_path) == 0
    assert "  rank 0 after step 1, at 0.0 s: fault (ValueError: no)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--from", "9"), 1, "there is no step from 9 on: the timeline ends with step 3"),
        (("--from", "3", "--to", "1"), 1, "the range from step 3 to step 1 is empty: choose a later end"),
        (("-o", "x.png"), 2, "-o x.png: unknown suffix: choose .html, .json or .csv, or give --format"),
        (("--format", "csv", "--idle", "2"), 2, "--idle would be ignored with --format csv: leave it out"),
        (("--format", "csv", "-o", "no/folder/x"), 2, "no/folder/x: No such file or directory"),
    ],
)
def test_errors_are_one_message(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert command(run, *arguments) == code
    assert capsys.readouterr().err.startswith(f"paceline timeline: {message}")


def test_run_without_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert command(tmp_path) == 1
    assert f"paceline timeline: {tmp_path} has no timeline: record one with" in capsys.readouterr().err
