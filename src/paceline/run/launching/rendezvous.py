"""How the agents of a launch's nodes find each other, and what they know about each other.

Each agent publishes a small record in a store on the node with the address, and reads the records of all others several
times a second. A thread does this, because a broken link can block it. All nodes make the same decisions (to start, to
restart, to end), since each decides from the records of all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.secret import FILE_VARIABLE
from paceline.run.launching.nodes import Nodes, NodesError, interface_of, open_store
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure

HEARTBEAT_S = 0.2
LOST_S = 10.0  # without a heartbeat: the node is down, or the link to it
LEAVE_S = 30.0  # how long the node with the store waits at its end for the others
POLL_S = 0.02
_NO_SECRET = (
    "paceline: this run has no secret: anyone who can reach {address} can join or disturb it. Pass --secret-file, the "
    "same on every node; see docs/security.md"
)


@dataclass(frozen=True)
class _Record:
    """What a node publishes. `results` are of the current start and the one before, as a node can be one behind."""

    name: str
    num_workers: int
    run_id: str
    options: Mapping[str, Any]
    results: dict[int, WorkerExit] = field(default_factory=dict)
    has_left: bool = False
    heartbeat: int = 0

    @classmethod
    def parse(cls, text: bytes) -> _Record:
        values = json.loads(text)
        results = {int(start): WorkerExit.from_dict(result) for start, result in values.pop("results").items()}
        return cls(**values, results=results)


class NodeRendezvous:
    """All nodes of a launch, or this one alone. The constructor waits until all have joined, or raises `NodesError`.

    Ranks are numbered node by node, starting at the node with the address. `options` must be equal on all nodes. Of the
    methods only `wait_for_results` and `close` wait for other nodes, each with a time limit.
    """

    def __init__(self, nodes: Nodes, num_workers: int, run_id: str, options: Mapping[str, Any]) -> None:
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._nodes, self.num_nodes = nodes, nodes.num
        self._hosts_store, self.index, self.name = True, 0, socket.gethostname()
        self.environment: dict[str, str] = {}  # variables with which workers of several nodes connect
        self.num_restarts = 0  # incremented by the agent: results are those of the current start
        # The thread changes `_peers`, all others only `_own`. Both are replaced and never modified.
        self._peers: dict[int, _Record] = {}
        self._heard_s: dict[int, float] = {}  # when the record of a peer last changed
        self._heartbeat = 0
        self._store_error = ""
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None
        store = self._open_store() if nodes.num > 1 else None
        self._own = _Record(self.name, num_workers, run_id, options)
        if store is not None:
            self._thread = threading.Thread(
                target=self._exchange_all, args=(store,), name="paceline-nodes", daemon=True
            )
            self._thread.start()
            try:
                self._wait_for_all(deadline_s)
            except BaseException:
                self.close()
                raise
        records = self._records()
        sizes = [record.num_workers for record in records.values()]
        self.run_id = records[0].run_id
        self.num_workers, self.num_workers_here = sum(sizes), num_workers
        self.first_rank = sum(sizes[: self.index])  # the lowest rank on this node

    def _open_store(self) -> Any:
        from paceline.comm.rendezvous import private_store

        nodes, secret = self._nodes, self._nodes.secret()
        if secret is None:
            print(_NO_SECRET.format(address=nodes.address), file=sys.stderr)
        shared_store, self._hosts_store, own_address = open_store(nodes)
        store = private_store(shared_store, secret, "nodes")
        self.index = 0 if self._hosts_store else store.add("arrived", 1)
        if self.index >= nodes.num:
            raise NodesError(f"{nodes.num} nodes have already joined at {nodes.address}: choose another port")
        self.name = f"{self.name} ({own_address})"
        self.environment = {"MASTER_ADDR": nodes.host_and_port[0], "MASTER_PORT": str(shared_store.port)}
        self.environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if nodes.secret_file is not None:
            self.environment[FILE_VARIABLE] = str(Path(nodes.secret_file).absolute())
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(own_address)) is not None:
            # Gloo's default is the interface of the host's own name, which often is the loopback.
            self.environment["GLOO_SOCKET_IFNAME"] = interface
        return store

    def _wait_for_all(self, deadline_s: float) -> None:
        nodes, options = self._nodes, self._own.options
        while True:
            peers = self._peers
            if other := next((peer for peer in peers.values() if peer.options != options), None):
                raise NodesError(
                    f"node {other.name} was started with {other.options}, this one with {options}: use the same "
                    "command on every node"
                )
            if lost := self.lost():
                raise NodesError(f"the nodes could not connect: {lost}")
            if 1 + len(peers) == nodes.num:
                return
            if time.monotonic() > deadline_s:
                names = ", ".join(record.name for record in self._records().values())
                raise NodesError(
                    f"{1 + len(peers)} of {nodes.num} nodes joined at {nodes.address} within join_timeout="
                    f"{nodes.join_timeout_s:g} s: {names}. Start the same command on the others, with the same secret "
                    "or none"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave, and let the others know. The node with the store leaves last."""
        if self._thread is not None:
            self._own = replace(self._own, has_left=True)
            self._has_news.set()
            self._thread.join(LEAVE_S if self._hosts_store else LOST_S)

    def publish(self, result: WorkerExit) -> None:
        """Tell the others how the current start ended here. Only a start's first result counts."""
        if self.num_restarts not in self._own.results:
            recent = {start: old for start, old in self._own.results.items() if start == self.num_restarts - 1}
            self._own = replace(self._own, results={**recent, self.num_restarts: result})
            self._has_news.set()

    def wait_for_results(self) -> bool:
        """Wait until the current start has ended on all nodes. Whether all can restart; False if a node is lost."""
        while len(results := self._results()) < self.num_nodes:
            if self.lost():
                return False
            time.sleep(POLL_S)
        return not any(result.is_final for result in results.values())

    def peer_failed(self) -> bool:
        """Whether this node's workers must end because of another node.

        A stop is not a reason: all workers stop after the same step, and each node ends once it has saved.
        """
        kinds = {result.kind for index, result in self._results().items() if index != self.index}
        return bool(kinds - {ExitKind.DONE, ExitKind.STOPPED} or self.lost())

    def lost(self) -> str:
        """Which nodes cannot be reached any more though the start has not ended there; empty if none."""
        now_s, results = time.monotonic(), self._results()
        awaited = {index: peer for index, peer in self._peers.items() if index not in results}
        if left := [peer.name for peer in awaited.values() if peer.has_left]:
            return f"node {', '.join(left)} has left"
        if awaited and self._store_error:
            return f"lost contact with the node at {self._nodes.address}: {self._store_error}"
        if silent := [peer.name for index, peer in awaited.items() if now_s - self._heard_s[index] > LOST_S]:
            silence = f"no heartbeat for {LOST_S:g} s: it is down, or the link to it"
            return f"lost contact with node {', '.join(silent)}: {silence}"
        return ""

    def first_failure(self) -> WorkerExit | None:
        """Why the current start failed, as far as this node knows; None if it has not."""
        failure, lost = first_failure(self._results().values()), self.lost()
        if failure is None:
            return WorkerExit(ExitKind.COMMUNICATION, self.first_rank, lost) if lost else None
        return failure.with_notes(lost)

    def _records(self) -> dict[int, _Record]:
        """Of all nodes that have joined, in the order of their indices."""
        return dict(sorted({**self._peers, self.index: self._own}.items()))

    def _results(self) -> dict[int, WorkerExit]:
        """Of the current start, by node."""
        return {
            i: record.results[self.num_restarts]
            for i, record in self._records().items()
            if self.num_restarts in record.results
        }

    def _exchange_all(self, store: Any) -> None:
        """Runs in the thread until this node may leave."""
        try:
            while not self._exchange(store):
                self._has_news.wait(HEARTBEAT_S)
                self._has_news.clear()
        except (RuntimeError, ValueError) as error:  # what torch's stores raise
            self._store_error = str(error).partition("\n")[0]

    def _exchange(self, store: Any) -> bool:
        """Write the own record and read the others'. Returns True if that was the last time."""
        self._heartbeat += 1
        own = replace(self._own, heartbeat=self._heartbeat)
        store.set(f"node-{self.index}", json.dumps(asdict(own)))
        for index in range(self.num_nodes):
            if index != self.index and (index in self._peers or store.check([f"node-{index}"])):
                record = _Record.parse(store.get(f"node-{index}"))
                if index not in self._peers or record.heartbeat != self._peers[index].heartbeat:
                    self._heard_s[index] = time.monotonic()
                    self._peers = {**self._peers, index: record}
        staying = [index for index, peer in self._peers.items() if not peer.has_left]
        is_last = all(time.monotonic() - self._heard_s[index] > LOST_S for index in staying)
        return own.has_left and (is_last or not self._hosts_store)
