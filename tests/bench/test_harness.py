"""The harness of the benchmarks, and a short run of each benchmark."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import preloaded_python
import pytest
import torch

from bench import overhead, scaling
from bench.__main__ import BENCHMARKS, main
from bench.harness import (
    Contestant,
    Result,
    Spread,
    TorchSettings,
    alternate,
    busy_seconds,
    isolated,
    missing_package,
    turn_order,
)
from bench.models import LanguageModel
from bench.workers import run_workers

ROOT = Path(__file__).parents[2]
FIELDS = ["bench", "unit", "ours", "limit", "ratio", "peers", "detail"]


def result_of(measurements: dict[str, list[float]], **changes: Any) -> Result:
    arguments: dict[str, Any] = {"ours": "a", "limit": "b", "better": "lower", "settings": {"batch": 32}, **changes}
    return Result.of("demo", "seconds", measurements, **arguments)


@pytest.mark.parametrize(("turn", "order"), [(0, "abc"), (1, "acb"), (2, "cab"), (3, "cba"), (4, "bca"), (5, "bac")])
def test_the_order_of_a_turn_rotates_and_turns_around(turn: int, order: str) -> None:
    assert turn_order("abc", turn) == list(order)


def test_contestants_alternate_within_a_run() -> None:
    calls: list[str] = []
    counter = itertools.count(1.0)

    def contestant(name: str) -> Contestant:
        def turn() -> float:
            calls.append(name)
            return next(counter)

        return turn

    measurements = alternate({"a": contestant("a"), "b": contestant("b")}, 3)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert measurements == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


def test_no_turns_is_an_error() -> None:
    with pytest.raises(ValueError, match="turns=0 measures nothing: choose turns >= 1"):
        alternate({"a": lambda: 1.0}, 0)


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([5.0], Spread(5.0, 5.0, 5.0, 5.0, 5.0)),
        ([4.0, 1.0, 5.0, 2.0, 3.0], Spread(1.0, 2.0, 3.0, 4.0, 5.0)),
        ([1.0, 1.0, 1.0, 100.0], Spread(1.0, 1.0, 1.0, 25.75, 100.0)),
    ],
)
def test_spread(values: list[float], spread: Spread) -> None:
    assert Spread.of(values) == spread


def test_a_contestants_torch_settings_stay_its_own() -> None:
    outside = TorchSettings.current()
    seen: list[tuple[TorchSettings, bool]] = []

    def build() -> Contestant:
        torch.use_deterministic_algorithms(True)

        def turn() -> float:
            seen.append((TorchSettings.current(), torch.utils.deterministic.fill_uninitialized_memory))
            torch.utils.deterministic.fill_uninitialized_memory = False
            return 0.0

        return turn

    contestant = isolated(build)
    assert TorchSettings.current() == outside
    contestant()
    assert TorchSettings.current() == outside
    contestant()
    assert TorchSettings.current() == outside
    assert [settings.deterministic for settings, _ in seen] == [True, True]
    assert [fills for _, fills in seen] == [True, False]  # what a turn changes is there in the next


def test_settings_come_back_after_an_error() -> None:
    outside = TorchSettings.current()

    def fail() -> Contestant:
        torch.use_deterministic_algorithms(True)
        raise KeyError("set-up")

    with pytest.raises(KeyError):
        isolated(fail)
    assert TorchSettings.current() == outside


def test_result_takes_medians_and_keeps_the_rest_as_peers() -> None:
    measurements = {"a": [3.0, 9.0, 3.0], "b": [2.0, 4.0, 2.0], "c": [8.0, 8.0, 6.0], "d": [1.0, 1.0, 1.0]}
    result = result_of(measurements, not_peers=("d",))
    assert (result.ours, result.limit, result.ratio, result.peers) == (3.0, 2.0, 1.5, {"c": 8.0})
    assert result.detail["turns"] == 3
    assert result.detail["spread"]["d"]["median"] == 1.0
    assert result.detail["ratio_by_turn"]["a"]["maximum"] == 9.0 / 4.0
    assert result.detail["ours_over_by_turn"]["c"]["minimum"] == 3.0 / 8.0
    assert result.detail["versions"]["torch"] == torch.__version__
    assert result.detail["machine"]["cores"] >= 1


def test_json_is_one_line_with_the_agreed_fields() -> None:
    text = result_of({"a": [3.0], "b": [2.0]}).to_json()
    assert "\n" not in text
    assert list(json.loads(text)) == FIELDS
    assert json.loads(text)["ratio"] == 1.5


def test_table_names_everybody_and_says_who_was_skipped() -> None:
    result = result_of({"a": [3.0], "b": [2.0], "c": [1234.5]}, skipped={"d": "nobody built it"})
    result.detail["notes"].append("it was a Sunday")
    lines = result.table().splitlines()
    assert lines[0] == "demo: seconds, lower is better; medians of 1 turns"
    assert [line.split()[0] for line in lines[2:6]] == ["b", "a", "c", "d"]
    assert lines[2].endswith("limit")
    assert lines[3].endswith("ours")
    assert "1.500" in lines[3]
    assert "1234" in lines[4]
    assert lines[5].endswith("skipped: nobody built it")
    assert lines[6] == "ratio of a to b: 1.500"
    assert lines[7] == "it was a Sunday"
    assert lines[9] == "batch 32"


def test_busy_time_leaves_out_idling_and_waiting_for_disks() -> None:
    proc_stat = "cpu  100 20 30 5000 700 1 2 4 50 60\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    assert busy_seconds(proc_stat, ticks_per_s=100) == 1.57


def test_missing_packages_have_a_reason() -> None:
    assert missing_package("torch") is None
    reason = missing_package("torch", "no-such-package")
    assert reason == "no-such-package is not installed (the `bench` extra has it)"


def test_independent_processes_add_up_and_a_common_step_takes_as_long_as_its_slowest_worker() -> None:
    task = scaling.Task(num_workers=2, micro_batch=8, num_micro_batches=3, num_turns=1, seconds=1.0)
    assert scaling.samples_per_s(scaling.INDEPENDENT, (0.5, 0.25), task) == 24 / 0.5 + 24 / 0.25
    assert scaling.samples_per_s(scaling.OURS, (0.5, 0.25), task) == 48 / 0.5


def test_workers_read_disjoint_parts_of_an_epoch() -> None:
    task = scaling.Task(num_workers=2, micro_batch=8, num_micro_batches=1, num_turns=1, seconds=1.0)
    numbers = torch.arange(scaling.NUM_SAMPLES)
    per_epoch = scaling.NUM_SAMPLES // 16
    seen = [torch.cat(list(itertools.islice(scaling.shuffled(numbers, task, rank), per_epoch))) for rank in (0, 1)]
    assert torch.cat(seen).sort().values.equal(numbers)


def test_the_transformer_has_3_7_million_parameters() -> None:
    assert sum(parameter.numel() for parameter in LanguageModel().parameters()) == 3_687_936


def own_rank(offset: int) -> tuple[int, int]:
    return int(os.environ["RANK"]) + offset, torch.get_num_threads()


def fail_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        raise KeyError("what went wrong")
    time.sleep(60)


def die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_workers_return_by_rank() -> None:
    assert run_workers(own_rank, 2, 10) == [(10, 1), (11, 1)]


def test_one_worker_failing_ends_the_others_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)worker 0 of 2 failed: .*fail_on_rank_0.*KeyError: 'what went wrong'"):
        run_workers(fail_on_rank_0, 2)
    assert time.monotonic() - start < 50


def test_one_worker_killed_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 1 of 2 failed: it was killed"):
        run_workers(die_on_rank_1, 2)
    assert time.monotonic() - start < 50


def test_listing_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    listing = capsys.readouterr().out
    for name, benchmark in BENCHMARKS.items():
        assert f"  {name:<10} {benchmark.description}" in listing


def test_an_unknown_benchmark_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["overheat"])
    error = capsys.readouterr().err
    assert "overheat" in error
    assert all(name in error for name in BENCHMARKS)


def test_overhead_names_the_peers_it_had_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(overhead.PEERS, "absent", overhead.Peer(overhead.bare, ("no-such-package",)))
    result = overhead.run(argparse.Namespace(turns=1, steps=2, loader="batches", peers=["absent"]))
    assert result.detail["skipped"] == {"absent": "no-such-package is not installed (the `bench` extra has it)"}
    assert result.peers == {}


SHORT_RUNS = {  # of those that run everywhere; test_hetero.py has its own
    "import": ["--turns", "1"],
    "overhead": ["--turns", "1", "--steps", "8", "--peers", "bare loop, DataLoader"],
    "scaling": [
        "--turns",
        "1",
        "--seconds",
        "0.1",
        "--micro-batch",
        "1",
        "--membership-turns",
        "2",
        "--membership-seconds",
        "0.01",
    ],
    "crowded": ["--workers", "1", "--turns", "1", "--seconds", "0.1", "--micro-batch", "1"],
}
PEERS = {
    "import": set(),
    "overhead": {"bare loop, DataLoader"},
    "scaling": {"torch DDP"},
    "crowded": {"torch DDP, 1 workers", "torch DDP, 1 workers, 2 each", "torch DDP, 2 workers"},
}


def run_bench(name: str, *options: str) -> dict[str, Any]:
    """The object that `python -m bench NAME --json` ends with."""
    command = [sys.executable, "-m", "bench", name, "--json", *options]
    done = preloaded_python.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "crowded" else ()) for name in SHORT_RUNS]
)
def test_short_run(name: str) -> None:
    fields = run_bench(name, *SHORT_RUNS[name])
    assert list(fields) == FIELDS
    assert fields["bench"] == name
    assert fields["ratio"] == pytest.approx(fields["ours"] / fields["limit"])
    assert set(fields["peers"]) == PEERS[name]
    assert not fields["detail"]["skipped"]
    assert fields["detail"]["others_cores"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["batches", "samples"])
def test_overhead_with_every_peer(loader: str) -> None:
    """Needs the `bench` extra: shows that the peers' interfaces are still as we call them."""
    fields = run_bench("overhead", "--turns", "1", "--steps", "8", "--loader", loader)
    assert fields["detail"]["skipped"] == {}
    assert set(fields["peers"]) == set(overhead.PEERS)
