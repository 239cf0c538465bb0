"""Summaries of runs whose files hold unusual numbers, or were written by other versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.run_files import RunFiles, write_json
from paceline.observe.summary import summarize, text


@pytest.mark.parametrize("loss", [1e308, -1e308, 1.7e308, 5e-324])
def test_a_summary_of_numbers_at_the_end_of_their_range(loss: float, tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 101):
            values = {"step": step, "loss": loss if step % 2 else -loss, "samples_per_s": 1e308, "time": 1e308}
            print(json.dumps(values), file=file)
    (tmp_path / "status.json").write_text(
        '{"state": "finished", "pid": 1, "process_started": null, "host": "h", "started": 1e300, "num_starts": 1,'
        ' "total_steps": 3, "ended": 1e300, "reason": null}'
    )
    summary = summarize(RunFiles(tmp_path))
    assert summary.samples_per_s == pytest.approx(1e308)
    assert summary.train_loss is not None
    assert summary.train_loss.highest == abs(loss)
    assert max(map(len, text(summary).splitlines())) < 200


def test_workers_of_a_live_run_are_those_of_the_newest_world(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"time":1,"shares":[1,1,1],"waiting":[0.5,0.5,0.5]}\n'
        '{"step":2,"time":2,"shares":[3,1],"waiting":[0.0,0.5]}\n'
        '{"step":3,"time":4,"shares":[3,1]}\n'
    )
    workers = summarize(RunFiles(tmp_path)).workers
    assert [(worker.rank, worker.share, worker.part("wait")) for worker in workers] == [(0, 0.75, 0.0), (1, 0.25, 0.5)]
    assert "worker 1  25% of work, waiting 50%" in text(summarize(RunFiles(tmp_path)))
    assert summarize(RunFiles(tmp_path), tail=True).training_s == 4


def test_tokens_per_second_are_those_of_the_whole_run_as_samples_are(tmp_path: Path) -> None:
    """Ten steps in a second, then ten in nine: 20 samples per second, not the mean of 100 and 11."""
    lines = [{"step": 1, "time": 0.0, "samples": 10, "samples_per_s": 100.0, "tokens_per_s": 5000.0}]
    lines += [{"step": 11, "time": 1.0, "samples": 110, "samples_per_s": 100.0, "tokens_per_s": 5000.0}]
    lines += [{"step": 21, "time": 10.0, "samples": 210, "samples_per_s": 100 / 9, "tokens_per_s": 5000 / 9}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for tail in (False, True):
        summary = summarize(RunFiles(tmp_path), tail=tail)
        assert (summary.samples_per_s, summary.tokens_per_s) == (pytest.approx(20.0), pytest.approx(1000.0))


def test_the_step_is_the_last_that_was_trained_though_it_was_not_logged(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.metrics.write_text('{"step":720,"time":1}\n')
    files.ranks.mkdir()
    write_json(files.worker(0), {"rank": 0, "step": 729})
    assert summarize(files).step == 729
