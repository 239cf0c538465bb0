"""A writer killed at any instant leaves a complete newest checkpoint, and what it left half done is cleaned up."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from checkpoint_state import components, job, same, save, save_steps

from paceline.checkpoint.folders import clean_up, complete_steps, step_folder
from paceline.checkpoint.policy import Retention
from paceline.checkpoint.reader import Checkpoint, verify
from paceline.checkpoint.run_folder import run_lock
from paceline.checkpoint.writer import AsyncWriter

# Forked: starting a Python with torch anew takes seconds.
CONTEXT = multiprocessing.get_context("fork")
ROWS = 20_000


def check_run(root: Path) -> list[int]:
    """What the next start finds: only complete checkpoints, each with its own step's state."""
    with run_lock(root):
        clean_up(root)
        steps = complete_steps(root)
        assert {path.name for path in root.iterdir()} == {".lock", *(step_folder(root, s).name for s in steps)}
        for step in steps:
            assert verify(step_folder(root, step)) == []
        if steps:
            checkpoint = Checkpoint(step_folder(root, steps[-1]))
            for component in components(steps[-1], size=ROWS)[:2]:
                assert same(checkpoint.load(component.name), component.state)
        return steps


def write_for_ever(root: Path, first: int, connection: Connection) -> None:
    with run_lock(root), closing(AsyncWriter(root, retention=Retention(last=2))) as writer:
        step = first
        while True:
            writer.save(*job(step, size=ROWS))
            connection.send(step)
            step += 1


def test_a_writer_killed_at_random_instants_loses_nothing_it_had(tmp_path: Path) -> None:
    kills(tmp_path, 10, seed=0)


@pytest.mark.slow
def test_a_writer_killed_two_hundred_times_loses_nothing_it_had(tmp_path: Path) -> None:
    kills(tmp_path, 200, seed=1)


def kills(root: Path, count: int, seed: int) -> None:
    choose = random.Random(seed)
    newest = 0
    interrupted = 0
    for _ in range(count):
        here, there = CONTEXT.Pipe()
        writer = CONTEXT.Process(target=write_for_ever, args=(root, newest + 1, there))
        writer.start()
        there.close()
        # When save returns for the second time, the first checkpoint is on the disk.
        told = [here.recv(), here.recv()]
        sleep(choose.uniform(0, 0.06))
        kill(writer)
        told += drain(here)
        interrupted += any(path.name.startswith(".step") for path in root.iterdir())
        steps = check_run(root)
        assert told[-1] - 1 <= steps[-1] <= told[-1] + 1, "a finished checkpoint is gone"
        newest = steps[-1]
    assert interrupted > 0, "no kill hit a save: the test is too tame"


def drain(connection: Connection) -> Iterator[Any]:
    try:
        while True:
            yield connection.recv()
    except EOFError:
        connection.close()


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_before(number: int, root: Path) -> None:
    """Kill this process when it is about to touch the run folder for the n-th time."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in EVENTS and str(root) in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def save_and_die(root: Path, step: int, number: int) -> None:
    die_before(number, root)
    with closing(AsyncWriter(root, retention=Retention(last=1))) as writer:
        writer.save(*job(step, size=ROWS))


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_writer_killed_between_any_two_operations_leaves_the_old_or_the_new(step: int, tmp_path: Path) -> None:
    outcomes = []
    while not outcomes or outcomes[-1] is not None:
        root = tmp_path / str(len(outcomes))
        root.mkdir()
        save(root, job(1, size=ROWS))
        process = CONTEXT.Process(target=save_and_die, args=(root, step, len(outcomes) + 1))
        process.start()
        process.join(20)
        steps = check_run(root)
        assert steps in ([1], [step], [1, step])
        outcomes.append(steps if process.exitcode == -signal.SIGKILL else None)
    assert process.exitcode == 0
    assert len(outcomes) > 10
    if step == 2:
        # First the old one, then both, then the new one alone.
        assert [outcomes.index(x) for x in ([1], [1, 2], [2])] == sorted(outcomes.index(x) for x in ([1], [1, 2], [2]))


def test_the_next_start_goes_on_where_the_killed_one_was(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    process = CONTEXT.Process(target=save_and_die, args=(tmp_path, 2, 5))
    process.start()
    process.join(20)
    assert [path.name.split("-")[:2] for path in tmp_path.glob(".step*")] == [[".step", "00000002.partial"]]
    clean_up(tmp_path)
    assert not [*tmp_path.glob(".step*")]
    save_steps(tmp_path, 2)
    assert complete_steps(tmp_path) == [1, 2]
