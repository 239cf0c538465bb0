"""Turns of a thread, as the kernel tells them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from gatherings import buffers, sharing

from paceline.comm import long_turns
from paceline.comm.long_turns import SWITCH, TURN_NS, LongTurns
from paceline.comm.shared_memory.arena import missing_arena

if reason := missing_arena():
    pytest.skip(f"turns are chosen only where workers share memory: {reason}", allow_module_level=True)


def in_a_thread(work: Callable[[], Any]) -> Any:
    """A thread's choice must not outlive its test."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    [result] = results
    return result


def policy() -> int:
    return os.sched_getscheduler(0)


def has_long_turns() -> bool:
    attributes = long_turns._ATTRIBUTES.unpack(long_turns._get(0))
    return attributes[1] == os.SCHED_BATCH and attributes[5] in (TURN_NS, 0)  # 0: a kernel before 6.12


def test_a_thread_has_long_turns_until_they_are_closed() -> None:
    def work() -> list[bool]:
        seen = [has_long_turns()]
        turns = LongTurns()
        seen.append(has_long_turns())
        turns.close()
        turns.close()
        return [*seen, has_long_turns()]

    assert in_a_thread(work) == [False, True, False]
    assert not has_long_turns()


def test_everything_is_as_before_when_they_are_closed_by_another_thread() -> None:
    def work() -> tuple[bytes, bytes]:
        before = long_turns._get(0)
        in_a_thread(LongTurns().close)
        return before, long_turns._get(0)

    before, after = in_a_thread(work)
    assert after == before


def test_who_is_nice_stays_nice() -> None:
    def work() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        turns = LongTurns()
        inside = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        turns.close()
        return inside, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert in_a_thread(work) == (5, 5)


def test_a_forked_process_has_ordinary_turns() -> None:
    def work() -> int:
        turns = LongTurns()
        child = os.fork()
        if not child:
            os._exit(policy())
        turns.close()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_a_thread(work) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        turns = LongTurns()
        inside = policy()
        turns.close()
        return inside, policy()

    with caplog.at_level(logging.INFO, "paceline"):
        assert in_a_thread(work) == (os.SCHED_IDLE, os.SCHED_IDLE)
    assert f"as the system likes: this thread has scheduling policy {os.SCHED_IDLE} already" in caplog.text


def test_the_switch_turns_them_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SWITCH, "0")

    def work() -> int:
        LongTurns()
        return policy()

    with caplog.at_level(logging.INFO, "paceline"):
        assert in_a_thread(work) == os.SCHED_OTHER
    assert f"as the system likes: {SWITCH}=0" in caplog.text


@pytest.mark.parametrize(("num_cores", "are_long"), [(1, True), (2, False)])
def test_workers_take_them_from_their_first_exchange_on_if_they_share_cores(
    num_cores: int, are_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))

    def work() -> list[bool]:
        with sharing(2) as workers:
            tensors = buffers(workers, 5)
            seen = [has_long_turns()]
            pending = [worker.all_reduce(tensor) for worker, tensor in zip(workers, tensors, strict=True)]
            for each in pending:
                each.wait()
            seen.append(has_long_turns())
        return [*seen, has_long_turns()]

    assert in_a_thread(work) == [False, are_long, False]
