"""The page about the benchmarks: written from stored results, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.pages import read_results, table


def spread(median: float) -> dict[str, float]:
    return {"minimum": median - 2, "q1": median - 1, "median": median, "q3": median + 1, "maximum": median + 2}


def sample(bench: str = "overhead", **changes: Any) -> dict[str, Any]:
    detail = {
        "ours": "paceline",
        "limit": "bare loop",
        "better": "lower",
        "turns": 7,
        "spread": {"paceline": spread(105), "bare loop": spread(100), "Fabric": spread(2500)},
        "ratio_by_turn": {"paceline": spread(1.05), "bare loop": spread(1.0), "Fabric": spread(25.0)},
        "skipped": {"HF Trainer": "transformers is not installed"},
        "notes": ["it was a Sunday"],
        "settings": {"batch": 32},
        "versions": {"torch": "2.13"},
        "machine": {"cpu": "Abacus", "cores": 2, "gpu": None, "python": "3.11.7", "load_average": 0.5},
        "date": "2026-11-15T12:00:00+00:00",
        "others_cores": 0.25,
    }
    return {"bench": bench, "unit": "us", "ours": 105, "limit": 100, "peers": {}, "detail": detail, **changes}


def part_sample(part: str) -> dict[str, Any]:
    judged = {"goal": "of the bare loop, at least", "value": 0.9, "bound": 0.99, "reached": False}
    measured = {**sample(part), **judged}
    del measured["detail"]["others_cores"]
    return {"bench": "gpu", "parts": {part: measured}, "detail": {"others_cores": 1.5}}


def store(folder: Path, **results: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, result in results.items():
        (folder / f"{name}.txt").write_text(f"a table for people\n{json.dumps(result)}\n")
    return folder


def write(results: Path, docs: Path) -> str:
    docs.mkdir()
    main(["pages", str(results), "-o", str(docs / "benchmarks.md")])
    return (docs / "benchmarks.md").read_text()


def test_a_table_has_the_best_first_and_says_who_was_skipped() -> None:
    lines = table(sample()).splitlines()
    assert lines[0] == "|  | us, lower is better | to bare loop |"
    assert lines[2] == "| bare loop | 100 (99 .. 101) | 1.000 (0.000 .. 2.000) |"
    assert lines[3].startswith("| **paceline** | 105 (104 .. 106) | 1.050 ")
    assert lines[4].startswith("| Fabric | 2,500 (2,499 .. 2,501) |")
    assert lines[5] == "| HF Trainer | skipped: transformers is not installed |  |"


def test_where_more_is_better_the_most_comes_first() -> None:
    result = sample()
    result["detail"]["better"] = "higher"
    assert table(result).splitlines()[2].startswith("| Fabric |")


def test_memory_stands_beside_speed_where_it_was_measured() -> None:
    result = sample()
    result["detail"]["peak_bytes"] = {"paceline": 3 * 2**30, "bare loop": 2**30, "Fabric": 0}
    assert table(result).splitlines()[3].endswith("| 3.00 |")


def test_the_page_says_how_to_repeat_it_and_where_it_was_measured(tmp_path: Path) -> None:
    text = write(store(tmp_path / "results", overhead=sample(), gpu=part_sample("cnn")), tmp_path / "docs")
    assert text.index("## overhead") < text.index("## gpu") < text.index("### cnn")
    assert "`python -m bench overhead --json`" in text
    assert "Goal: of the bare loop, at least 0.99. Measured: 0.900, missed." in text
    assert "Abacus, 2 cores, 2026-11-15; Python 3.11.7, torch 2.13; 7 turns, while other processes used 0.25" in text
    assert "used 1.50 cores" in text
    assert "it was a Sunday" in text
    assert "![gpu cnn](images/bench-gpu-cnn.png)" in text
    assert {path.name for path in (tmp_path / "docs" / "images").iterdir()} == {
        "bench-overhead.png", "bench-gpu-cnn.png",
    }  # fmt: skip


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    results = store(tmp_path / "results", overhead=sample())
    folders = [tmp_path / "first", tmp_path / "second"]
    assert write(results, folders[0]) == write(results, folders[1])
    first, second = ((folder / "images" / "bench-overhead.png").read_bytes() for folder in folders)
    assert first == second
    assert len(first) < 50_000


def test_parts_that_were_run_one_by_one_come_together(tmp_path: Path) -> None:
    folder = store(tmp_path / "results", a=part_sample("cnn"), b=part_sample("mlp"))
    (result,) = read_results(folder)
    assert list(result["parts"]) == ["cnn", "mlp"]


def test_a_benchmark_without_a_new_result_keeps_its_section(tmp_path: Path) -> None:
    first, docs = store(tmp_path / "first", overhead=sample(), gpu=part_sample("cnn")), tmp_path / "docs"
    before = write(first, docs)
    newer = sample(unit="ns")
    main(["pages", str(store(tmp_path / "second", overhead=newer)), "-o", str(docs / "benchmarks.md")])
    text = (docs / "benchmarks.md").read_text()
    assert text == before.replace("| us,", "| ns,", 1)
    assert "## gpu" in text


def test_two_results_of_one_benchmark_are_refused(tmp_path: Path) -> None:
    folder = store(tmp_path / "results", old=sample(), new=sample())
    with pytest.raises(ValueError, match=r"old\.txt: there is another result of overhead .* keep one of them"):
        read_results(folder)


def test_other_files_are_left_alone_and_an_empty_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store(tmp_path / "results")
    (folder / "notes.md").write_text("nothing here\n")
    (folder / "empty").touch()
    with pytest.raises(SystemExit):
        main(["pages", str(folder), "-o", str(tmp_path / "page.md")])
    assert "has no results" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
