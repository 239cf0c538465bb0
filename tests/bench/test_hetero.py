"""The benchmark of unequal workers: its arithmetic, its cgroup, and a short run of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded_python import PreloadedPython

from bench import hetero, hetero_shift
from bench.__main__ import NOT_HERE, main
from bench.cpu_quota import ROOT, CpuQuota, cpu_quota, missing_cpu_quota
from bench.hetero import ExactRun
from bench.hetero_shift import Change, Phase, Step, Trained
from bench.models import mlp
from bench.unequal import STEPS_PER_EPOCH, Task
from bench.workers import run_workers

MISSING = missing_cpu_quota()
needs_quota = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def task_of(**changes: Any) -> Task:
    values = {"quota": 0.4, "micro_batch": 2, "num_micro_batches": 8, "num_turns": 1, "seconds": 1.0, **changes}
    return Task(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quota": 0.0}, "quota=0.0 is no part of a core: choose 0 < quota <= 1"),
        ({"quota": 1.5}, "quota=1.5 is no part of a core"),
        ({"num_micro_batches": 9}, "micro-batches=9 cannot be divided equally: choose a multiple of 2"),
        ({"num_micro_batches": 6}, "micro-batches=6 may leave none to a worker with 0.4 of a core: choose at least 8"),
        ({"quota": 1.0, "num_micro_batches": 2}, "micro-batches=2 .* choose at least 4"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


def test_a_task_divides_its_step_equally_for_the_peers() -> None:
    task = task_of()
    assert task.global_batch == 16
    assert task.equal_split.num_workers * task.equal_split.samples_per_worker == task.global_batch
    assert len(task.tokens()) == STEPS_PER_EPOCH * task.global_batch


def test_a_whole_core_is_no_limit() -> None:
    assert (task_of(quota=1.0).cores, task_of(quota=0.4).cores) == (None, 0.4)


def test_alone_adds_up_and_a_common_step_takes_as_long_as_its_slowest_worker() -> None:
    assert hetero.samples_per_s(hetero.ALONE, (30.0, 12.0), task_of()) == 42.0
    assert hetero.samples_per_s(hetero.OURS, (0.5, 0.25), task_of()) == 16 / 0.5


@pytest.mark.parametrize(
    ("num_micro_batches", "speeds", "limit"),
    [(32, (1.0, 0.4), 32 / 23 / 1.4), (16, (1.0, 0.4), 16 / 12 / 1.4), (8, (1.0, 1.0), 1.0)],
)
def test_whole_numbers_limit_what_can_be_reached(
    num_micro_batches: int, speeds: tuple[float, ...], limit: float
) -> None:
    assert hetero.whole_number_limit(speeds, num_micro_batches) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("hashes", "one_worker", "is_equal"),
    [(["a", "a"], "a", True), (["a", "b"], "a", False), (["a", "a"], "b", False)],
)
def test_exact_weights_are_equal_only_if_all_replicas_of_all_runs_are(
    hashes: list[str], one_worker: str, is_equal: bool
) -> None:
    by_rank = [{"equal": ExactRun("a", [(4, 4)]), "measured": ExactRun(own, [(5, 3)])} for own in hashes]
    detail = hetero.compare_exact(by_rank, ExactRun(one_worker, [(8,)]))
    assert detail["exact_weights_equal"] is is_equal
    assert detail["exact_weights_sha256"] == {"equal": ["a", "a"], "measured": hashes, "1 worker": [one_worker]}
    assert detail["exact_shares"] == {"equal": [(4, 4)], "measured": [(5, 3)]}


def test_the_hash_of_weights_sees_one_bit() -> None:
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    before = hetero.sha256_of(model)
    assert hetero.sha256_of(model) == before
    weight = model.state_dict()["2.weight"]
    weight[1, 3] = torch.nextafter(weight[1, 3], torch.tensor(9.0))
    assert hetero.sha256_of(model) != before


def test_a_step_lasts_from_the_last_workers_end_to_the_last_workers_end() -> None:
    by_rank = [
        Trained({}, start_s=10.0, ends_s=[11.0, 12.5, 13.0], shares=[(4, 4), (5, 3), (6, 2)]),
        Trained({}, start_s=10.5, ends_s=[11.5, 12.0, 14.5], shares=[(4, 4), (5, 3), (6, 2)]),
    ]
    sums = {"no limit": 16.0, "0.4 of a core": 8.0}
    assert hetero_shift.steps_of(task_of(), by_rank, sums, num_steps=1) == [
        Step(1, "no limit", 1.0, (4, 4), 1.0),
        Step(2, "0.4 of a core", 1.0, (5, 3), 2.0),
        Step(3, "no limit", 2.0, (6, 2), 0.5),
    ]


@pytest.mark.parametrize(
    ("relative", "first_above", "median", "part_above"),
    [
        ([0.5, 0.6, 0.95, 0.8, 0.9, 0.9, 0.91, 0.92, 0.8], 3, 0.91, 2 / 3),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.9, 1.0], 8, 0.95, 0.5),
        ([0.5] * 7, None, 0.5, 0.0),
    ],
)
def test_a_change_is_judged_by_the_first_step_above_the_goal_and_by_those_after_the_sixth(
    relative: list[float], first_above: int | None, median: float, part_above: float
) -> None:
    change = Change.of(Phase("cut", 0.4), relative)
    assert (change.name, change.limit) == ("cut", "0.4 of a core")
    assert (change.first_above, change.median, change.part_above) == (first_above, median, part_above)
    assert change.first_six == relative[:6]


@pytest.mark.parametrize(
    ("quota", "num_steps", "message"),
    [(1.0, 20, "quota=1 is no limit, so nothing would shift: choose quota < 1"), (0.4, 6, "steps=6 .* choose more")],
)
def test_a_shift_that_shows_nothing_is_refused(quota: float, num_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hetero_shift.shift(task_of(quota=quota), num_steps)


def test_where_there_is_no_quota_the_reason_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.cpu_quota.ROOT", tmp_path / "absent")
    with pytest.raises(SystemExit, match=str(NOT_HERE)):
        main(["hetero"])
    assert re.search(r"a cgroup .* it takes root and the cpu controller: .*absent", capsys.readouterr().err)


def num_limited_periods(quota: CpuQuota) -> int:
    """Periods in which the group ran under a limit. The kernel counts none while there is no limit, however busy."""
    statistics = dict(line.split() for line in (quota.folder / "cpu.stat").read_text().splitlines())
    return int(statistics["nr_periods"])


def busy_under(quota: CpuQuota, seconds: float) -> tuple[float, int, int]:
    """In the group: the cores that this process gets under its limit, and the limited periods then and without."""

    def cores() -> float:
        start, start_cpu = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - start) < seconds:
            pass
        return (time.process_time() - start_cpu) / elapsed

    quota.add(os.getpid())
    limited_cores = cores()
    quota.limit(None)
    limited = num_limited_periods(quota)
    cores()
    return limited_cores, limited, num_limited_periods(quota) - limited


@needs_quota
def test_a_quota_limits_who_is_in_it_until_it_is_lifted() -> None:
    with cpu_quota(0.1) as quota:
        ((cores, periods_limited, periods_lifted),) = run_workers(busy_under, 1, quota, 1.0)
    assert cores < 0.2
    assert periods_limited > 0
    assert periods_lifted == 0


@needs_quota
def test_a_quota_is_gone_after_an_error_and_lets_its_members_go() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(KeyError), cpu_quota(0.5) as quota:
            quota.add(process.pid)
            assert quota.folder.name in Path(f"/proc/{process.pid}/cgroup").read_text()
            raise KeyError("in the middle")
        assert not quota.folder.exists()
        assert re.search(r"^\d+:cpu[^:]*:/$", Path(f"/proc/{process.pid}/cgroup").read_text(), re.MULTILINE)
    finally:
        process.communicate(b"\n")


@needs_quota
def test_no_quota_is_left_when_the_benchmark_is_terminated() -> None:
    process = PreloadedPython([sys.executable, "-m", "bench", "hetero"], cwd=Path(__file__).parents[2])

    def groups() -> list[Path]:
        return list(ROOT.glob(f"paceline-bench-{process.pid}-*"))

    def is_worker_limited() -> bool:
        with suppress(OSError):  # the group that the benchmark makes to see whether it can may go meanwhile
            return any((group / "cgroup.procs").read_text() for group in groups())
        return False

    try:
        deadline = time.monotonic() + 60
        while not is_worker_limited():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait(60)
    assert groups() == []


SHORT = ["--turns", "1", "--seconds", "0.1", "--micro-batch", "1", "--micro-batches", "8", "--peers", "torch DDP"]


def run_bench(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """The object that `python -m bench hetero --json` ends with, and the table before it."""
    main(["hetero", "--json", *SHORT, *options])
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return json.loads(line), table


@needs_quota
def test_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    fields, table = run_bench(capsys)
    assert fields["bench"] == "hetero"
    assert set(fields["peers"]) == {"torch DDP"}
    detail = fields["detail"]
    contestants = {"alone", "alone, in our processes", "torch DDP", "paceline", "paceline, equal shares"}
    assert set(detail["spread"]) == contestants
    assert detail["exact_weights_equal"] is True
    assert "one worker: equal" in table
    assert len(detail["exact_shares"]["2 workers, measured shares"]) == hetero.EXACT_STEPS
    assert all(sum(shares) == 8 for shares in detail["shares"])


@pytest.mark.slow
@needs_quota
def test_short_run_of_a_shift(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    periods = []

    @contextmanager
    def counted_quota() -> Iterator[CpuQuota]:
        with cpu_quota() as quota:
            yield quota
            periods.append(num_limited_periods(quota))

    monkeypatch.setattr(hetero_shift, "cpu_quota", counted_quota)
    fields, table = run_bench(capsys, "--shift", "--steps", "7", "--turns", "2", "--seconds", "0.2")
    assert fields["bench"] == "hetero --shift"
    detail = fields["detail"]
    assert [step["limit"] for step in detail["steps"]] == 7 * ["no limit"] + 7 * ["0.4 of a core"] + 7 * ["no limit"]
    assert [change["name"] for change in detail["changes"]] == ["cut", "restored"]
    assert fields["ratio"] == pytest.approx(min(change["median"] for change in detail["changes"]))
    assert {"cut,", "restored,"} <= {line.split()[0] for line in table.splitlines()}
    # How fast anybody was depends on what else the machine does; that the limit was in force does not.
    assert list(detail["alone_samples_per_s"]) == ["no limit", "0.4 of a core"]
    assert periods[0] > 0


@needs_quota
@pytest.mark.slow
def test_with_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    """Needs the `bench` extra: shows that the peers' interfaces are still as we call them."""
    fields, _ = run_bench(capsys, "--peers", *hetero.PEERS)
    assert fields["detail"]["skipped"] == {}
    assert set(fields["peers"]) == set(hetero.PEERS)
