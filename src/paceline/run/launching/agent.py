"""The agent of a node: starts its workers, watches them, ends all of them when one fails, and restarts them."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import WorkerError
from paceline.core.rank_variables import STORE_VARIABLE
from paceline.run.launching import worker
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.output import output_file
from paceline.run.launching.rendezvous import NodeRendezvous
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure, worker_file
from paceline.run.saving.stopping import Stopped

GRACE_S = 3.0  # between SIGTERM and SIGKILL
# When a worker fails, the others notice a broken exchange before its report arrives. If all reports so far are of
# broken exchanges, wait this long for the report of the cause.
CAUSE_WAIT_S = 2.0
POLL_S = 0.1

# Exits after which the workers are not restarted.
_FINAL = {ExitKind.STOPPED, ExitKind.ABORTED, ExitKind.NO_PROGRESS, ExitKind.INTERRUPTED}
# Exits that are the result of a node even if its command received a signal.
_REPORTED = {ExitKind.FAILED, ExitKind.DIED, ExitKind.STOPPED}


class Agent:
    """Runs the workers of one launch on this node. They are gone after the `with` block.

    `folder` is shared with the launcher and the workers, see `worker.py`. When a worker fails, on any node, all workers
    of all nodes are restarted, up to `max_restarts` times. `logs` is the folder of the workers' output, if it goes to
    files. `on_poll` is called several times a second; the workers are killed once it returns True.
    """

    def __init__(
        self,
        folder: Path,
        server: ForkServer,
        rendezvous: NodeRendezvous,
        max_restarts: int = 0,
        logs: Path | None = None,
        on_poll: Callable[[], bool] = lambda: False,
    ) -> None:
        self._launch_folder = folder
        self._server = server
        self._rendezvous = rendezvous
        self._max_restarts = max_restarts
        self._logs = logs
        self._on_poll = on_poll
        self._num_restarts = 0
        self._exits: dict[int, WorkerExit] = {}  # by rank, of the current start
        self._sent: signal.Signals | None = None  # the last signal that the agent sent to the running workers
        self._is_stopping = False
        self._reserved_port: socket.socket | None = None

    def __enter__(self) -> Agent:
        return self

    def run(self) -> BaseException | None:
        """Run the workers until they have ended for good on all nodes. Returns the first failure, or None."""
        while True:
            self._start()
            self._watch()
            self._rendezvous.publish(self._result())
            may_restart, failure = self._rendezvous.wait_for_results(), self._rendezvous.first_failure()
            if not may_restart:
                return _to_error(failure)
            self._server.kill()  # what the ended workers left running
            reason = failure.message.partition("\n")[0] if failure is not None else "the workers ended"
            self._num_restarts += 1
            print(f"paceline: restart {self._num_restarts}: {reason}", file=sys.stderr)
            self._rendezvous.begin_next_start()

    def stop(self) -> BaseException | None:
        """Ask the workers to end, and wait for those that are saving. Returns what they report, or None."""
        self._is_stopping = True
        self._terminate()
        deadline_s = time.monotonic() + GRACE_S
        while self._server.pids and (running := self._server.running):
            is_saving = any(worker_file(self._folder, "heard", rank).exists() for rank in running)
            if time.monotonic() > deadline_s and (self._failures() or not is_saving):
                break
            self._poll()
        self._read_exits()  # if an interrupt came between an exit and its report
        return _to_error(first_failure(self._exits.values()))

    def __exit__(self, *_: object) -> None:
        """End the workers if they still run, and let the other nodes know."""
        try:
            if self._server.running and not self._is_stopping:
                self.stop()
        finally:  # a second Ctrl-C comes straight here
            self._is_stopping = True
            self._sent = signal.SIGKILL
            self._server.kill()
            self._rendezvous.publish(self._result())
            if self._reserved_port is not None:
                self._reserved_port.close()

    @property
    def _folder(self) -> Path:
        """Where the workers of the current start report."""
        return worker.start_folder(self._launch_folder, self._num_restarts)

    def _start(self) -> None:
        self._exits, self._sent = {}, None
        first_rank, here = self._rendezvous.first_rank, self._rendezvous.num_workers_here
        shared = self._shared_environment()
        self._server.start(
            {
                rank: {**shared, "RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(rank - first_rank)}
                for rank in range(first_rank, first_rank + here)
            }
        )

    def _shared_environment(self) -> dict[str, str]:
        """The variables that torchrun sets for its workers, but for the ranks."""
        nodes = self._rendezvous
        values: dict[str, Any] = {
            "WORLD_SIZE": nodes.num_workers,
            "LOCAL_WORLD_SIZE": nodes.num_workers_here,
            "GROUP_RANK": nodes.index,
            "GROUP_WORLD_SIZE": nodes.num_nodes,
            "ROLE_NAME": "worker",
            "ROLE_WORLD_SIZE": nodes.num_workers,
            "TORCHELASTIC_RUN_ID": nodes.run_id,
            "TORCHELASTIC_RESTART_COUNT": self._num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            **nodes.environment,
        }
        if nodes.num_nodes == 1:
            # Paceline's own rendezvous is a file. The port is for process groups of the user, and only reserved: if the
            # user calls init_process_group(), torch opens it on rank 0.
            if self._reserved_port is not None:
                self._reserved_port.close()
            self._reserved_port = socket.socket()
            self._reserved_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch: both may bind it
            self._reserved_port.bind(("127.0.0.1", 0))
            host, port = self._reserved_port.getsockname()
            store = self._folder / worker.STORE_FILE
            values |= {STORE_VARIABLE: store, "MASTER_ADDR": host, "MASTER_PORT": port}
        return {name: str(value) for name, value in values.items()}

    def _watch(self) -> None:
        """Return when this node's workers have ended: by themselves, or because a worker of any node failed."""
        terminate_at_s = kill_at_s = float("inf")
        while self._server.running:
            now_s = time.monotonic()
            if now_s > kill_at_s:
                self._sent = signal.SIGKILL
                self._server.kill()
            elif kill_at_s == float("inf") and (self._failures() or self._rendezvous.peer_failed()):
                wait_s = CAUSE_WAIT_S if self._failures() == {ExitKind.COMMUNICATION} else 0.0
                terminate_at_s = min(terminate_at_s, now_s + wait_s)
                if now_s >= terminate_at_s:
                    self._terminate()
                    kill_at_s = now_s + GRACE_S
            self._poll()

    def _poll(self) -> None:
        self._server.poll(POLL_S)
        self._read_exits()
        if self._on_poll():
            self._server.kill()

    def _read_exits(self) -> None:
        for rank, exit_code in self._server.exit_codes.items():
            if rank not in self._exits:
                self._exits[rank] = self._read_exit(rank, exit_code)

    def _read_exit(self, rank: int, exit_code: int) -> WorkerExit:
        ended = WorkerExit.read(self._folder, rank, exit_code)
        has_no_report = ended.kind in (ExitKind.DIED, ExitKind.TERMINATED)
        sent = self._sent
        is_ours = sent == signal.SIGKILL or (sent is not None and (self._is_stopping or exit_code == -sent))
        return WorkerExit(ExitKind.ENDED, rank) if has_no_report and is_ours else ended

    def _failures(self) -> set[ExitKind]:
        """The failures so far that are a reason to end the other workers. A stop is not: all workers stop."""
        return {each.kind for each in self._exits.values() if each.is_failure} - {ExitKind.STOPPED}

    def _terminate(self) -> None:
        self._sent = signal.SIGTERM
        self._server.terminate()

    def _result(self) -> WorkerExit:
        """How the current start ended on this node."""
        nodes, kinds = self._rendezvous, [each.kind for each in self._exits.values()]
        if kinds == [ExitKind.DONE] * nodes.num_workers_here:
            return WorkerExit(ExitKind.DONE, nodes.first_rank, is_final=True)
        result = first_failure(self._exits.values()) or WorkerExit(ExitKind.ENDED, nodes.first_rank)
        if self._is_stopping and result.kind not in _REPORTED:
            message = f"the command was ended on node {nodes.name}"
            result = WorkerExit(ExitKind.CANCELLED, nodes.first_rank, message)
        elif result.is_failure:
            result = result.with_notes(self._where(result.rank))
        is_final = self._num_restarts == self._max_restarts or self._is_stopping or not _FINAL.isdisjoint(kinds)
        return replace(result, is_final=is_final)

    def _where(self, rank: int) -> str:
        """Where to find more about a worker."""
        node = f"rank {rank} ran on node {self._rendezvous.name}" if self._rendezvous.num_nodes > 1 else ""
        output = f"the output of rank {rank} is in {output_file(self._logs, rank, 'err')}" if self._logs else ""
        return "; ".join(filter(None, [node, output]))


def _to_error(failure: WorkerExit | None) -> BaseException | None:
    if failure is None:
        return None
    if failure.kind == ExitKind.INTERRUPTED:
        return KeyboardInterrupt()
    if failure.kind == ExitKind.STOPPED:
        return Stopped(failure.step)
    return WorkerError(failure.message, rank=failure.rank, traceback_text=failure.traceback_text)
