"""The benchmark of a slow link: its arithmetic, its hosts, and a short run of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded_python import PreloadedPython

from bench import far_apart, namespaces, slowlink
from bench.__main__ import NOT_HERE, main
from bench.far_apart import Task
from bench.namespaces import FOLDER, INTERFACE, NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.slowlink import CadenceStep
from bench.workers import gloo_group, run_workers

MISSING = missing_slow_link()
needs_link = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def task_of(**changes: Any) -> Task:
    values = {"mbit": 100.0, "width": 8, "num_layers": 1, "micro_batch": 2, "every": 4, "num_samples": 16}
    return Task(**{**values, "num_turns": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 18}, "samples=18 are no whole steps of 4: choose a multiple of 4"),
        ({"num_samples": 0}, "samples=0 are no whole steps of 4"),
        ({"num_turns": 1}, "turns=1 .* choose turns >= 2"),
        ({"num_turns": 15}, "samples=16 are too few for turns=15 of 4 steps: choose at least 17, or fewer turns"),
        ({"num_hosts": 1}, "hosts=1 have no link: choose hosts >= 2"),
        ({"mbit": 0.0}, "mbit=0.0 lets nothing pass: choose mbit > 0"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


def test_training_and_held_out_samples_come_from_one_source_that_can_be_learnt() -> None:
    followers: dict[int, set[int]] = {}
    for tokens in (far_apart.training_tokens(task_of(num_samples=512)), far_apart.held_out_tokens()):
        for before, after in zip(tokens[:, :-1].flatten().tolist(), tokens[:, 1:].flatten().tolist(), strict=True):
            followers.setdefault(before, set()).add(after)
    assert len(followers) > far_apart.VOCABULARY / 2
    assert max(map(len, followers.values())) == len(far_apart.SUCCESSOR_ODDS)
    assert far_apart.least_loss() == pytest.approx(1.2130, abs=1e-4)


def test_held_out_samples_are_others_than_those_trained_on() -> None:
    trained = {tuple(row) for row in far_apart.training_tokens(task_of(num_samples=512)).tolist()}
    assert trained.isdisjoint(map(tuple, far_apart.held_out_tokens().tolist()))


def test_every_model_starts_with_the_same_weights_whatever_was_drawn_before() -> None:
    first = task_of().make_model().state_dict()
    torch.rand(3)
    second = task_of().make_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_who_never_talks_adds_up_and_a_common_turn_takes_as_long_as_its_slowest_worker() -> None:
    assert slowlink.samples_per_s(far_apart.NO_TALK, (30.0, 12.0)) == 42.0
    assert slowlink.samples_per_s(far_apart.NO_TALK_OURS, (60.0, 24.0)) == 42.0
    assert slowlink.samples_per_s(far_apart.AVERAGING, (30.0, 12.0)) == 12.0


@pytest.mark.parametrize(
    ("name", "untimed", "timed"),
    [(far_apart.DDP, 3, 2), (far_apart.CADENCE, 3, 1), (far_apart.AVERAGING, 48, 32), (far_apart.NO_TALK, 48, 32)],
)
def test_rounds_of_averaging_are_timed_whole_from_the_middle_of_one_to_the_middle_of_the_next(
    name: str, untimed: int, timed: int
) -> None:
    assert slowlink.turns_of(task_of(every=32, num_samples=1024), name) == (untimed, timed)


def test_ways_that_would_wait_minutes_for_the_link_are_not_run() -> None:
    task = task_of(mbit=1.0, num_hosts=2)
    assert slowlink.step_s_of_link(task, far_apart.DDP) == pytest.approx(32 * task.num_parameters / 1e6)
    assert slowlink.step_s_of_link(task, far_apart.FP16) == pytest.approx(16 * task.num_parameters / 1e6)
    assert slowlink.step_s_of_link(task_of(mbit=1.0, num_hosts=3, num_samples=24), far_apart.DDP) == pytest.approx(
        32 * 4 / 3 * task.num_parameters / 1e6
    )
    assert slowlink.step_s_of_link(task, far_apart.INT4) == slowlink.step_s_of_link(task, far_apart.POWER_SGD) == 0


def test_a_table_compares_turn_by_turn_and_seed_by_seed() -> None:
    scenario = {
        "settings": {"mbit": 8.0, "num_hosts": 2, "parameters": 1e6},
        "link_mbit_per_s": [7.9, 7.8],
        "turns": {
            far_apart.NO_TALK: [100.0, 49.0, 80.0],
            far_apart.NO_TALK_OURS: [90.0, 50.0, 70.0],
            far_apart.INT4: [98.0, 47.0, 60.0],
        },
        "losses": {
            far_apart.NO_TALK: [2.2, 2.4],
            far_apart.GRADIENTS: [2.0, 4.0],
            far_apart.INT4: [2.02, 3.96],
            far_apart.DDP: [2.0, 4.0],
        },
        "bytes_per_sample": {far_apart.DDP: [50_000.0], far_apart.INT4: [250.0], far_apart.NO_TALK: [1.0]},
        "choice": {},
        "cadence_overhead": None,
    }
    rows = {row.name: row for row in slowlink.rows_of(scenario)}
    ours = rows[far_apart.INT4]
    assert (ours.speed, ours.fewer_bytes, ours.is_computed) == (0.94, 200.0, False)
    assert (ours.loss, ours.least_loss, ours.largest_loss) == pytest.approx((1.0, 0.99, 1.01))
    # 1e6 bytes/s are 20 samples/s.
    assert rows[far_apart.DDP].is_computed
    assert rows[far_apart.DDP].speed == pytest.approx(20 / 80)
    assert rows[far_apart.NO_TALK].fewer_bytes is None
    assert "computed" in "".join(slowlink.table_of(scenario))


def test_a_cadence_is_charged_with_the_exchange_that_its_next_step_tells_of() -> None:
    steps = [
        CadenceStep((10, 20), (0.1, 0.05), (9.0, 9.0)),
        CadenceStep((30, 10), (0.1, 0.05), (0.2, 0.1)),
        CadenceStep((5, 5), (7.0, 7.0), (0.3, 0.5)),
    ]
    assert slowlink.overhead_of(steps) == pytest.approx((0.1 + 0.3) / (1.0 + 3.0))


@pytest.mark.parametrize("command", ["ip", "tc"])
def test_where_a_command_is_missing_the_reason_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == command else f"/sbin/{name}")
    with pytest.raises(SystemExit, match=str(NOT_HERE)):
        main(["slowlink"])
    assert re.search(f"the command `{command}` is missing: install iproute2", capsys.readouterr().err)


def test_where_namespaces_cannot_be_made_the_reason_names_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*command: str) -> None:
        raise OSError(f"`{' '.join(command)}`: Operation not permitted")

    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces, "_run", refuse)
    with pytest.raises(SystemExit, match=str(NOT_HERE)):
        main(["slowlink"])
    assert re.search(r".* they take root .*`ip netns add .*not permitted", capsys.readouterr().err)


def hosts_of(pid: int) -> list[Path]:
    """The hosts that a process has made."""
    return list(FOLDER.glob(f"paceline-bench-{pid}-*"))


def inhabitants(host: Path) -> str:
    """None too where the host is gone by now: the benchmark first makes hosts only to see whether it can."""
    return subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout


def are_inhabited(hosts: list[Path]) -> bool:
    return bool(hosts) and all(inhabitants(host) for host in hosts)


@needs_link
def test_hosts_are_gone_after_an_error() -> None:
    with pytest.raises(KeyError), slow_link(100):
        assert len(hosts_of(os.getpid())) == NUM_HOSTS
        raise KeyError("in the middle")
    assert hosts_of(os.getpid()) == []


@needs_link
def test_no_host_is_left_when_the_link_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "INTERFACE", "a name too long for an interface")
    with pytest.raises(OSError, match="ip link add"), slow_link(100):
        pass
    assert hosts_of(os.getpid()) == []


def probe(link: Link) -> tuple[set[str], float, float]:
    """What this host is connected with, and Mbit/s with the limit and without."""
    rank = int(os.environ["RANK"])
    link.join(rank)
    interfaces = {name for _, name in socket.if_nameindex()}
    with gloo_group():
        limited = slowlink.link_mbit_per_s()
        slowlink.lift_limit(link)
        return interfaces, limited, slowlink.link_mbit_per_s()


@needs_link
def test_hosts_have_nothing_but_their_link_which_is_as_slow_as_asked_until_the_limit_is_lifted() -> None:
    with slow_link(200) as link:
        by_rank = run_workers(probe, NUM_HOSTS, link)
    for interfaces, limited, lifted in by_rank:
        assert {"lo", INTERFACE} <= interfaces
        assert "eth0" not in interfaces
        assert limited < 220 < lifted  # a burst may pass


@needs_link
def test_three_hosts_have_a_link_each_to_a_switch() -> None:
    with slow_link(200, 3) as link:
        by_rank = run_workers(probe, 3, link)
        assert len(hosts_of(os.getpid())) == 4
    assert hosts_of(os.getpid()) == []
    assert all(limited < 220 < lifted for _, limited, lifted in by_rank)


@needs_link
def test_no_host_is_left_when_the_benchmark_is_terminated() -> None:
    process = PreloadedPython([sys.executable, "-m", "bench", "slowlink"], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        while not are_inhabited(hosts_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait(60)
    assert hosts_of(process.pid) == []


@pytest.mark.slow
@needs_link
def test_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["slowlink", "--quick", "--json"])
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    fields = json.loads(line)
    assert fields["bench"] == "slowlink"
    assert {"torch DDP", "DDP, PowerSGD", "torch post-local SGD"} <= set(fields["peers"])
    two, three = fields["detail"]["scenarios"]
    assert (two["settings"]["num_hosts"], three["settings"]["num_hosts"]) == (2, 3)
    for scenario in (two, three):
        rows = {row["name"]: row for row in scenario["rows"]}
        assert set(rows) == {*far_apart.WAYS} - set(fields["detail"]["skipped"])
        assert all(row["speed"] > 0 for row in rows.values())
        assert all(0 < speed < 100 for speed in scenario["link_mbit_per_s"])
        # Both exchange the same mean gradients; only the order of their samples differs.
        assert rows["torch DDP"]["loss"] == pytest.approx(1, abs=0.02)
        assert rows["averaging, int4"]["fewer_bytes"] > rows["averaging, int8"]["fewer_bytes"] > 10
        assert scenario["choice"]["compress"] == "int8"
    assert "loss / synchronous" in table
