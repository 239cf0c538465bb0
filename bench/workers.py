"""Worker processes for benchmarks over several workers: started once, alternating contestants inside."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

HOST = "127.0.0.1"
EXIT_TIMEOUT_S = 10.0


def run_workers(function: Callable[..., Any], num_workers: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `num_workers` new processes at once; the results by rank.

    The processes find the environment that torchrun would give them and have one intra-op thread. When one fails,
    the others are ended and its traceback is raised here. `function` must be importable by name.
    """
    # On a port that the system chooses, so that none is guessed.
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    processes, results = [], []
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
            process = context.Process(
                target=_work, args=(sender, environment, function, arguments), name=f"worker {rank}", daemon=True
            )
            process.start()
            sender.close()  # ours: so that the pipe ends when the worker does
            processes.append(process)
            results.append(receiver)
        values = _gather(results)
        for process in processes:
            process.join(EXIT_TIMEOUT_S)
        return values
    finally:
        for process in processes:
            process.kill()
            process.join()
        for receiver in results:
            receiver.close()
        del store  # which closes its port, also while a traceback keeps this frame


def _gather(receivers: list[Connection]) -> list[Any]:
    """Each worker's result, failing with the first that fails."""
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        for receiver in multiprocessing.connection.wait(waiting):
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                succeeded, value = receivers[rank].recv()
            except EOFError:
                succeeded, value = False, "it was killed, or ended without a word"
            if not succeeded:
                raise RuntimeError(f"worker {rank} of {len(receivers)} failed: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _work(sender: Connection, environment: dict[str, Any], function: Callable[..., Any], arguments: Any) -> None:
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
