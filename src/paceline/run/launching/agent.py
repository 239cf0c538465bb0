"""The agent of a node: starts its workers, watches them, ends all of them when one fails, and restarts them."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import WorkerError
from paceline.core.notice import notice
from paceline.core.processes import (
    FIRST_SIZE_VARIABLE,
    MEMBER_VARIABLE,
    MEMBERSHIP_VARIABLE,
    NUMBER_VARIABLE,
    STORE_VARIABLE,
)
from paceline.observe.formats import short_path
from paceline.run.launching import worker
from paceline.run.launching.elastic_nodes import ElasticNodes
from paceline.run.launching.fork_server import ForkServer
from paceline.run.launching.nodes import NodeRendezvous
from paceline.run.launching.output import output_file
from paceline.run.launching.supervisor import Elastic, SingleNodeConsensus, Supervisor
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure, reserve_space, worker_file
from paceline.run.membership.generation import Generation, Member
from paceline.run.saving.stopping import Stopped

GRACE_S = 3.0  # between SIGTERM and SIGKILL
# Time for the workers to respond to a signal that was sent to all processes of a job: a second one would end them.
RESPONSE_S = 0.2
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

    With `elastic`, workers that die leave the run and the others continue, see `supervisor.py`. All workers are
    restarted only if too few are left, or if one dies before all have set themselves up.
    """

    def __init__(
        self,
        folder: Path,
        server: ForkServer,
        nodes: NodeRendezvous | ElasticNodes,
        max_restarts: int = 0,
        logs: Path | None = None,
        on_poll: Callable[[], bool] = lambda: False,
        elastic: Elastic | None = None,
    ) -> None:
        self._launch_folder = folder
        self._server = server
        self._nodes = nodes
        self._max_restarts = max_restarts
        self._logs = logs
        self._on_poll = on_poll
        self._elastic = elastic
        self._supervisor: Supervisor | None = None  # of the current start
        self._exits: dict[int, WorkerExit] = {}  # by rank, of the current start
        self._sent: signal.Signals | None = None  # the last signal to the running workers of the current start
        self._is_stopping = False
        self._shared_environment: dict[str, Any] = {}  # of all workers of the current start
        self._reserved_port = socket.socket()

    def __enter__(self) -> Agent:
        return self

    def run(self) -> BaseException | None:
        """Run the workers until they have ended for good on all nodes. Returns the first failure, or None."""
        while True:
            self._start()
            self._watch()
            self._nodes.publish(self._result())
            may_restart, failure = self._nodes.wait_for_results(), self._nodes.first_failure()
            if not may_restart:
                return _to_error(failure)
            self._server.kill()  # what the ended workers left running
            self._nodes.num_restarts += 1
            reason = failure.message.partition("\n")[0] if failure is not None else "the workers ended"
            notice(f"restart {self._nodes.num_restarts}: {reason}")

    def stop(self, cause: str | None = None, *, is_shared: bool = False) -> BaseException | None:
        """Ask the workers to end, and wait while they are saving. Returns what they report, or None.

        cause: printed if the workers finish their step instead of ending immediately. is_shared: the signal that ends
        this process may have been sent to the workers too. Ctrl-C is not, because they are not the terminal's.
        """
        if not (self._supervisor is not None and self._nodes.has_others and self._leave(self._supervisor)):
            self._is_stopping = True
            if cause is not None and (self._folder / worker.STOPPABLE_FILE).exists():
                notice(cause)
            if is_shared:
                time.sleep(RESPONSE_S)
            if self._supervisor is not None:
                self._supervisor.end_replacing()
            self._send(signal.SIGTERM)
            deadline_s = time.monotonic() + GRACE_S
            while self._server.pids and self._server.running:
                if time.monotonic() > deadline_s and (self._failures() or not self._saving):
                    break
                self._poll()
        self._poll(timeout_s=0)  # if an interrupt came between an exit and its report
        # Workers that ended immediately broke the exchanges of others, which is no failure.
        exits = [each for each in self._exits.values() if each.kind != ExitKind.COMMUNICATION]
        return _to_error(first_failure(exits))

    @property
    def _saving(self) -> list[int]:
        """The running workers that received a signal and are saving."""
        return [rank for rank in self._server.running if worker_file(self._folder, "heard", rank).exists()]

    def _leave(self, supervisor: Supervisor) -> bool:
        """Let the workers of this node leave the run, which continues. Returns whether they have ended.

        They cannot leave if all others do.
        """
        supervisor.leave()
        while self._server.running and not self._failures() and not self._nodes.peer_failed():
            if supervisor.are_all_leaving:
                return False
            self._poll()
        return not self._server.running

    def __exit__(self, *_: object) -> None:
        """End the workers that still run, and notify the other nodes."""
        try:
            if self._server.running and not self._is_stopping:
                self.stop()
        finally:  # also after a second Ctrl-C
            self._is_stopping = True
            self._send(signal.SIGKILL)
            self._nodes.publish(self._result())
            self._reserved_port.close()

    @property
    def _folder(self) -> Path:
        """The folder in which the workers of the current start report."""
        return worker.start_folder(self._launch_folder, self._nodes.num_restarts)

    def _start(self) -> None:
        self._exits, self._sent = {}, None
        reserve_space(self._folder)
        nodes = self._nodes
        members = [Member(nodes.index, slot) for slot in range(nodes.num_workers_here)]
        shared: dict[str, Any] = {  # as torchrun sets them
            "WORLD_SIZE": nodes.num_workers,
            "LOCAL_WORLD_SIZE": nodes.num_workers_here,
            "GROUP_RANK": nodes.index,
            "GROUP_WORLD_SIZE": nodes.num_nodes,
            "ROLE_NAME": "worker",
            "ROLE_WORLD_SIZE": nodes.num_workers,
            "TORCHELASTIC_RUN_ID": nodes.run_id,
            "TORCHELASTIC_RESTART_COUNT": nodes.num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            **(nodes.environment or self._rendezvous_of_one_node()),
        }
        if self._elastic is not None:
            own_only = SingleNodeConsensus(Generation.first({0: nodes.num_workers_here}))
            consensus = nodes if isinstance(nodes, ElasticNodes) else own_only
            self._supervisor = Supervisor(
                self._elastic, self._folder, self._server, consensus, members, nodes.first_rank, self._replace
            )
            shared[MEMBERSHIP_VARIABLE] = self._folder
            shared[FIRST_SIZE_VARIABLE] = len(consensus.decided(-1)[0].members)
        self._shared_environment = shared
        self._server.start({nodes.first_rank + member.slot: self._environment(member) for member in members})

    def _environment(self, member: Member) -> dict[str, str]:
        rank = self._nodes.first_rank + member.slot
        own = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": member.slot, MEMBER_VARIABLE: member}
        own[NUMBER_VARIABLE] = rank
        for size in ("WORLD_SIZE", "ROLE_WORLD_SIZE"):  # until a worker that joins knows its rank
            own[size] = max(rank + 1, self._shared_environment[size])
        return {name: str(value) for name, value in {**self._shared_environment, **own}.items()}

    def _replace(self, slot: int, member: Member) -> None:
        """Start a replacement of a worker that has left."""
        rank = self._nodes.first_rank + slot
        for kind in ("report", "heard", "stack"):
            worker_file(self._folder, kind, rank).unlink(missing_ok=True)
        del self._exits[rank]
        self._server.replace(rank, self._environment(member))

    def _rendezvous_of_one_node(self) -> dict[str, Any]:
        """Paceline's own store is a folder. The port is reserved for the user's process groups.

        If the user calls init_process_group(), torch opens it on rank 0.
        """
        self._reserved_port.close()
        self._reserved_port = socket.socket()
        self._reserved_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch: both may bind it
        self._reserved_port.bind(("127.0.0.1", 0))
        host, port = self._reserved_port.getsockname()
        return {STORE_VARIABLE: self._folder / worker.STORE_FOLDER, "MASTER_ADDR": host, "MASTER_PORT": port}

    def _watch(self) -> None:
        """Wait until this node's workers have ended. If a worker of any node fails, end them."""
        terminate_at_s = kill_at_s = float("inf")
        while self._server.running:
            now_s = time.monotonic()
            if now_s > kill_at_s:
                self._send(signal.SIGKILL)
            elif self._sent is None and (self._failures() or self._nodes.peer_failed()):
                wait_s = CAUSE_WAIT_S if self._failures() == {ExitKind.COMMUNICATION} else 0.0
                terminate_at_s = min(terminate_at_s, now_s + wait_s)
                if now_s >= terminate_at_s:
                    self._send(signal.SIGTERM)
                    kill_at_s = now_s + GRACE_S
            self._poll()

    def _send(self, number: signal.Signals) -> None:
        self._sent = number
        if number == signal.SIGTERM:
            with suppress(OSError):  # workers then print nothing about the signal
                (self._folder / worker.ANNOUNCED_FILE).touch()
            self._server.terminate(exclude=self._saving)  # a second signal would end them immediately
        else:
            self._server.kill()

    @property
    def _supervising(self) -> Supervisor | None:
        """The supervisor, if the others continue without a worker that dies; also while they stop."""
        is_active = self._sent is None or (self._is_stopping and self._sent == signal.SIGTERM)
        return self._supervisor if is_active else None

    def _poll(self, timeout_s: float = POLL_S) -> None:
        self._server.poll(timeout_s)
        supervisor = self._supervising
        for rank, exit_code in self._server.exit_codes.items():
            if rank not in self._exits:
                ended = self._read_exit(rank, exit_code)
                if supervisor is not None:
                    ended = supervisor.note_exit(rank - self._nodes.first_rank, ended)
                self._exits[rank] = ended
        if supervisor is not None and not self._failures():
            supervisor.poll()
            may_be_over = bool(self._exits) or self._nodes.num_nodes > 1
            if may_be_over and supervisor.is_over and self._server.running:
                self._send(signal.SIGKILL)
        if self._on_poll():
            self._server.kill()

    def _read_exit(self, rank: int, exit_code: int) -> WorkerExit:
        ended = WorkerExit.read(self._folder, rank, exit_code)
        has_no_report = ended.kind in (ExitKind.DIED, ExitKind.TERMINATED)
        is_stopped = self._is_stopping
        if self._supervising is not None:  # others may save without a worker that was saving, or was killed
            is_stopped = exit_code >= 0 and not worker_file(self._folder, "heard", rank).exists()
        is_ours = self._sent == signal.SIGKILL or (self._sent and (is_stopped or exit_code == -self._sent))
        return WorkerExit(ExitKind.ENDED, rank) if has_no_report and is_ours else ended

    def _failures(self) -> set[ExitKind]:
        """The kinds of failures that require ending the other workers. A stop does not: all workers stop."""
        return {each.kind for each in self._exits.values() if each.is_failure} - {ExitKind.STOPPED}

    def _result(self) -> WorkerExit:
        """How the current start ended on this node."""
        nodes, kinds = self._nodes, [each.kind for each in self._exits.values()]
        is_done = set(kinds) <= {ExitKind.DONE, ExitKind.LEFT, ExitKind.ENDED} and ExitKind.DONE in kinds
        if len(kinds) == nodes.num_workers_here and is_done:
            return WorkerExit(ExitKind.DONE, nodes.first_rank, is_final=True)
        result = first_failure(self._exits.values()) or WorkerExit(ExitKind.ENDED, nodes.first_rank)
        if self._is_stopping and result.kind not in _REPORTED:
            result = WorkerExit(ExitKind.CANCELLED, nodes.first_rank, f"the command was ended on node {nodes.name}")
        elif result.is_failure:
            where = [f"rank {result.rank} ran on node {nodes.name}"] if nodes.num_nodes > 1 else []
            if self._logs is not None:
                path = short_path(output_file(self._logs, result.rank, "err"))
                where.append(f"the output of rank {result.rank} is in {path}")
            result = result.with_notes("; ".join(where))
        is_final = nodes.num_restarts == self._max_restarts or self._is_stopping or not _FINAL.isdisjoint(kinds)
        # Where max_restarts replaces dead workers, an exception of the user's is not a death: it would come again.
        is_final |= self._elastic is not None and ExitKind.FAILED in kinds and ExitKind.DIED not in kinds
        return replace(result, is_final=result.is_final or is_final)


def _to_error(failure: WorkerExit | None) -> BaseException | None:
    if failure is None:
        return None
    if failure.kind == ExitKind.INTERRUPTED:
        return KeyboardInterrupt()
    if failure.kind == ExitKind.STOPPED:
        return Stopped(failure.step)
    return WorkerError(failure.message, rank=failure.rank, traceback_text=failure.traceback_text)
