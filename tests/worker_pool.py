"""Started workers that tests share: importing torch costs seconds, joining a world only milliseconds.

`pool.run(fn, size, *args)` calls `fn(*args)` on `size` workers of one fresh Gloo world and returns their results by
rank. A function that raises on any worker raises `WorkersFailed` here, with every worker's exception.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle

GROUP_TIMEOUT_S = 60
JOB_TIMEOUT_S = 200


class WorkersFailed(AssertionError):
    def __init__(self, errors: dict[int, BaseException], texts: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in texts.items()))
        self.errors = errors


class WorkerPool:
    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    @property
    def pids(self) -> set[int]:
        return {process.pid for process, _ in self._workers}

    def run(self, fn: Any, size: int, *args: Any) -> list[Any]:
        while len(self._workers) < size:
            self._workers.append(_start())
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            _by_value(fn)
            payload = cloudpickle.dumps((fn, args))
            connections = [connection for _, connection in self._workers[:size]]
            for rank, connection in enumerate(connections):
                connection.send((payload, rank, size, str(Path(folder, "store")), sys.path))
            answers = self._collect(connections)
        errors = {rank: cloudpickle.loads(error) for rank, (kind, error, _) in answers.items() if kind == "error"}
        if errors:
            raise WorkersFailed(errors, {rank: answers[rank][2] for rank in errors})
        return [cloudpickle.loads(answers[rank][1]) for rank in range(size)]

    def _collect(self, connections: list[Connection]) -> dict[int, tuple[str, bytes, str]]:
        answers: dict[int, tuple[str, bytes, str]] = {}
        deadline = monotonic() + JOB_TIMEOUT_S
        while len(answers) < len(connections):
            waiting = [c for rank, c in enumerate(connections) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"pool workers {set(range(len(connections))) - set(answers)} gave no answer")
            for connection in ready:
                try:
                    answers[connections.index(connection)] = connection.recv()
                except EOFError:
                    self.close()
                    raise RuntimeError(f"pool worker {connections.index(connection)} died") from None
        return answers

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def _by_value(fn: Any) -> None:
    """Test modules are not importable by name in the workers."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    if module is not None and "test" in module.__name__:
        cloudpickle.register_pickle_by_value(module)


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _serve(connection: Connection) -> None:
    import torch

    while True:
        try:
            payload, rank, size, store, path = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        torch.set_num_threads(1)
        try:
            answer = ("result", _in_world(payload, rank, size, store), "")
        except BaseException as error:
            answer = ("error", _portable(error), "".join(traceback.format_exception(error)))
        connection.send(answer)


def _in_world(payload: bytes, rank: int, size: int, store: str) -> bytes:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from datetime import timedelta

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        dist.barrier()  # else a quick function ends, and closes its connections, while another worker still connects
        fn, args = cloudpickle.loads(payload)
        return cloudpickle.dumps(fn(*args))
    finally:
        dist.destroy_process_group()


def _portable(error: BaseException) -> bytes:
    try:
        return cloudpickle.dumps(error)
    except Exception:
        return cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
