"""The data benchmark: a short run of every part, and what it makes of its measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import preloaded_python
import pyarrow as pa
import pytest
import torch

from bench.data import GOALS, over_best_peer
from bench.data_files import COLUMN, scratch, write_files
from bench.data_reading import ARROW, hf_iterable, hf_map, ours
from bench.harness import Result
from bench.parts import Goal, Parts, to_limit

ROOT = Path(__file__).parents[2]


def result_of(measurements: dict[str, list[float]], ours: str, limit: str) -> Result:
    return Result.of("data", "samples/s", measurements, ours=ours, limit=limit, better="higher", settings={})


def test_a_goal_is_judged_by_the_ratios_within_a_turn() -> None:
    # The machine got twice as slow on the way: only the ratios within a turn are steady.
    result = result_of({"ours": [96.0, 95.0, 48.0], "limit": [100.0, 100.0, 50.0]}, "ours", "limit")
    at_least, at_most = Goal("", to_limit("ours"), 0.96), Goal("", to_limit("ours"), 0.95, is_upper=True)
    assert at_least.judge(result) == {"goal": "", "value": 0.96, "bound": 0.96, "reached": True}
    assert not at_most.judge(result)["reached"]


def test_the_arrow_goal_is_judged_by_the_faster_peer() -> None:
    result = result_of({ARROW: [30.0], "HF map-style": [10.0], "HF iterable": [15.0]}, ARROW, "HF map-style")
    assert over_best_peer(result) == 2.0


def test_all_parts_end_up_in_one_line() -> None:
    result = result_of({"dispatched": [9.0], "sharded": [10.0]}, "dispatched", "sharded")
    parts = Parts("data", {"strategies": result}, GOALS, {"others_cores": 0.0})
    assert parts.table().splitlines()[-1].endswith("at least 0.97: 0.900, MISSED")
    (line,) = parts.to_json().splitlines()
    decoded = json.loads(line)
    assert decoded["parts"]["strategies"]["value"] == 0.9
    assert decoded["parts"]["strategies"]["ours"] == 9.0


def test_all_readers_of_the_arrow_part_give_the_files_rows(tmp_path: Path) -> None:
    with scratch():
        paths = write_files(tmp_path, num_files=2, rows=64, length=128, vocabulary=10**9, rows_per_batch=10)
        first = [next(reader(paths)) for reader in (ours, hf_map, hf_iterable)]
    assert torch.equal(first[0], first[1])  # the same order
    assert not torch.equal(first[0], first[2])
    rows = {tuple(row) for path in paths for row in pa.ipc.open_stream(path).read_all()[COLUMN].to_pylist()}
    assert all(tuple(row) in rows for batch in first for row in batch.tolist())


@pytest.mark.parametrize(
    "parts", [["strategies", "arrow", "start"], pytest.param(list(GOALS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_short_run(parts: list[str]) -> None:
    command = [sys.executable, "-m", "bench", "data", "--json", "--quick", "--parts", *parts]
    done = preloaded_python.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bench"] == "data"
    assert list(found["parts"]) == parts
    assert all(part["value"] > 0 for part in found["parts"].values())
    assert set(found["parts"]["strategies"]["detail"]["spread"]) == {
        "dispatched", "sharded", "iterable", "fast iterable", "sharded iterable",
    }  # fmt: skip
    assert found["detail"]["others_cores"] >= 0
