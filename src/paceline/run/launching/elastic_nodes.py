"""The machines of a launch that may come and go: their agents agree on generations through a store.

Each agent publishes a record with a heartbeat and what it knows of its workers, and reads the records of the others
several times a second, in a thread, because a broken link can block it. A generation is decided by whoever first writes
its number; there is no leader. A node that loses contact with the store ends its workers: the others go on without it,
and the same command lets it join again.

    over            the run has ended; the next launch at this address begins another
    node-I          the record of node I
    generation-N    the N-th generation, written once
    leave-M         member M is asked to leave
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.run.launching.nodes import (
    HEARTBEAT_S,
    POLL_S,
    Nodes,
    NodesError,
    open_store,
    worker_environment,
)
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure
from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.member import leave_key
from paceline.run.membership.roster import Report

# A node is lost after this long without a heartbeat.
LOST_S = 1.5
# How long the node with the store waits at its end for the others.
LEAVE_S = 30.0
# A store that is unreachable blocks the thread. It is lost after this long.
STORE_LOST_S = 3.0
# Silence that counts between two looks.
MAX_LOOK_S = 0.5


@dataclass(frozen=True)
class _Record:
    """What a node publishes. `result`: how its workers ended."""

    name: str
    num_workers: int
    options: Mapping[str, Any]
    report: Report = field(default_factory=Report)
    result: WorkerExit | None = None
    has_left: bool = False
    heartbeat: int = 0

    def to_json(self) -> str:
        result = None if self.result is None else asdict(self.result)
        return json.dumps({**self.__dict__, "report": self.report.to_dict(), "result": result})

    @classmethod
    def parse(cls, text: bytes) -> _Record:
        values = json.loads(text)
        result = None if values["result"] is None else WorkerExit.from_dict(values["result"])
        return cls(**{**values, "report": Report.from_dict(values["report"]), "result": result})


class _Silence:
    """How long nothing was heard. Only looks that were made in time count: on a busy machine this process may stand."""

    def __init__(self) -> None:
        self.hear()

    def hear(self) -> None:
        self.seconds = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> float:
        now_s = time.monotonic()
        self.seconds += min(now_s - self._looked_s, MAX_LOOK_S)
        self._looked_s = now_s
        return self.seconds


class ElasticNodes:
    """The nodes of a launch with `Nodes(min_num, max_num=...)`, as the agent of one of them sees them.

    The constructor waits until `nodes.num` nodes have joined, or a run is going on at the address. Then `first` is the
    generation that this node begins with: its workers are in it, or join later. `decided`, `propose` and `share` are
    the agent's part in the agreement, see `Supervisor`.
    """

    num_restarts = 0  # there is no restart of all workers

    def __init__(self, nodes: Nodes, num_workers: int, options: Mapping[str, Any]) -> None:
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._nodes = nodes
        self._store_error = ""
        self._silence: dict[int, _Silence] = {}  # since the record of a peer last changed; of the thread
        self._num_heartbeats = 0
        self._proposed: list[Generation] = []
        # Replaced by the thread, and never modified.
        self._peers: dict[int, _Record] = {}
        self._decided: tuple[Generation, ...] = ()
        self._asked: frozenset[Member] = frozenset()
        self._has_news = threading.Event()
        shared_store, self._hosts_store, address = open_store(nodes)
        self._store, self.run_id = _run_of(shared_store, nodes)
        self.index = int(self._store.add("arrived", 1)) - 1
        self.first_rank = int(self._store.add("workers", num_workers)) - num_workers  # numbers of workers, for messages
        self.name = f"{socket.gethostname()} ({address})"
        self.environment = worker_environment(nodes, address, shared_store.port)
        self.num_workers_here = num_workers
        self._own = _Record(self.name, num_workers, options)
        self._store_silence = _Silence()
        self._thread = threading.Thread(target=self._exchange_all, name="paceline-nodes", daemon=True)
        self._thread.start()
        try:
            self._wait_for_first(deadline_s)
            self._wait_for_place()
        except BaseException:
            self.close()
            raise
        self.first: Generation = [*self._decided][-1]

    @property
    def num_nodes(self) -> int:
        return 1 + len(self._peers)

    @property
    def num_workers(self) -> int:
        return len(self._decided[-1].members)

    def _wait_for_first(self, deadline_s: float) -> None:
        """Wait for the first generation, and decide on it when enough nodes have come."""
        nodes = self._nodes
        while not self._decided:
            self._check_options()
            if reason := self.lost():
                raise NodesError(f"the nodes could not connect: {reason}")
            records = self._records()
            if len(records) >= nodes.num and not self._proposed:
                self.propose(Generation.first({index: record.num_workers for index, record in records.items()}))
            if time.monotonic() > deadline_s:
                names = ", ".join(record.name for record in records.values())
                raise NodesError(
                    f"{len(records)} of at least {nodes.num} nodes joined at {nodes.address} within join_timeout="
                    f"{nodes.join_timeout_s:g} s: {names}. Start the same command on the others, with the same secret "
                    "or none"
                )
            time.sleep(POLL_S)

    def _wait_for_place(self) -> None:
        """Raise if as many nodes as allowed take part. One that was lost is known after LOST_S."""
        deadline_s = time.monotonic() + 2 * LOST_S
        while len(self._peers) - len(self._silent()) >= self._nodes.max_num:
            if time.monotonic() > deadline_s:
                raise NodesError(
                    f"{self._nodes.max_num} nodes take part at {self._nodes.address}: choose a larger maximum"
                )
            time.sleep(POLL_S)

    def _check_options(self) -> None:
        options = self._own.options
        if other := next((peer for peer in self._peers.values() if peer.options != options), None):
            raise NodesError(
                f"node {other.name} was started with {other.options}, this one with {options}: use the same command on "
                "every node"
            )

    # The agreement

    def share(self, own: Report) -> tuple[dict[int, Report], dict[int, str]]:
        """Publish what this node knows. Returns the reports of all nodes, and the nodes that do not answer."""
        if own != self._own.report:
            self._own = replace(self._own, report=own)
            self._has_news.set()
        return {index: record.report for index, record in self._records().items()}, self._silent()

    def propose(self, generation: Generation) -> None:
        self._proposed = [*self._proposed, generation]
        self._has_news.set()

    def asked_to_leave(self) -> frozenset[Member]:
        """The members of this node that a worker of another node has asked to leave."""
        return self._asked

    def decided(self, after: int) -> list[Generation]:
        """The generations that were decided after number `after`."""
        return [generation for generation in self._decided if generation.number > after]

    @property
    def has_others(self) -> bool:
        """Whether the run can go on without this node."""
        members = self._decided[-1].members if self._decided else ()
        gone = self._silent()
        return not self._hosts_store and any(m.node != self.index and m.node not in gone for m in members)

    # How the launch ends

    def publish(self, result: WorkerExit) -> None:
        """Tell the others how the workers of this node have ended. Only the first result counts."""
        if self._own.result is None:
            self._own = replace(self._own, result=replace(result, is_final=True))
            self._has_news.set()

    def wait_for_results(self) -> bool:
        """Whether all workers are restarted: never."""
        return False

    def peer_failed(self) -> bool:
        """Whether this node's workers must end because of another node, or because the store is lost."""
        results = [peer.result for peer in self._peers.values() if peer.result is not None]
        return any(each.kind == ExitKind.FAILED for each in results) or bool(self.lost())

    def lost(self) -> str:
        """Why this node has lost contact with the run; empty if it has not."""
        silence_s = self._store_silence.look()
        if self._store_error or silence_s > STORE_LOST_S:
            reason = self._store_error or f"no answer for {silence_s:.1f} s"
            again = "the others go on without this node; start the same command again to rejoin"
            return f"lost contact with the rendezvous at {self._nodes.address}: {reason}; {again}"
        return ""

    def first_failure(self) -> WorkerExit | None:
        results = [record.result for record in self._records().values() if record.result is not None]
        failed = [each for each in results if each is self._own.result or each.kind == ExitKind.FAILED]
        failure, lost = first_failure(failed), self.lost()
        if failure is None and self._own.result is not None and self._own.result.kind == ExitKind.ENDED and lost:
            return WorkerExit(ExitKind.COMMUNICATION, self.first_rank, lost)
        return None if failure is None else failure.with_notes(lost)

    def close(self) -> None:
        """Leave, and let the others know. The node with the store leaves last."""
        self._own = replace(self._own, has_left=True)
        self._has_news.set()
        self._thread.join(LEAVE_S if self._hosts_store else STORE_LOST_S)

    # In the thread, and what it has read

    def _records(self) -> dict[int, _Record]:
        """Of all nodes that have joined, in the order of their indices."""
        return dict(sorted({**self._peers, self.index: self._own}.items()))

    def _silent(self) -> dict[int, str]:
        """The nodes that do not answer, and those that have left."""
        if self._store_silence.look() > LOST_S:
            return {}  # it is this node that hears nothing
        silent = {}
        for index, peer in self._peers.items():
            if peer.has_left:
                silent[index] = f"node {peer.name} has left"
            elif self._silence[index].seconds > LOST_S:
                silent[index] = f"node {peer.name} sent no heartbeat for {LOST_S:g} s: it is down, or the link to it"
        return silent

    def _exchange_all(self) -> None:
        try:
            while not self._exchange():
                self._has_news.wait(HEARTBEAT_S)
                self._has_news.clear()
        except (RuntimeError, ValueError) as error:  # what torch's stores raise
            self._store_error = str(error).partition("\n")[0]

    def _exchange(self) -> bool:
        """Write the own record, read the others' and the decisions. Returns True if that was the last time."""
        store, proposed = self._store, self._proposed
        self._num_heartbeats += 1
        own = replace(self._own, heartbeat=self._num_heartbeats)
        store.set(f"node-{self.index}", own.to_json())
        self._read_decisions(proposed)
        for index in range(int(store.add("arrived", 0))):
            if index != self.index and (index in self._peers or store.check([f"node-{index}"])):
                record = _Record.parse(store.get(f"node-{index}"))
                silence = self._silence.setdefault(index, _Silence())
                if index in self._peers and record.heartbeat == self._peers[index].heartbeat:
                    silence.look()
                else:
                    silence.hear()
                    self._peers = {**self._peers, index: record}
        here = own.report.entered
        self._asked = frozenset(member for member in here if store.check([leave_key(member)]))
        self._store_silence.hear()
        if not own.has_left:
            return False
        staying = [index for index, peer in self._peers.items() if not peer.has_left]
        is_last = all(self._silence[index].seconds > STORE_LOST_S for index in staying)
        if is_last:
            store.set("over", "1")
        return is_last or not self._hosts_store

    def _read_decisions(self, proposed: list[Generation]) -> None:
        while True:
            number = len(self._decided)
            key = f"generation-{number}"
            if not self._store.check([key]):
                if (own := next((each for each in proposed if each.number == number), None)) is None:
                    return
                self._store.compare_set(key, "", own.to_json())
            self._decided = (*self._decided, Generation.from_json(self._store.get(key)))


def _run_of(shared_store: Any, nodes: Nodes) -> tuple[Any, str]:
    """The part of the store for the current run, and its name. A store that outlives a run serves the next one."""
    from paceline.comm.rendezvous import nodes_purpose, private_store

    secret = nodes.secret()
    if secret is None:
        print(nodes.no_secret_warning, file=sys.stderr)
    number = 0
    while True:
        run_id = f"run-{number}"
        store = private_store(shared_store, secret, nodes_purpose(run_id))
        if not store.check(["over"]):
            return store, run_id
        number += 1
