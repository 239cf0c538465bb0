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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils.api import macros

from paceline.run import worker
from paceline.run.failure import first_failure, read_reports
from paceline.run.worker import heard_file

GRACE_S = 3.0  # between asking a worker to end and killing it
KILL_WAIT_S = 5.0  # for the kernel to end what was killed
POLL_S = 0.1

_LOOPBACK = "127.0.0.1"


class Workers:
    """The workers of one launch: started by the constructor, gone after the `with` block.

    `folder` is theirs and the launcher's; `worker.py` says what lies in it. Where one fails, all are started again, up
    to `max_restarts` times.
    """

    def __init__(self, folder: Path, count: int, max_restarts: int = 0) -> None:
        self._count = count
        self._killed: set[int] = set()
        self._is_asked_to_end = False
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
            max_restarts=max_restarts,
            monitor_interval=POLL_S,
            local_addr=_LOOPBACK,
        )
        self._agent = _Agent(folder, spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")))
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
        """Return when all workers have ended for good: the first failure of the last start, or None."""
        pids: dict[int, int] = {}
        deadline_s = float("inf")
        while not self._ended_within(POLL_S):
            if (current := self._agent.pids()) != pids:  # started, or started again
                pids, deadline_s = current, float("inf")
                self._killed.clear()
            if deadline_s == float("inf") and self._somebody_failed(pids):
                deadline_s = time.monotonic() + GRACE_S
            if time.monotonic() > deadline_s:
                self._kill(pids)
        exit_codes = {rank: failure.exitcode for rank, failure in self._result.result().failures.items()}
        return first_failure(self._agent.folder, self._count, exit_codes, self._killed)

    def stop(self) -> BaseException | None:
        """Ask the workers to end, and wait for those that heard it and save: what they say, or None."""
        self._is_asked_to_end = True
        self._agent.start_no_more()
        pids = self._agent.pids()
        for pid in pids.values():
            _signal(pid, signal.SIGTERM, os.kill)  # not its children: it still needs its readers
        deadline_s = time.monotonic() + GRACE_S
        while not self._ended_within(POLL_S):
            running = [rank for rank, pid in pids.items() if _exists(pid)]
            is_saving = any(heard_file(self._agent.folder, rank).exists() for rank in running)
            if not is_saving and time.monotonic() > deadline_s:
                return None
        return first_failure(self._agent.folder, self._count, {}, self._killed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers if they still run, and in any case what they left running in their process groups."""
        try:
            if not self._result.done() and not self._is_asked_to_end:
                self.stop()
        finally:  # a second Ctrl-C comes straight here
            self._agent.start_no_more()
            deadline_s = time.monotonic() + KILL_WAIT_S
            self._kill(self._agent.pids())
            while not self._ended_within(POLL_S) and time.monotonic() < deadline_s:
                self._kill(self._agent.pids())  # again: the agent may have been about to start them
            del self._agent, self._rendezvous  # and with them the store's ports, though an error may hold this object

    def _ended_within(self, timeout_s: float) -> bool:
        return bool(wait([self._result], timeout_s).done)

    def _somebody_failed(self, pids: Mapping[int, int]) -> bool:
        """Whether a worker has reported an error, or is gone without a report."""
        reports = read_reports(self._agent.folder, self._count)
        outcomes = {report["outcome"] for report in reports.values()}
        if outcomes - {worker.DONE, worker.STOPPED}:  # who was stopped waits for the others by itself
            return True
        return any(not _exists(pid) for rank, pid in pids.items() if rank not in reports)

    def _kill(self, pids: Mapping[int, int]) -> None:
        self._killed |= {rank for rank, pid in pids.items() if _exists(pid)}
        for pid in pids.values():
            _signal(pid, signal.SIGKILL, os.killpg)


class _Agent(LocalElasticAgent):
    """Starts the workers again only where that can help, and says so."""

    def __init__(self, shared: Path, spec: WorkerSpec, **settings: Any) -> None:
        super().__init__(spec, **settings)
        self._shared = shared
        self._num_restarts = 0
        self._failures: dict[int, int] = {}

    @property
    def folder(self) -> Path:
        """Where the workers of the current start report."""
        return worker.start_folder(self._shared, self._num_restarts)

    def pids(self) -> dict[int, int]:
        members = self.get_worker_group().workers
        return {member.local_rank: member.id for member in members if member.id is not None}

    def start_no_more(self) -> None:
        self._remaining_restarts = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self._failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
            outcomes = {report["outcome"] for report in self._reports().values()}
            if outcomes & {worker.STOPPED, worker.NO_PROGRESS, worker.INTERRUPTED}:
                self.start_no_more()
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        for pid in self.pids().values():
            _signal(pid, signal.SIGKILL, os.killpg)  # what the ended workers left running
        reason = first_failure(self.folder, len(self.pids()), self._failures, ())
        self._num_restarts += 1
        print(f"paceline: restart {self._num_restarts}: {str(reason).partition(chr(10))[0]}", file=sys.stderr)
        super()._restart_workers(worker_group)

    def _reports(self) -> dict[int, dict[str, Any]]:
        return read_reports(self.folder, self.get_worker_group().spec.local_world_size)

    def _construct_event(self, *_args: Any, **_kwargs: Any) -> Event:
        # Nobody reads the agent's events, and for each it would look up this host's full name: seconds, where that
        # does not resolve.
        return Event("paceline", EventSource.AGENT)


def _signal(pid: int, number: signal.Signals, send: Callable[[int, int], None]) -> None:
    try:
        send(pid, number)
    except OSError:
        return  # gone, and its group with it


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
