"""The worker processes of one launch on this node, started and watched by torchrun's elastic agent.

The agent runs in a thread of its own, for two reasons. It then installs no signal handlers, so that Ctrl-C reaches
the caller as always. And the calling thread stays free to kill workers that ignore the agent's SIGTERM or are
stopped: the agent itself would wait half a minute for each.

How the nodes of a launch find together and agree is `meeting.py`'s: torch's own way leaves each agent its own count of
restarts, with which restarted workers wait for each other in vain.
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

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.run.launching import worker
from paceline.run.launching.failure import ASKED, DIED, Ending, first_ending, first_failure, read_reports
from paceline.run.launching.meeting import Meeting, Outcome
from paceline.run.launching.worker import heard_file, output_file

GRACE_S = 3.0  # between asking a worker to end and killing it
KILL_WAIT_S = 5.0  # for the kernel to end what was killed
POLL_S = 0.1


class Workers:
    """The workers of one launch on this node: started by the constructor, gone after the `with` block.

    `folder` is theirs and the launcher's; `worker.py` says what lies in it. Where one fails, on whichever node, all are
    started again, up to `max_restarts` times. `logs` is where their output goes, if not to the terminal.
    """

    def __init__(
        self, folder: Path, count: int, meeting: Meeting, max_restarts: int = 0, logs: Path | None = None
    ) -> None:
        self._meeting = meeting
        spec = WorkerSpec(
            role="worker",
            local_world_size=count,
            rdzv_handler=_Rendezvous(meeting),
            entrypoint=sys.executable,
            args=("-P", worker.__file__, str(folder)),
            max_restarts=max_restarts,
            monitor_interval=POLL_S,
        )
        self._agent = _Agent(folder, meeting, logs, spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")))
        self._result: Future[RunResult] = Future()
        # The kernel kills the workers when the thread that started them ends: this one, which waits for them.
        threading.Thread(target=self._run_agent, name="paceline-agent", daemon=True).start()

    def _run_agent(self) -> None:
        try:
            with _quiet_elastic():
                result = self._agent.run()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def __enter__(self) -> Workers:
        return self

    def wait(self) -> BaseException | None:
        """Return when all workers, of all nodes, have ended for good: the first failure of the last start, or None."""
        pids: dict[int, int] = {}
        deadline_s = float("inf")
        while not self._ended_within(POLL_S):
            if (current := self._agent.pids()) != pids:  # started, or started again
                pids, deadline_s = current, float("inf")
                self._agent.killed.clear()
            if deadline_s == float("inf") and (self._somebody_failed(pids) or self._meeting.is_failing()):
                deadline_s = time.monotonic() + GRACE_S
            if time.monotonic() > deadline_s:
                self._kill(pids)
        self._result.result()
        ending = self._meeting.first_ending()
        return None if ending is None else ending.error()

    def stop(self) -> BaseException | None:
        """Ask the workers to end, and wait for those that heard it and save: what they say, or None."""
        self._agent.end()
        pids = self._agent.pids()
        for pid in pids.values():
            _signal(pid, signal.SIGTERM, os.kill)  # not its children: it still needs its readers
        deadline_s = time.monotonic() + GRACE_S
        while not self._ended_within(POLL_S):
            running = [rank for rank, pid in pids.items() if _exists(pid)]
            is_saving = any(heard_file(self._agent.folder, rank).exists() for rank in running)
            if not is_saving and time.monotonic() > deadline_s:
                return None
        return self._agent.reported_failure()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers if they still run, and in any case what they left running in their process groups."""
        try:
            if not self._result.done() and not self._agent.is_asked_to_end:
                self.stop()
        finally:  # a second Ctrl-C comes straight here
            self._agent.end()
            deadline_s = time.monotonic() + KILL_WAIT_S
            self._kill(self._agent.pids())
            while not self._ended_within(POLL_S) and time.monotonic() < deadline_s:
                self._kill(self._agent.pids())  # again: the agent may have been about to start them
            del self._agent  # and with it its hold on the store, though an error may hold this object

    def _ended_within(self, timeout_s: float) -> bool:
        return bool(wait([self._result], timeout_s).done)

    def _somebody_failed(self, pids: Mapping[int, int]) -> bool:
        """Whether a worker has reported an error, or is gone without a report."""
        reports = self._agent.reports()
        outcomes = {report["outcome"] for report in reports.values()}
        if outcomes - {worker.DONE, worker.STOPPED}:  # who was stopped waits for the others by itself
            return True
        return any(not _exists(pid) for rank, pid in pids.items() if rank not in reports)

    def _kill(self, pids: Mapping[int, int]) -> None:
        self._agent.killed |= {rank for rank, pid in pids.items() if _exists(pid)}
        for pid in pids.values():
            _signal(pid, signal.SIGKILL, os.killpg)


