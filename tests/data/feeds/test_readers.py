"""Reading in the background: the same batches, errors that arrive, processes that end with the worker."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import textwrap
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import preloaded_python
import psutil
import pytest
import torch
import training
from models import mlp, vectors
from torch.nn import functional
from torch.utils.data import Dataset
from waiting import wait_until
from worker_pool import WorkerPool

import paceline as pl
from paceline.data.feeds.readers import Prefetcher, ReaderDied, ReaderProcesses, ReaderThread
from paceline.data.sources.base import as_source
from paceline.data.sources.skip_bad import SkipBad


class Noisy(Dataset):
    """Augments with all three generators."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.x, self.y = vectors(48)
        self.bad = bad

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.bad:
            raise OSError(f"sample {index} is rotten")
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.x[index] + 0.1 * noise, self.y[index]


def train(data: Any = None, **settings: Any) -> str:
    """A digest of the weights."""
    return training.train(data or Noisy(), **{"global_batch": 16, "micro_batch": 4, **settings})[0]


@pytest.mark.parametrize("readers", [1, 2])
def test_readers_change_no_weight(readers: int) -> None:
    expected = train()
    assert train(readers=readers) == expected
    assert train(readers=readers, prefetch=7) == expected


@pytest.mark.parametrize("size", [2, 3])
def test_nor_do_they_on_several_workers(size: int, pool: WorkerPool) -> None:
    assert set(pool.run(lambda: train(readers=2), size)) == {train()}


def test_the_users_random_streams_go_on_undisturbed() -> None:
    def draws(readers: int) -> tuple[float, ...]:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        numbers = []
        with pl.Trainer.setup(
            mlp,
            lambda p: torch.optim.SGD(p, lr=0.1),
            data=Noisy(),
            global_batch=16,
            micro_batch=16,
            loading=pl.Loading(readers=readers),
        ) as trainer:
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    numbers += [random.random(), np.random.rand()]
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
        return tuple(numbers)

    assert draws(0) == draws(2)


def test_an_error_in_a_reader_arrives_with_its_traceback() -> None:
    with pytest.raises(OSError, match="sample 13 is rotten") as caught:
        train(Noisy(bad=(13,)), readers=2)
    assert "__getitem__" in "".join(caught.value.__notes__)


def test_bad_samples_are_told_to_the_worker_whoever_read_them() -> None:
    def run(readers: int) -> tuple[str, list[int]]:
        told: list[int] = []
        source = SkipBad(as_source(Noisy(bad=(3, 4, 13))), lambda skipped: told.append(skipped.index))
        return train(source, readers=readers), told

    weights, told = run(0)
    assert sorted(told) == [3, 3, 4, 4, 13, 13]  # once in each of two epochs
    assert run(2) == (weights, told)


class DecodingError(Exception):
    """It can be pickled, but not unpickled: its constructor takes other arguments than the base class gets."""

    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(f"sample {sample}: {reason}")


