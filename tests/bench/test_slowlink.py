"""The benchmark of a slow link: its arithmetic, its hosts, and a short run of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded_python import PreloadedPython

from bench import far_apart, namespaces, slowlink, slowlink_speed
from bench import far_apart_ways as ways
from bench.__main__ import NOT_HERE, main
from bench.far_apart import Task
from bench.namespaces import FOLDER, INTERFACE, NUM_HOSTS, Link, missing_slow_link, slow_link
from bench.slowlink_speed import CadenceStep
from bench.slowlink_table import Loss, Scenario, Speed, scenarios_of
from bench.workers import gloo_group, run_workers

MISSING = missing_slow_link()
needs_link = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def task_of(**changes: Any) -> Task:
    values = {"source": "markov", "width": 8, "num_layers": 1, "micro_batch": 2, "every": 4, "num_samples": 16}
    return Task(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 18}, "samples=18 are no whole steps of 4: choose a multiple of 4"),
        ({"num_samples": 0}, "samples=0 are no whole steps of 4"),
        ({"num_hosts": 1}, "hosts=1 have no link: choose hosts >= 2"),
        ({"source": "noise"}, "source='noise' is unknown: choose one of markov, text"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--turns", "1"], "turns=1 .* choose turns >= 2"),
        (["--mbit", "0"], "mbit=0.0 lets nothing pass: choose mbit > 0"),
        (["--samples", "1", "2", "--width", "8", "8", "8"], "for 3 widths: give one number, or one for each"),
        (["--samples", "64", "--turns", "50"], "samples=64 are too few for turns=50 of 32 steps: choose at least"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(["slowlink", *options])


def test_training_and_held_out_samples_come_from_one_source_that_can_be_learnt() -> None:
    followers: dict[int, set[int]] = {}
    task = task_of(num_samples=512)
    for tokens in (task.training_tokens(), task.held_out_tokens()):
        for before, after in zip(tokens[:, :-1].flatten().tolist(), tokens[:, 1:].flatten().tolist(), strict=True):
            followers.setdefault(before, set()).add(after)
    assert len(followers) > far_apart.VOCABULARY / 2
    assert max(map(len, followers.values())) == len(far_apart.SUCCESSOR_ODDS)


@pytest.mark.parametrize("source", far_apart.SOURCES)
def test_held_out_samples_are_others_than_those_trained_on(source: str) -> None:
    task = task_of(source=source, num_samples=512)
    trained = {tuple(row) for row in task.training_tokens().tolist()}
    assert trained.isdisjoint(map(tuple, task.held_out_tokens().tolist()))


def test_a_byte_is_predicted_from_those_before_it() -> None:
    model = task_of(source="text", num_layers=3).make_model().eval()
    tokens = task_of(source="text").held_out_tokens()[:1]
    changed = tokens.clone()
    changed[0, 40] += 1
    outputs: list[torch.Tensor] = []
    model.get_submodule("head").register_forward_hook(lambda _, __, output: outputs.append(output))
    for each in (tokens, changed):
        model(each)
    differs = (outputs[0] != outputs[1]).any(dim=-1).flatten()
    assert differs[40]
    assert not differs[:40].any()


@pytest.mark.parametrize("source", far_apart.SOURCES)
def test_every_model_starts_with_the_same_weights_whatever_was_drawn_before(source: str) -> None:
    first = task_of(source=source).make_model().state_dict()
    torch.rand(3)
    second = task_of(source=source).make_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_who_never_talks_adds_up_and_who_counts_all_samples_is_one_of_several_clocks() -> None:
    assert slowlink.samples_per_s(ways.NO_TALK, (30.0, 12.0)) == 42.0
    assert slowlink.samples_per_s(ways.NO_TALK_OURS, (60.0, 24.0)) == 42.0
    assert slowlink.samples_per_s(ways.AVERAGING, (30.0, 12.0)) == 21.0


@pytest.mark.parametrize(
    ("name", "untimed", "timed"),
    [
        (ways.NO_TALK, 1, 24),
        (ways.DDP, 1, 4),
        (ways.CADENCE, 1, 4),
        (ways.AVERAGING, 32, 32),
        (ways.DILOCO, 16, 32),
        (ways.INT8, 4, 24),
        (ways.SLOW_LINK, 4, 24),
    ],
)
def test_a_turn_is_an_exchange_and_then_whole_intervals(name: str, untimed: int, timed: int) -> None:
    assert slowlink_speed.turn_of(task_of(every=32, num_samples=1024), name, 24) == (untimed, timed)


def test_ways_that_would_wait_long_for_the_link_are_not_run() -> None:
    task = task_of()
    exchange_s = 32 * task.num_parameters / 1e6  # at 1 Mbit/s
    at_limit = 5 * exchange_s / slowlink_speed.MAX_LINK_S
    assert slowlink_speed.is_timed(task, ways.DDP, 1.01 * at_limit, 4)
    assert not slowlink_speed.is_timed(task, ways.DDP, 0.99 * at_limit, 4)
    assert slowlink_speed.is_timed(task, ways.FP16, 0.51 * at_limit, 4)
    assert not slowlink_speed.is_timed(task_of(num_hosts=3, num_samples=24), ways.DDP, 1.01 * at_limit, 4)
    assert slowlink_speed.is_timed(task, ways.INT8, 1e-6, 4)
    assert slowlink_speed.is_timed(task, ways.NO_TALK, None, 4)


def scenario_of(speeds: list[Speed], losses: dict[str, list[float]]) -> Scenario:
    task = task_of()
    [scenario] = scenarios_of(
        [task],
        [8.0],
        speeds,
        [
            Loss(replace(task, seed=seed), way, value)
            for way, values in losses.items()
            for seed, value in enumerate(values)
        ],
    )
    return scenario


def test_a_table_compares_turn_by_turn_and_seed_by_seed() -> None:
    task = task_of()
    ddp = 4 * task.num_parameters / task.global_batch  # bytes per sample, of a ring of two
    scenario = scenario_of(
        [
            Speed(task, ways.NO_TALK, None, "a", (100.0, 49.0, 80.0)),
            Speed(task, ways.NO_TALK_OURS, None, "a", (90.0, 50.0, 70.0)),
            Speed(task, ways.INT8, 8.0, "a", (98.0, 47.0, 60.0), bytes_per_sample=ddp / 200),
            Speed(task, ways.INT8, 100.0, "a", (1.0, 1.0, 1.0)),
        ],
        {
            ways.NO_TALK: [2.2, 2.4],
            ways.GRADIENTS: [2.0, 4.0],
            ways.INT8: [2.02, 3.96],
            ways.DDP: [2.0, 4.0],
            ways.POST_LOCAL: [2.0, 4.0],
        },
    )
    rows = {row.name: row for row in scenario.rows()}
    ours = rows[ways.INT8]
    assert (ours.speed, ours.slowest_turn, ours.fastest_turn) == (47 / 49, 0.75, 0.98)
    assert (ours.fewer_bytes, ours.is_computed, ours.num_seeds) == (pytest.approx(200.0), False, 2)
    assert (ours.loss, ours.least_loss, ours.largest_loss) == pytest.approx((1.0, 0.99, 1.01))
    # 1e6 bytes/s, and a step in which nothing overlaps takes as long as both.
    assert rows[ways.DDP].is_computed
    assert rows[ways.DDP].speed == pytest.approx(1 / (ddp / 1e6 + 1 / 80) / 80)
    assert rows[ways.POST_LOCAL].fewer_bytes == task.every
    assert rows[ways.POST_LOCAL].speed == min(1.0, 1e6 / (ddp / task.every) / 80)
    assert rows[ways.NO_TALK].fewer_bytes is None
    assert "computed" in "".join(scenario.table())


def test_what_a_slow_link_says_is_in_the_table() -> None:
    task = task_of()
    scenario = scenario_of(
        [
            Speed(task, ways.NO_TALK, None, "a", (100.0,)),
            Speed(task, ways.SLOW_LINK, 8.0, "a", (98.0,), (7.9, 7.8), {"reason": "because"}),
        ],
        {},
    )
    assert {"slow link: because", "the link carried 7.9 7.8 Mbit/s, by rank"} <= set(scenario.table())


def test_the_newest_measurement_counts_with_the_workers_of_its_session() -> None:
    task = task_of()
    scenario = scenario_of(
        [
            Speed(task, ways.NO_TALK, None, "old", (100.0,)),
            Speed(task, ways.INT8, 8.0, "old", (50.0,)),
            Speed(task, ways.SPARSE, 8.0, "old", (60.0,)),
            Speed(task, ways.NO_TALK, None, "new", (10.0,)),
            Speed(task, ways.INT8, 8.0, "new", (9.0,)),
        ],
        {},
    )
    assert {row.name: row.speed for row in scenario.rows()} == {ways.NO_TALK: 1.0, ways.INT8: 0.9, ways.SPARSE: 0.6}


def test_results_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "results.jsonl"
    task = task_of()
    measured = [
        Loss(task, ways.INT8, 2.0),
        Speed(task, ways.SLOW_LINK, 8.0, "a", (98.0,), (7.9, 7.8), {"every": 16}),
    ]
    results = slowlink.Results(path)
    for each in measured:
        results.add(each)
    again = slowlink.Results(path)
    assert [*again.losses, *again.speeds] == measured


def test_a_cadence_is_charged_with_the_exchange_that_its_next_step_tells_of() -> None:
    steps = [
        CadenceStep((10, 20), (0.1, 0.05), (9.0, 9.0)),
        CadenceStep((30, 10), (0.1, 0.05), (0.2, 0.1)),
        CadenceStep((5, 5), (7.0, 7.0), (0.3, 0.5)),
    ]
    assert slowlink_speed.overhead_of(steps) == pytest.approx((0.1 + 0.3) / (1.0 + 3.0))


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
        limited = slowlink_speed.link_mbit_per_s()
        slowlink_speed.set_limit(link, None)
        return interfaces, limited, slowlink_speed.link_mbit_per_s()


@needs_link
def test_hosts_have_nothing_but_their_link_which_is_as_slow_as_asked_until_the_limit_is_lifted() -> None:
    with slow_link(50) as link:
        by_rank = run_workers(probe, NUM_HOSTS, link)
    for interfaces, limited, lifted in by_rank:
        assert {"lo", INTERFACE} <= interfaces
        assert "eth0" not in interfaces
        assert limited < 75 < lifted  # a burst may pass, and a busy machine is slow without a limit too


@needs_link
def test_three_hosts_have_a_link_each_to_a_switch() -> None:
    with slow_link(50, 3) as link:
        by_rank = run_workers(probe, 3, link)
        assert len(hosts_of(os.getpid())) == 4
    assert hosts_of(os.getpid()) == []
    assert all(limited < 75 < lifted for _, limited, lifted in by_rank)  # three workers on a busy machine are slow


@needs_link
def test_no_host_is_left_when_the_benchmark_is_terminated() -> None:
    process = PreloadedPython(
        [sys.executable, "-m", "bench", "slowlink", "--parts", "speed"], cwd=Path(__file__).parents[2]
    )
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
        assert set(rows) == {*ways.WAYS} - set(fields["detail"]["skipped"])
        assert all(row["speed"] > 0 for row in rows.values())
        # Both exchange the same mean gradients.
        assert rows["torch DDP"]["loss"] == pytest.approx(1, abs=1e-3)
        assert rows["averaging, sparse"]["fewer_bytes"] > rows["averaging, int8"]["fewer_bytes"] > 10
        assert scenario["choice"]["compress"] == "int4"
    assert "loss / synchronous" in table
