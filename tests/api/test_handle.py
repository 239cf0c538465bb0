"""The handle of a run in the background: metrics as they come, its end, its errors, and that nothing is left of it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import preloaded_python
import pytest
import torch
from models import digest, mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(48)
STEPS_PER_EPOCH = 3
FOREVER = 10**9
PATIENCE_S = 60.0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def built(train_fn: Any = loss_of, epochs: int = 3) -> pl.compat.flodl.Builder:
    builder = pl.Trainer.builder(mlp, sgd, train_fn).dataset((X, Y)).batch_size(16).num_epochs(epochs)
    return builder.settings(micro_batch=16)


def at(call: int, do: Callable[[], object]) -> Callable[[Any, Any], torch.Tensor]:
    """A train_fn that does something in its call of this number, from 1."""
    calls = [0]

    def train_fn(model: Any, batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == call:
            do()
        return loss_of(model, batch)

    return train_fn


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("paceline")] == []


def test_metrics_come_while_the_run_goes_on() -> None:
    may_go_on = threading.Event()
    handle = built(at(STEPS_PER_EPOCH + 1, may_go_on.wait)).run()
    first = handle.next_metrics(PATIENCE_S)
    assert first is not None
    assert first.epoch == 0
    assert handle.is_running
    assert handle.poll_metrics() == []
    with pytest.raises(TimeoutError, match=r"no epoch has ended within timeout=0.01 s"):
        handle.next_metrics(0.01)
    with pytest.raises(TimeoutError, match=r"the run continues after timeout=0.01 s"):
        handle.join(timeout=0.01)
    may_go_on.set()
    state = handle.join(PATIENCE_S)
    assert state.position.epoch == 3
    assert not handle.is_running
    assert [m.epoch for m in handle.poll_metrics()] == [1, 2]
    assert handle.next_metrics() is None
    assert handle.next_metrics() is None, "and whoever asks again is told again"
    assert handle.poll_metrics() == []
    assert handle.join() is state


def test_a_handle_says_what_it_runs_on() -> None:
    with built().run() as handle:
        assert handle.world_size == 1
        assert handle.devices == (torch.device("cpu"),)


def test_stop_ends_the_run_after_a_step_and_join_returns_what_was_reached() -> None:
    reached = threading.Event()
    handle = built(at(5, reached.set), FOREVER).run()
    assert reached.wait(PATIENCE_S)
    handle.stop()
    position = handle.join(PATIENCE_S).position
    metrics = list(handle)
    assert position.step >= 5
    assert len(metrics) == position.epoch == position.step // STEPS_PER_EPOCH


def test_dropping_the_last_reference_stops_the_run() -> None:
    reached = threading.Event()
    handle = built(at(2, reached.set), FOREVER).run()
    assert reached.wait(PATIENCE_S)
    del handle
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "paceline-background"]


def test_leaving_a_with_block_stops_the_run() -> None:
    with built(epochs=FOREVER).run() as handle:
        assert handle.next_metrics(PATIENCE_S) is not None
    assert not handle.is_running
    assert handle.join().position.step >= STEPS_PER_EPOCH


def fail() -> None:
    raise ZeroDivisionError("in train_fn")


def test_an_error_is_raised_as_it_is_by_join_iteration_and_a_with_block() -> None:
    handle = built(at(STEPS_PER_EPOCH + 2, fail)).run()
    seen = []
    with pytest.raises(ZeroDivisionError, match="in train_fn"):
        for metrics in handle:
            seen.append(metrics.epoch)
    assert seen == [0]
    with pytest.raises(ZeroDivisionError):
        handle.join()
    with pytest.raises(ZeroDivisionError), built(at(1, fail)).run() as handle:
        assert handle.next_metrics(PATIENCE_S) is None
    with pytest.raises(KeyError, match="mine"), built(at(1, fail)).run():
        raise KeyError("mine")


def test_an_error_that_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    handle = built(at(1, fail)).run()
    assert handle.next_metrics(PATIENCE_S) is None
    with caplog.at_level(logging.ERROR, "paceline"):
        del handle
        gc.collect()
    assert "its result was not requested" in caplog.text
    assert "ZeroDivisionError: in train_fn" in caplog.text


@pytest.mark.parametrize("wait", [pl.compat.flodl.Handle.join, pl.compat.flodl.Handle.next_metrics, list])
def test_ctrl_c_in_a_wait_stops_the_run(wait: Callable[[pl.compat.flodl.Handle], object]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    is_waiting = threading.Event()

    def press_ctrl_c() -> None:
        is_waiting.wait(PATIENCE_S)
        time.sleep(0.2)  # from saying so to doing so
        signal.pthread_kill(main, signal.SIGINT)

    handle = built(at(2, press_ctrl_c), FOREVER).run()
    with pytest.raises(KeyboardInterrupt):
        is_waiting.set()
        while True:
            wait(handle)
    assert not handle.is_running
    assert handle.join().position.step >= 2


def test_one_run_at_a_time_goes_on_in_a_process() -> None:
    with (
        built(epochs=FOREVER).run(),
        pytest.raises(pl.errors.MisuseError, match="another run is active in this process"),
    ):
        built().run()
    assert built().run().join().position.epoch == 3


def stopped_by_rank_1(policy: Any) -> tuple[int, str]:
    reached = threading.Event()
    handle = built(at(4, reached.set), FOREVER).policy(policy).batch_size(8).settings(micro_batch=4).run()
    if pl.World.from_environment().rank == 1:  # with unequal shares, rank 0 may have trained fewer micro-batches
        assert reached.wait(PATIENCE_S)
        handle.stop()
    state = handle.join(PATIENCE_S)
    return state.position.step, digest(state.model)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_one_workers_stop_ends_all_after_the_same_step(pool: WorkerPool, policy: str) -> None:
    first, second = pool.run(stopped_by_rank_1, 2, policy)
    assert first == second


def left_by_request() -> tuple[int, int, str]:
    with pl.Trainer.setup(mlp, sgd, data=(X, Y), global_batch=16, micro_batch=4) as trainer:
        trainer.every(1, lambda r: trainer.request_stop() if r.step == 4 and trainer.is_main else None)
        try:
            for epoch in trainer.epochs(FOREVER):
                for batch in epoch:
                    trainer.backward(loss_of(trainer.model, batch))
                    trainer.step()
        except pl.errors.Stopped as stopped:
            return stopped.step, trainer.position.step, digest(trainer.model.state_dict())
    raise AssertionError("it was not stopped")


def test_request_stop_works_without_checkpoints(pool: WorkerPool) -> None:
    step, position, _ = left_by_request()
    assert step == position == 5  # the request travels with the next step
    first, second = pool.run(left_by_request, 2)
    assert first == second
    assert first[:2] == (5, 5)


def on_two_workers(train_fn: Any = loss_of, epochs: int = 3) -> pl.compat.flodl.Builder:
    return built(train_fn, epochs).settings(num_workers=2, micro_batch=4, exact=True)


def test_workers_that_are_started_tell_their_metrics_and_stop() -> None:
    alone = list(built(epochs=2).settings(micro_batch=4, exact=True).run())
    handle = on_two_workers(epochs=FOREVER).run()
    assert handle.world_size == 2
    assert handle.devices == (torch.device("cpu"),) * 2
    metrics = [handle.next_metrics(PATIENCE_S) for _ in alone]
    assert handle.is_running
    assert [(m.epoch, m.loss, m.step) for m in metrics if m] == [(m.epoch, m.loss, m.step) for m in alone]
    handle.stop()
    position = handle.join(PATIENCE_S).position
    assert position.step > metrics[-1].step


def test_the_error_of_a_worker_that_was_started_comes_with_its_traceback() -> None:
    def train_fn(model: Any, batch: Any) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            fail()
        return loss_of(model, batch)

    handle = on_two_workers(train_fn).run()
    with pytest.raises(pl.errors.WorkerError, match="rank 1 failed: ZeroDivisionError: in train_fn") as caught:
        handle.join(PATIENCE_S)
    assert caught.value.rank == 1
    assert "fail()" in caught.value.traceback_text


def test_workers_that_hang_are_killed_when_nobody_holds_them(tmp_path: Any) -> None:
    def train_fn(model: Any, batch: Any) -> torch.Tensor:
        (tmp_path / os.environ["RANK"]).touch()
        time.sleep(10 * PATIENCE_S)
        return loss_of(model, batch)

    handle = on_two_workers(train_fn).run()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    handle._background.end(grace_s=10.0)  # as the finalizer does, with less patience
    assert not handle.is_running


SCRIPT = """
import torch, paceline as pl
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)
X = torch.arange(32.0).reshape(16, 2) / 32

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def forward(self, x):
        return self.layer(x)

def train_fn(model, batch):
    return functional.mse_loss(model(batch), batch.sum(1, keepdim=True))

builder = pl.Trainer.builder(Net, lambda p: torch.optim.SGD(p, lr=0.1), train_fn).dataset(X).batch_size(8)
for workers in (1, 2):
    losses = [m.loss for m in builder.num_epochs(2).settings(num_workers=workers, exact=True).run()]
    print(losses)
left = builder.num_epochs(10**9).settings(num_workers=1).run()
left.next_metrics()
print("end")
"""


def test_functions_of_a_notebook_work_and_the_interpreters_exit_stops_a_run() -> None:
    ended = preloaded_python.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    alone, together, end = ended.stdout.splitlines()
    assert alone == together
    assert end == "end"
    assert "Traceback" not in ended.stderr