class _Agent(LocalElasticAgent):
    """Ends a start on all nodes or on none, begins another only where that can help, and says so."""

    def __init__(self, shared: Path, meeting: Meeting, logs: Path | None, spec: WorkerSpec, **settings: Any) -> None:
        super().__init__(spec, **settings)
        self.killed: set[int] = set()  # ranks that were killed because they did not end by themselves
        self.is_asked_to_end = False
        self._shared = shared
        self._meeting = meeting
        self._logs = logs
        self._num_workers = spec.local_world_size
        self._num_restarts = 0
        self._ended: RunResult | None = None  # how the current start ended on this node

    @property
    def folder(self) -> Path:
        """Where the workers of the current start report."""
        return worker.start_folder(self._shared, self._num_restarts)

    def pids(self) -> dict[int, int]:
        """By rank."""
        members = self.get_worker_group().workers
        return {member.global_rank: member.id for member in members if member.id is not None}

    def reports(self) -> dict[int, dict[str, Any]]:
        return read_reports(self.folder, self._num_workers, self._meeting.first_rank)

    def reported_failure(self) -> BaseException | None:
        """The error that the workers speak of; None if they do not."""
        return first_failure(self.folder, self._num_workers, {}, self.killed, self._meeting.first_rank)

    def end(self) -> None:
        """Start nothing any more, and wait for no other node."""
        self.is_asked_to_end = True
        self._start_no_more()

    def _start_no_more(self) -> None:
        self._remaining_restarts = 0

    def _assign_worker_ranks(
        self, _store: Any, _group_rank: int, _group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, size = self._meeting.first_rank, self._meeting.num_workers
        return [
            Worker(local_rank=i, global_rank=first + i, role_rank=first + i, world_size=size, role_world_size=size)
            for i in range(spec.local_world_size)
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ended is None:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.HEALTHY:
                if not self._meeting.is_failing():
                    return result
                self._stop_workers(worker_group)
                result = RunResult(WorkerState.FAILED)
            self._ended = result
            self._meeting.say(self._outcome(result))
        return self._agreed(self._ended)

    def _outcome(self, result: RunResult) -> Outcome:
        """How this node's part of the start ended, for the others to know."""
        if result.state is WorkerState.SUCCEEDED:
            return Outcome(is_done=True)
        exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        first_rank = self._meeting.first_rank
        ending = first_ending(self.folder, self._num_workers, exit_codes, self.killed, first_rank)
        if self.is_asked_to_end and (ending is None or ending.kind not in (worker.FAILED, DIED, worker.STOPPED)):
            ending = Ending(ASKED, first_rank, f"the command was ended on node {self._meeting.name}")
        elif ending is not None and (where := self._where(ending.rank)):
            ending = ending.add(where)
        said = {report["outcome"] for report in self.reports().values()}
        is_final = bool(said & {worker.STOPPED, worker.ABORTED, worker.NO_PROGRESS, worker.INTERRUPTED})
        return Outcome(False, ending, may_start_again=self._remaining_restarts > 0 and not is_final)

    def _where(self, rank: int) -> str:
        """Where to look for more about a worker, as far as it is not plain."""
        node = f"rank {rank} ran on node {self._meeting.name}" if self._meeting.num_nodes > 1 else ""
        output = f"the output of rank {rank} is in {output_file(self._logs, rank, 'err')}" if self._logs else ""
        return "; ".join(filter(None, [node, output]))

    def _agreed(self, ended: RunResult) -> RunResult:
        """How the start ended on all nodes; HEALTHY while it has not on some."""
        outcomes = self._meeting.outcomes()
        is_lost = bool(self._meeting.lost())
        if outcomes is None and not is_lost and not self.is_asked_to_end:
            return RunResult(WorkerState.HEALTHY)
        if outcomes is not None and all(outcome.is_done for outcome in outcomes):
            return ended
        if outcomes is None or not all(outcome.may_start_again for outcome in outcomes):
            self._start_no_more()
        return RunResult(WorkerState.FAILED, failures=ended.failures)

    def _exit_barrier(self) -> None:
        """All nodes are done: they have agreed on it."""

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        for pid in self.pids().values():
            _signal(pid, signal.SIGKILL, os.killpg)  # what the ended workers left running
        ending = self._meeting.first_ending()
        reason = ending.text.partition("\n")[0] if ending is not None else "the workers ended"
        self._num_restarts += 1
        self._ended = None
        print(f"paceline: restart {self._num_restarts}: {reason}", file=sys.stderr)
        self._meeting.begin(self._num_restarts)
        super()._restart_workers(worker_group)

    def _construct_event(self, *_args: Any, **_kwargs: Any) -> Event:
        # Nobody reads the agent's events, and for each it would look up this host's full name: seconds, where that
        # does not resolve.
        return Event("paceline", EventSource.AGENT)


class _Rendezvous(RendezvousHandler):
    """What the agent asks about the nodes: all are there and stay, or the launch ends."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = self._meeting
        store = PrefixStore("agents", meeting.store)
        place = RendezvousStoreInfo(meeting.host, meeting.port)
        return RendezvousInfo(store, meeting.index, meeting.num_nodes, place)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return self._meeting.run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: the meeting is the launcher's."""

    def shutdown(self) -> bool:
        return True


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
