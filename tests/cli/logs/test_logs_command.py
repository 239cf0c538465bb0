"""`paceline logs list` and `summary`, of runs that are live, have ended, or were killed."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from in_process import Ended, invoke
from made_runs import make_run, row

from paceline.cli.main import main
from paceline.observe.metrics import MetricsWriter
from paceline.observe.run_files import RunFiles, create_run_folder, running, write_json
from paceline.observe.summary import summarize


def logs_command(*arguments: object) -> Ended:
    return invoke("logs", *arguments)


def test_list_is_ordered_by_start(runs: Path) -> None:
    make_run(runs, "later", [row(5), {"step": 5, "eval": {"loss": 1.0}}], minutes=5, status={"state": "failed"})
    make_run(runs, "earlier")
    (runs / "notes").mkdir()
    (runs / "file.txt").touch()
    ended = logs_command("list")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "run                          state      step  loss  samples/s  trained",
        "earlier_2026-11-15_12-00-00  finished  20/20   0.4       80.0     10 s",
        "later_2026-11-15_12-05-00    failed     5/20   1.6       80.0    2.5 s",
    ]
    assert logs_command("list", runs.resolve()).out == ended.out


def test_summary_prints_state_losses_speed_and_worker_times(runs: Path) -> None:
    files = make_run(
        runs,
        rows=[row(step) for step in range(1, 20)] + [row(20, loss=0.5, eval={"loss": 1.5, "accuracy": 0.75})],
        status={"state": "stopped", "reason": "asked to stop", "num_starts": 2},
    )
    (files.checkpoints / "step-00000020").mkdir()
    (files.plots / "overview.png").touch()
    ended = logs_command("summary")
    assert (ended.code, ended.err) == (0, "")
    name = "2workers_2026-11-15_12-00-00"
    assert ended.out.splitlines() == [
        f"run            {name}",
        "state          stopped (asked to stop)",
        "started        2026-11-15 12:00:00, started 2 times",
        "steps          20 of 20 in 10 s",
        "loss           0.5, lowest 0.4211 at step 19",
        "eval/loss      1.5, lowest 1.5 at step 20",
        "eval/accuracy  0.75, lowest 0.75 at step 20, highest 0.75 at step 20",
        "throughput     80.0 samples/s, 4.00k tokens/s",
        "worker 0       75% of work, waiting 0%",
        "worker 1       25% of work, waiting 12%",
        f"checkpoints    1 in runs/{name}/checkpoints",
        f"plot           runs/{name}/plots/overview.png",
        f"metrics        runs/{name}/metrics.jsonl",
        f"output         runs/{name}/ranks",
        f"folder         runs/{name}",
    ]


def test_summary_uses_the_report(runs: Path) -> None:
    files = make_run(runs)
    worker = {
        "rank": 0,
        "share": 0.75,
        "samples_per_s": 60,
        "compute_s": 8,
        "waiting_s": 1,
        "sync_s": 0.5,
        "rest_s": 0.5,
    }
    write_json(files.report, {"steps": 20, "samples_per_s": 80.0, "efficiency": 0.9, "workers": [worker]})
    out = logs_command("summary").out
    assert "worker 0    75% of work, computing 80%, waiting 10%, exchange 5%, rest 5%\n" in out
    assert "throughput  80.0 samples/s, 4.00k tokens/s, 90% of the sum of the workers' speeds\n" in out


@pytest.mark.parametrize("report", ["", "{}", "[]", '{"workers": [{}], "efficiency": 1}', '{"workers": 3}', "null"])
def test_malformed_report_is_ignored(runs: Path, report: str) -> None:
    make_run(runs).report.write_text(report)
    assert "worker 1    25% of work, waiting 12%\n" in logs_command("summary").out


def test_json_is_complete_and_standard(runs: Path) -> None:
    files = make_run(runs, rows=[row(1, loss=math.nan), row(2, loss=math.nan)])
    found = json.loads(logs_command("summary", "--format", "json").out, parse_constant=pytest.fail)
    assert found["name"] == files.root.name
    assert found["train_loss"] == {
        "last": "NaN",
        "lowest": "NaN",
        "lowest_step": 2,
        "highest": "NaN",
        "highest_step": 2,
    }
    worker = found["workers"][1]
    assert (worker["rank"], worker["share"]) == (1, 0.25)
    assert worker["seconds"] == {"wait": 0.125 * worker["total_s"]}
    make_run(runs, minutes=1)
    assert len(json.loads(logs_command("summary", "--all", "--format", "json").out)) == 2


def test_extremes_ignore_non_finite_losses(runs: Path) -> None:
    losses = [math.nan, 3.0, -math.inf, 2.0, math.inf, 4.0, math.nan]
    make_run(runs, rows=[row(step, loss=loss) for step, loss in enumerate(losses, 1)])
    found = json.loads(logs_command("summary", "--format", "json").out)["train_loss"]
    assert found == {"last": "NaN", "lowest": 2.0, "lowest_step": 4, "highest": 4.0, "highest_step": 6}


def test_markdown_and_one_line(runs: Path) -> None:
    make_run(runs, "a|b", [row(4, eval={"loss": 1.5})])
    make_run(runs, "c", [], minutes=1, status={"state": "failed", "total_steps": None})
    assert logs_command("summary", "--all", "--format", "md").out.splitlines() == [
        "| run | state | steps | trained | loss | lowest | evaluation | samples/s |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
        "| a_b_2026-11-15_12-00-00 | finished | 4/20 | 2.0 s | 2 | 2 | eval/loss 1.5 | 80.0 |",
        "| c_2026-11-15_12-01-00 | failed | 0 | 0.0 s | - | - | - | - |",
    ]
    assert logs_command("summary", "--all", "--format", "one-line").out.splitlines() == [
        "a_b_2026-11-15_12-00-00: finished, step 4/20, loss 2, eval/loss 1.5, 80.0 samples/s, 2.0 s",
        "c_2026-11-15_12-01-00: failed, step 0, 0.0 s",
    ]


def test_list_of_an_empty_folder(runs: Path) -> None:
    assert logs_command("list", runs) == (0, "no runs in runs\n", "")


BROKEN = {
    "no_metrics": {"status.json": b"{}"},
    "empty_metrics": {"metrics.jsonl": b""},
    "only_a_piece": {"metrics.jsonl": b'{"step": 1, "lo'},
    "not_json": {"metrics.jsonl": b"\x00\xff\n\n[]\n", "status.json": b"\xff"},
    "strange_values": {
        "metrics.jsonl": b'{"step": 1, "loss": "x", "shares": 3, "waiting": {"a": 1}, "time": null, "epoch": []}\n'
        b'{"step": 2, "eval": 5, "shares": [1, "a"]}\n{"step": 3, "shares": [1, 2], "waiting": [0.5]}\n'
        b'{"step": 4, "shares": [], "eval": {"loss": null}, "samples_per_s": "NaN"}\n',
        "status.json": b'{"state": "finished", "started": "today"}',
    },
    "changed_workers": {"metrics.jsonl": b'{"step": 1, "shares": [1, 1, 1]}\n{"step": 2, "shares": [3, 1]}\n'},
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_run_folders_are_shown_as_far_as_possible(runs: Path, name: str) -> None:
    for file, content in BROKEN[name].items():
        path = runs / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert name in logs_command("list").out
    for form in ("text", "json", "md", "one-line"):
        ended = logs_command("summary", "--format", form)
        assert (ended.code, ended.err) == (0, "")
        assert name in ended.out
    ended = logs_command("plot")
    assert "Traceback" not in ended.err
    if name not in ("strange_values", "changed_workers"):
        assert ended == (1, "", f"paceline logs plot: {name} has no metrics yet: there is nothing to plot\n")


def test_summary_notes_missing_data(runs: Path) -> None:
    files = make_run(runs)
    files.metrics.unlink()
    assert "note     there is no metrics.jsonl\n" in logs_command("summary").out
    files.metrics.write_text("?\n")
    out = logs_command("summary").out
    assert "note     metrics.jsonl has no step\n" in out
    assert "note     skipped 1 unreadable lines of metrics.jsonl\n" in out
    os.utime(files.metrics, (0, 0))
    make_run(runs, minutes=1, status={"state": "running"})
    assert "state       live\n" in logs_command("summary").out


def train_for_ever(files: RunFiles, up: Event) -> None:
    with running(files, total_steps=10**6):
        writer = MetricsWriter(files.metrics)
        for step in count(1):
            writer.log(step, {"loss": 1.0 / step, "epoch": 0, "shares": [6, 2]})
            if step == 30:
                up.set()
            if step > 30:
                signal.sigtimedwait([], 0.001)


def test_commands_on_a_live_run_and_after_a_kill(runs: Path) -> None:
    files = create_run_folder(runs, "live")
    context = get_context("fork")  # a fresh interpreter would import torch first
    up = context.Event()
    process = context.Process(target=train_for_ever, args=(files, up))
    process.start()
    try:
        assert up.wait(60)
        assert " live " in logs_command("list").out
        found = json.loads(logs_command("summary", "--format", "json").out)
        assert (found["state"], found["total_steps"]) == ("live", 10**6)
        assert found["step"] >= 30
        assert logs_command("plot").out.startswith(files.root.name)
    finally:
        process.kill()
        process.join()
    with files.metrics.open("ab") as file:
        file.write(b'{"step": 99999999, "loss"')
    for command in ("list", "summary"):
        assert "crashed" in logs_command(command).out
    after = summarize(files)
    assert found["step"] <= after.step < 99999999
    assert after.num_unreadable_lines == 0
    assert logs_command("plot", "-o", "picture.svg") == (0, "picture.svg\n", "")


def test_a_plot_as_a_page_is_the_export_of_watch(runs: Path) -> None:
    make_run(runs)
    assert logs_command("plot", "-o", "run.html") == (0, "run.html\n", "")
    page = Path("run.html").read_text()
    assert "paceline-data" in page
    assert "<script src" not in page


@pytest.mark.parametrize("option", ["--loss-curves", "--log-scale", "--smooth=5", "--x-axis=time", "--metrics=lr"])
def test_options_of_images_are_errors_for_a_page(runs: Path, option: str) -> None:
    make_run(runs)
    ended = logs_command("plot", option, "-o", "run.html")
    name = option.partition("=")[0]
    assert ended.code == 2
    assert ended.err.startswith(f"paceline logs plot: {name} would be ignored in a page, which has all metrics")
    assert not Path("run.html").exists()


def test_a_page_does_not_lose_a_run_with_the_name_of_another(runs: Path) -> None:
    first = make_run(runs)
    second = make_run(runs.parent / "more")
    ended = logs_command("plot", first.root, second.root, "-o", "run.html")
    assert ended.code == 2
    assert f"two of the runs are named {first.root.name}: rename a folder" in ended.err


def test_closed_output_pipe_is_not_an_error(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(runs)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert main(["logs", "list", str(runs)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "--smooth", "0"], "argument --smooth: '0': choose an integer >= 1"),
        (["plot", "--metrics", "lr", "--loss-curves"], "not allowed with argument --metrics"),
        (["plot", "--x-axis", "days"], "invalid choice: 'days'"),
        (["summary", "--format", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_invalid_options_are_usage_errors(arguments: list[str], message: str) -> None:
    ended = logs_command(*arguments)
    assert ended.code == 2
    assert message in ended.err
