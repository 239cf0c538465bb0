"""Reports and events: where the workers' time went, and what changed on the way."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl
from paceline.core.timing import Timing
from paceline.observe.timeline.recorder import NoTimeline
from paceline.run.step import stopwatch
from paceline.run.step.stopwatch import TimeTotals

X, Y = vectors(320)


def train(slowness: tuple[float, ...], **settings: Any) -> tuple[pl.reports.Report, list[pl.reports.Event]]:
    rank = int(os.environ.get("RANK", 0))
    events: list[pl.reports.Event] = []
    settings = {"global_batch": 16, "micro_batch": 2, **settings}
    with pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.05), data=(X, Y), **grouped(**settings)) as trainer:
        trainer.listen(events.append)
        for epoch in trainer.epochs(1):
            for batch in epoch:
                time.sleep(0.004 * slowness[rank])
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        return trainer.report(), events


class FakeNumbers:
    """A step's numbers after the exchange."""

    has_arrived = True

    def __init__(self, *timings: Timing) -> None:
        self.timings = timings


def test_literal_times() -> None:
    account = TimeTotals(2)
    for _ in range(10):
        # 3 x 0.1 s and 0.02 s of waiting; 1 x 0.3 s; 0.05 s of exchange; 0.05 s and 0.07 s of optimizer.
        numbers = FakeNumbers(Timing(0.1, 0.07, 0.05), Timing(0.3, 0.05, 0.07))
        account.add(((range(3), range(3, 4)), 8, numbers))  # type: ignore[arg-type]
    report = account.report()
    first, second = report.workers
    assert report.steps == 10
    assert (first.share, second.share) == (0.75, 0.25)
    assert first.samples_per_s == pytest.approx(20)
    assert second.samples_per_s == pytest.approx(2 / 0.3)
    assert [first.compute_s, first.waiting_s, first.sync_s, first.rest_s] == pytest.approx([3, 0.2, 0.5, 0.5])
    assert [second.compute_s, second.waiting_s, second.sync_s, second.rest_s] == pytest.approx([3, 0, 0.5, 0.7])
    assert report.samples_per_s == pytest.approx(80 / 4.2)
    assert report.efficiency == pytest.approx(80 / 4.2 / (20 + 2 / 0.3))
    assert "75.0%" in str(report)
    assert f"{80 / 4.2:.1f} samples/s, 71.4% of the sum of the workers' speeds" in str(report)


def test_steps_without_a_measurement_count_with_the_next() -> None:
    account = TimeTotals(1)
    for timing in [Timing(0.1), Timing(), Timing(0.1, 0.02, 0.01)]:
        account.add(((range(2),), 4, FakeNumbers(timing)))  # type: ignore[arg-type]
    (worker,) = account.report().workers
    assert [worker.compute_s, worker.sync_s, worker.rest_s] == pytest.approx([0.6, 0.02, 0.03])


def test_the_wait_for_data_is_a_part_of_the_time_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Begin, plan; two passes: begin, data, backward; then the exchange begins.
    moments = iter([0.0, 1.0, 1.0, 3.0, 7.0, 7.0, 8.0, 9.0, 9.0])
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(moments))
    watch = stopwatch.HostStopwatch(NoTimeline())
    watch.begin_step()
    for _ in range(7):
        watch.mark()
    assert watch.send(4) == Timing(micro_batch=2.0, data=0.75)


def test_nothing_done_is_reported_as_nothing() -> None:
    report = TimeTotals(2).report()
    assert report.samples_per_s == report.efficiency == 0.0
    assert str(report)


def test_one_worker() -> None:
    report, _ = train((1.0,))
    (worker,) = report.workers
    assert report.steps == 20
    assert worker.share == 1.0
    assert worker.waiting_s == 0.0
    assert 0 < worker.samples_per_s < 2 / 0.004
    assert 0 < report.efficiency <= 1.0


@pytest.mark.parametrize("strategy", ["gradients", pl.Averaging(every=4)])
def test_who_waits_is_said(strategy: Any, pool: WorkerPool) -> None:
    reports = [outcome[0] for outcome in pool.run(lambda: train((1, 4), shares="equal", strategy=strategy), 2)]
    assert reports[0] == reports[1]  # everybody has the same report
    fast, slow = reports[0].workers
    assert fast.share == slow.share == 0.5
    assert fast.samples_per_s > slow.samples_per_s
    assert fast.waiting_s > slow.waiting_s


def test_balance_raises_the_efficiency(pool: WorkerPool) -> None:
    equal = pool.run(lambda: train((1, 5), shares="equal"), 2)[0][0]
    balanced = pool.run(lambda: train((1, 5)), 2)[0][0]
    assert balanced.workers[0].share > 0.6
    assert balanced.efficiency > equal.efficiency


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_change_of_plan_is_an_event_on_every_worker(size: int, pool: WorkerPool) -> None:
    outcomes = pool.run(lambda: train((1, 6, 6, 6)[:size]), size)
    for _, events in outcomes:
        assert events == outcomes[0][1]
    first, second, *_ = outcomes[0][1]
    assert (first.name, first.step, first.details["before"]) == ("plan", 0, ())
    assert second.name == "plan"
    assert second.step >= 1
    assert second.details["before"] == first.details["shares"]
    assert second.details["shares"][0] > first.details["shares"][0]


def test_the_end_of_an_epoch_is_no_event() -> None:
    _, events = train((0.0,), global_batch=24)  # 320 = 13 * 24 + 8
    assert [event.details["shares"] for event in events] == [(12,)]
