"""The worker processes of one launch, started and watched by torchrun's elastic agent.

The agent runs in a thread of its own, for two reasons. It then installs no signal handlers, so that Ctrl-C reaches
the caller as always. And the calling thread stays free to kill workers that ignore the agent's SIGTERM or are
stopped: the agent itself would wait half a minute for each.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils.api import macros

from paceline.run import worker
from paceline.run.failure import first_failure, read_reports

GRACE_S = 3.0  # between asking a worker to end and killing it
KILL_WAIT_S = 5.0  # for the kernel to end what was killed
POLL_S = 0.1

_LOOPBACK = "127.0.0.1"


class Workers:
    """The workers of one launch: started by the constructor, gone after the `with` block.

    `folder` is theirs and the launcher's; `worker.py` says what lies in it.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._killed: set[int] = set()
        rendezvous = RendezvousParameters(
            backend="c10d",
            endpoint=f"{_LOOPBACK}:0",
            run_id=folder.name,
            min_nodes=1,
            max_nodes=1,
            local_addr=_LOOPBACK,
        )
        self._rendezvous = get_rendezvous_handler(rendezvous)
        spec = WorkerSpec(
            role="worker",
            local_world_size=count,
            rdzv_handler=self._rendezvous,
            entrypoint=sys.executable,
            args=("-P", worker.__file__, str(folder), macros.local_rank),
            max_restarts=0,
            monitor_interval=POLL_S,
            local_addr=_LOOPBACK,
        )
        self._agent = _Agent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")))
        self._result: Future[RunResult] = Future()
        # The kernel kills the workers when the thread that started them ends: this one, which waits for them.
        threading.Thread(target=self._run_agent, name="paceline-agent", daemon=True).start()

    def _run_agent(self) -> None:
        try:
            with _quiet_elastic():
                result = self._agent.run()
                self._rendezvous.shutdown()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def __enter__(self) -> Workers:
        return self

    def wait(self) -> BaseException | None:
        """Return when all workers have ended: the first failure, or None."""
        deadline_s = float("inf")
        while not self._ended_within(POLL_S):
            if deadline_s == float("inf") and self._somebody_failed():
                deadline_s = time.monotonic() + GRACE_S
            if time.monotonic() > deadline_s:
                self._kill()
        exit_codes = {rank: failure.exitcode for rank, failure in self._result.result().failures.items()}
        return first_failure(self._folder, self._count, exit_codes, self._killed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers if they still run, and in any case what they left running in their process groups."""
        try:
            if not self._result.done():
                self._signal(signal.SIGTERM)
                self._ended_within(GRACE_S)
        finally:  # a second Ctrl-C comes straight here
            deadline_s = time.monotonic() + KILL_WAIT_S
            self._kill()
            while not self._ended_within(POLL_S) and time.monotonic() < deadline_s:
                self._kill()  # again: the agent may have been about to start them
            del self._agent, self._rendezvous  # and with them the store's ports, though an error may hold this object

    def _ended_within(self, timeout_s: float) -> bool:
        return bool(wait([self._result], timeout_s).done)

    def _pids(self) -> dict[int, int]:
        workers = self._agent.get_worker_group().workers
        return {member.local_rank: member.id for member in workers if member.id is not None}

    def _somebody_failed(self) -> bool:
        """Whether a worker has reported an error, or is gone without a report."""
        reports = read_reports(self._folder, self._count)
        if any(report["outcome"] != worker.DONE for report in reports.values()):
            return True
        return any(not _exists(pid) for rank, pid in self._pids().items() if rank not in reports)

    def _kill(self) -> None:
        self._killed |= {rank for rank, pid in self._pids().items() if _exists(pid)}
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids().values():
            try:
                os.killpg(pid, number)
            except OSError:
                continue  # the whole group is gone


class _Agent(LocalElasticAgent):
    def _construct_event(self, *_args: Any, **_kwargs: Any) -> Event:
        # Nobody reads the agent's events, and for each it would look up this host's full name: seconds, where that
        # does not resolve.
        return Event("paceline", EventSource.AGENT)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


_ELASTIC_LOGGER = logging.getLogger("torch.distributed.elastic")
_NOWHERE = logging.NullHandler()
_quiet_lock = threading.Lock()
_num_quiet = 0  # launches under way: several threads may launch at a time


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the agent's log off the screen: what users need to know is in the exception."""
    global _num_quiet
    with _quiet_lock:
        if _num_quiet == 0:
            _ELASTIC_LOGGER.addHandler(_NOWHERE)
            _ELASTIC_LOGGER.propagate = False
        _num_quiet += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _num_quiet -= 1
            if _num_quiet == 0:
                _ELASTIC_LOGGER.propagate = True
                _ELASTIC_LOGGER.removeHandler(_NOWHERE)
