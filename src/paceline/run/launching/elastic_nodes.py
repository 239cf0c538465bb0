"""The nodes of a launch that may come and go: their agents agree on generations through a store.

Each node publishes a record with the state of its workers. The first node that writes a generation's number decides it;
there is no leader. A node that loses contact with the store ends its workers: the others continue without it, and the
same command lets it join again.

    over            the run has ended; the next launch at this address begins another
    launched        when the first node came
    node-I          the record of node I
    generation-N    the N-th generation, written once
    leave-M         member M is asked to leave
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.core.notice import notice
from paceline.core.processes import LAUNCHED_VARIABLE
from paceline.run.launching.heartbeats import Heartbeats, Record
from paceline.run.launching.nodes import POLL_S, Nodes, NodesError, open_store, wait_for_nodes, worker_environment
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure
from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.member import leave_key
from paceline.run.membership.roster import Report

# Exits on one node that end the run on all. The others may be due to a lost link.
_ENDS_RUN = {ExitKind.FAILED, ExitKind.DIED, ExitKind.ABORTED}
# A node is lost after this long without a heartbeat.
LOST_S = 1.5
# The store is lost after this long without an answer.
STORE_LOST_S = 3.0
NOTICE_S = 5.0  # usually all nodes end within this time


class ElasticNodes:
    """The nodes of a launch with `Nodes(min_num, max_num=...)`, seen from one of them. It is also their `Consensus`.

    The constructor waits until `nodes.num` nodes have joined, or a run exists at the address. Then `first` is the
    generation that this node begins with: its workers are in it, or join later.
    """

    num_restarts = 0  # all workers are never restarted together

    def __init__(self, nodes: Nodes, num_workers: int, options: Mapping[str, Any]) -> None:
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._nodes = nodes
        self._proposed: Generation | None = None
        # Replaced by the thread, and never modified.
        self._decided: tuple[Generation, ...] = ()
        self._asked: frozenset[Member] = frozenset()
        shared_store, self._hosts_store, address = open_store(nodes)
        self._store, self.run_id = _run_of(shared_store, nodes)
        self.index = int(self._store.add("arrived", 1)) - 1
        self.first_rank = int(self._store.add("workers", num_workers)) - num_workers  # numbers of workers, for messages
        self.name = f"{socket.gethostname()} ({address})"
        launched = self._store.compare_set("launched", "", str(time.time())).decode()
        self.environment = {**worker_environment(nodes, address, shared_store.port), LAUNCHED_VARIABLE: launched}
        self.num_workers_here = num_workers
        self._heartbeats = Heartbeats(
            self._store,
            self.index,
            Record(name=self.name, num_workers=num_workers, options=options),
            lost_s=LOST_S,
            hosts_store=self._hosts_store,
            count_nodes=lambda: int(self._store.add("arrived", 0)),
            also=self._exchange,
        )
        try:
            wait_for_nodes(nodes, self._heartbeats, self.lost, self._is_first_decided, deadline_s)
            self._wait_for_place()
        except BaseException:
            self.close()
            raise
        self.first = self._newest

    @property
    def num_nodes(self) -> int:
        return len(self._heartbeats.records)

    @property
    def _newest(self) -> Generation:
        return self._decided[-1]

    @property
    def num_workers(self) -> int:
        return len(self._newest.members)

    def _is_first_decided(self) -> bool:
        """Whether there is a generation. Propose the first one when enough nodes have come."""
        records = self._heartbeats.records
        if not self._decided and self._proposed is None and len(records) >= self._nodes.num:
            self.propose(Generation.first({index: record.num_workers for index, record in records.items()}))
        return bool(self._decided)

    def _wait_for_place(self) -> None:
        """Raise if the maximum of nodes takes part. The loss of a node is known after LOST_S."""
        deadline_s = time.monotonic() + 2 * LOST_S
        while len(self._heartbeats.peers) - len(self._silent()) >= self._nodes.max_num:
            if time.monotonic() > deadline_s:
                raise NodesError(
                    f"{self._nodes.max_num} nodes take part at {self._nodes.address}: choose a larger maximum"
                )
            time.sleep(POLL_S)

    # The consensus

    def exchange_reports(self, own: Report) -> tuple[dict[int, Report], dict[int, str]]:
        """Publish this node's report. Returns the reports of all nodes, and the lost nodes with reasons."""
        if own != self._heartbeats.own.report:
            self._heartbeats.publish(report=own)
        return {index: record.report for index, record in self._heartbeats.records.items()}, self._silent()

    def propose(self, generation: Generation) -> None:
        self._proposed = generation
        self._heartbeats.wake()

    def asked_to_leave(self) -> frozenset[Member]:
        """The members of this node that a worker of another node has asked to leave."""
        return self._asked

    def decided(self, after: int) -> list[Generation]:
        """The decided generations with numbers above `after`."""
        return list(self._decided[after + 1 :])

    @property
    def has_others(self) -> bool:
        """Whether the run can continue without this node."""
        return not self._hosts_store and not self._other_nodes <= self._silent().keys()

    @property
    def _other_nodes(self) -> set[int]:
        """The nodes of the other members."""
        return {member.node for member in self._newest.members} - {self.index}

    # How the launch ends

    def publish(self, result: WorkerExit) -> None:
        """Publish how the workers of this node ended. Only the first result counts."""
        if not self._heartbeats.own.results:
            self._heartbeats.publish(results={0: replace(result, is_final=True)})

    def wait_for_results(self) -> bool:
        """Whether all workers can be restarted: never. The node with the store waits until the others have left."""
        notice_at_s = time.monotonic() + NOTICE_S
        while self._hosts_store and not self._heartbeats.are_others_gone and not self.lost():
            if time.monotonic() > notice_at_s:
                notice("the workers of this node have ended: it keeps the rendezvous until the other nodes have ended")
                notice_at_s = float("inf")
            time.sleep(POLL_S)
        return False

    def peer_failed(self) -> bool:
        """Whether this node's workers must end because of another node, or because the store is lost."""
        return any(each.kind in _ENDS_RUN for each in self._results.values()) or bool(self.lost())

    @property
    def _results(self) -> dict[int, WorkerExit]:
        """By node."""
        return {index: record.results[0] for index, record in self._heartbeats.records.items() if record.results}

    def lost(self) -> str:
        """Why this node has lost contact with the run; empty if it has not."""
        error, silence_s = self._heartbeats.store_error, self._heartbeats.store_silence_s
        if error or silence_s > STORE_LOST_S:
            reason = error or f"no answer for {silence_s:.1f} s"
            again = "the others continue without this node; start the same command again to rejoin"
            return f"lost contact with the rendezvous at {self._nodes.address}: {reason}; {again}"
        return ""

    def first_failure(self) -> WorkerExit | None:
        results, lost = self._results, self.lost()
        failure = first_failure(
            each for index, each in results.items() if index == self.index or each.kind in _ENDS_RUN
        )
        is_ended = self.index in results and results[self.index].kind == ExitKind.ENDED
        if failure is None and is_ended and (reason := lost or self._lost_run()):
            return WorkerExit(ExitKind.COMMUNICATION, self.first_rank, reason)
        return None if failure is None else failure.with_notes(lost)

    def _lost_run(self) -> str:
        """Why the run is lost if all nodes with its state are; empty if they are not, or have left."""
        silent = {i: why for i, why in self._silent().items() if not self._heartbeats.peers[i].has_left}
        if not (nodes := self._other_nodes) or not nodes <= silent.keys():
            return ""
        causes = "; ".join(silent[node] for node in sorted(nodes))
        return f"all workers with the state of the run are lost ({causes}): start the same command again"

    def close(self) -> None:
        """Leave, and notify the others. The node with the store leaves last."""
        self._heartbeats.leave(STORE_LOST_S)

    def _silent(self) -> dict[int, str]:
        """The nodes whose heartbeat stopped, and those that have left, with reasons."""
        heartbeats = self._heartbeats
        if heartbeats.store_silence_s > LOST_S:
            return {}  # this node is the one without contact
        left = {i: f"node {peer.name} has left" for i, peer in heartbeats.peers.items() if peer.has_left}
        silence = f"sent no heartbeat for {LOST_S:g} s: it is down, or the link to it"
        return {index: f"node {peer.name} {silence}" for index, peer in heartbeats.silent.items()} | left

    # In the thread

    def _exchange(self, heartbeats: Heartbeats) -> None:
        """Read decisions and requests. The last node to leave ends the run at this address."""
        self._read_decisions()
        own = heartbeats.own
        self._asked = frozenset(member for member in own.report.entered if self._store.check([leave_key(member)]))
        if own.has_left and heartbeats.are_others_gone:
            self._store.set("over", "1")

    def _read_decisions(self) -> None:
        while True:
            number, proposed = len(self._decided), self._proposed
            key = f"generation-{number}"
            if not self._store.check([key]):
                if proposed is None or proposed.number != number:
                    return
                self._store.compare_set(key, "", proposed.to_json())
            self._decided = (*self._decided, Generation.from_json(self._store.get(key)))


def _run_of(shared_store: Any, nodes: Nodes) -> tuple[Any, str]:
    """The store of the current run, and the run's name. A store that outlives a run serves the next one."""
    from paceline.comm.rendezvous import nodes_purpose, private_store

    secret, number = nodes.secret(), 0
    while True:
        run_id = f"run-{number}"
        store = private_store(shared_store, secret, nodes_purpose(run_id))
        if not store.check(["over"]):
            return store, run_id
        number += 1
