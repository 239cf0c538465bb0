"""Worker processes for benchmarks over several workers: started once, alternating contestants inside."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch import distributed

from paceline.core.processes import die_with_parent

HOST = "127.0.0.1"
EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Worker:
    """A process that will send its result, or why it has none."""

    name: str
    process: SpawnProcess
    result: Connection


def run_workers(function: Callable[..., Any], num_workers: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `num_workers` new processes at once; the results by rank.

    The processes find the environment that torchrun would give them and have one intra-op thread. When one fails,
    the others are ended and its traceback is raised here. `function` must be importable by name.
    """
    with working(function, num_workers, *arguments) as workers:
        return results_of(workers)


@contextmanager
def working(function: Callable[..., Any], num_workers: int, *arguments: Any) -> Iterator[list[Worker]]:
    """The same workers, by rank, whose results are asked for inside; at the end they are ended."""
    # On a port that the system chooses, so that none is guessed.
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    workers: list[Worker] = []
    try:
        for rank in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            environment = {
                "RANK": rank,
                "WORLD_SIZE": num_workers,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": num_workers,
                "MASTER_ADDR": HOST,
                "MASTER_PORT": store.port,
                "OMP_NUM_THREADS": 1,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is here, rank 0 must not open another
            }
            name = f"worker {rank} of {num_workers}"
            process = context.Process(
                target=_work, args=(os.getpid(), sender, environment, function, arguments), name=name, daemon=True
            )
            process.start()
            sender.close()  # ours: so that the pipe ends when the worker does
            workers.append(Worker(name, process, receiver))
        yield workers
        for worker in workers:
            worker.process.join(EXIT_TIMEOUT_S)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.result.close()
        del store  # which closes its port, also while a traceback keeps this frame


def results_of(workers: Sequence[Worker]) -> list[Any]:
    """Each worker's result, failing with the first that fails."""
    results: dict[int, Any] = {}
    numbers = {worker.result: number for number, worker in enumerate(workers)}
    while len(results) < len(workers):
        waiting = [worker.result for worker in workers if numbers[worker.result] not in results]
        for receiver in multiprocessing.connection.wait(waiting):
            number = numbers[receiver]  # type: ignore[index]
            try:
                succeeded, value = workers[number].result.recv()
            except EOFError:
                succeeded, value = False, "it was killed, or ended without a word"
            if not succeeded:
                raise RuntimeError(f"{workers[number].name} failed: {value}")
            results[number] = value
    return [results[number] for number in range(len(workers))]


def _work(
    parent_pid: int, sender: Connection, environment: dict[str, Any], function: Callable[..., Any], arguments: Any
) -> None:
    die_with_parent(parent_pid)
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    try:
        sender.send((True, function(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


@contextmanager
def gloo_group() -> Iterator[None]:
    """The workers' default process group, for peers and for ours alike."""
    distributed.init_process_group("gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()