@pytest.mark.parametrize("settings", [{}, {"readers": 1}, {"readers": 1, "feed": "dispatched"}])
def test_a_bad_sample_is_skipped_whatever_its_error(settings: dict[str, Any], pool: WorkerPool) -> None:
    class Undecodable(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if index == 5:
                raise DecodingError(index, "no header")
            return super().__getitem__(index)

    def run() -> list[str]:
        told: list[str] = []
        train(Undecodable(), skip_bad_samples=lambda skipped: told.append(str(skipped.error)), **settings)
        return told

    told = [text for texts in pool.run(run, 2) for text in texts]
    assert len(told) == 2  # once in each of two epochs
    assert all("sample 5: no header" in text for text in told)


def test_a_micro_batch_of_bad_samples_only_is_left_out() -> None:
    told: list[int] = []
    source = SkipBad(as_source(Noisy(bad=(4, 5, 6, 7))), lambda skipped: told.append(skipped.index))
    assert train(source, shuffle=False, micro_batch=4, readers=1) != train(Noisy(), shuffle=False)
    assert sorted(set(told)) == [4, 5, 6, 7]


def test_a_reader_that_dies_is_an_error_not_a_wait() -> None:
    readers = ReaderProcesses(lambda _: os.kill(os.getpid(), signal.SIGKILL), 1)
    try:
        answer = readers.submit("anything")
        with pytest.raises(ReaderDied, match=r"reader process 0 was killed by SIGKILL: .* set fewer readers"):
            answer()
    finally:
        readers.close()


def test_answers_may_be_taken_in_any_order_or_not_at_all() -> None:
    readers = ReaderProcesses(lambda request: (request, torch.full((200_000,), request)), 2)
    open_files = psutil.Process().num_fds()
    answers = [readers.submit(number) for number in range(12)]
    for number in (7, 2, 11):
        assert answers[number]()[0] == number
    del answers
    assert readers.submit(99)()[1].eq(99).all()
    assert readers.submit(98)()[1].eq(98).all()
    assert psutil.Process().num_fds() <= open_files  # nothing of what nobody wanted is kept
    readers.close()


def test_no_more_than_the_depth_is_under_way() -> None:
    asked: list[int] = []

    class Readers:
        def submit(self, request: Any) -> Any:
            asked.append(request)
            return lambda: request

        def close(self) -> None: ...

    prefetcher = Prefetcher(Readers(), depth=3)
    prefetcher.expect(iter(range(100)))
    assert asked == [0, 1, 2]
    assert prefetcher.take(0) == 0
    prefetcher.expect(iter(range(1, 100)))
    assert asked == [0, 1, 2, 3]
    prefetcher.expect(iter([2, 50]))  # the plan changed
    assert asked == [0, 1, 2, 3, 50]
    assert prefetcher.take(70) == 70  # and once more
    assert asked[-1] == 70


def test_a_thread_reads_ahead_only_where_no_code_of_the_users_runs() -> None:
    with pytest.raises(ValueError, match="prefetch=3 needs reader processes"):
        train(prefetch=3)
    thread = ReaderThread(lambda request: request + 1)
    assert [answer() for answer in [thread.submit(n) for n in range(4)]] == [1, 2, 3, 4]
    thread.close()


def test_a_timeout_may_be_longer_than_the_system_can_wait() -> None:
    for readers in (
        ReaderProcesses(lambda request: request + 1, 1, 1e12),
        ReaderThread(lambda request: request + 1, 1e12),
    ):
        assert readers.submit(1)() == 2
        readers.close()


def test_an_answer_that_comes_just_after_the_timeout_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Future):
        def result(self, timeout: float | None = None) -> Any:
            found = super().result()
            if timeout is not None:
                raise TimeoutError
            return found

    monkeypatch.setattr("paceline.data.feeds.readers.Future", Late)
    thread = ReaderThread(lambda request: request + 1, 60.0)
    assert thread.submit(1)() == 2
    thread.close()


def test_the_next_micro_batch_is_read_while_this_one_is_computed(tmp_path: Path) -> None:
    class Recording(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            (tmp_path / str(index)).touch()
            return super().__getitem__(index)

    with pl.Trainer.setup(
        mlp,
        lambda p: torch.optim.SGD(p, lr=0.1),
        data=Recording(),
        global_batch=4,
        micro_batch=4,
        loading=pl.Loading(readers=1),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for taken, batch in enumerate(epoch, 1):
                wanted = min(4 * (taken + 1), 48)
                wait_until(lambda wanted=wanted: len(list(tmp_path.iterdir())) >= wanted)
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()


def test_readers_end_with_a_worker_that_is_killed(tmp_path: Any) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, socket, sys, time
        from paceline.data.feeds.readers import ReaderProcesses
        peer, ours = socket.socketpair()
        peer.set_inheritable(False)
        readers = ReaderProcesses(lambda request: os.getpid(), 2)
        print(readers.submit(0)(), readers.submit(1)(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    finished = preloaded_python.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    pids = list(map(int, finished.stdout.split()))
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_readers_keep_no_connection_of_the_worker_open() -> None:
    here, there = socket.socketpair()
    readers = ReaderProcesses(lambda request: request, 1)
    readers.submit(0)()
    here.close()
    there.settimeout(60)
    assert there.recv(1) == b""  # the end, although the reader still runs
    there.close()
    readers.close()
