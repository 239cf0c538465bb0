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
from typing import TYPE_CHECKING, Any

from paceline.core.secret import FILE_VARIABLE
from paceline.run.launching.nodes import Nodes, NodesError, interface_of, open_store
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, most_important

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

HEARTBEAT_S = 0.2
LOST_S = 10.0  # without a heartbeat: the node is down, or the link to it
LEAVE_S = 30.0  # how long the node with the store waits at its end for the others
POLL_S = 0.02
_NO_SECRET = (
    "paceline: this run has no secret: anyone who can reach {address} can join or disturb it. Pass --secret-file, the "
    "same on every node; see docs/security.md"
)


@dataclass(frozen=True)
class NodeResult:
    """How a start ended on one node. Neither done nor failed: its workers were ended because of another node."""

    is_done: bool
    failure: WorkerExit | None = None
    may_restart: bool = False


@dataclass(frozen=True)
class _Record:
    """What a node publishes. `results` are of the current start and the one before, as a node can be one behind."""

    name: str
    num_workers: int
    run_id: str
    options: dict[str, Any] = field(default_factory=dict)
    results: dict[int, NodeResult] = field(default_factory=dict)
    has_left: bool = False
    heartbeat: int = 0

    @classmethod
    def parse(cls, text: bytes) -> _Record:
        values = json.loads(text)
        for start, result in list(values.pop("results").items()):
            failure = None if result["failure"] is None else WorkerExit.from_dict(result["failure"])
            values.setdefault("results", {})[int(start)] = NodeResult(**result | {"failure": failure})
        return cls(**values)


class NodeRendezvous:
    """All nodes of a launch, or this one alone. The constructor waits until all have joined, or raises `NodesError`.

    Ranks are numbered node by node, starting at the node with the address. `options` must be equal on all nodes. Of the
    methods only `wait_for_restart` and `close` wait for other nodes, each with a time limit.
    """

    def __init__(self, nodes: Nodes, num_workers: int, run_id: str, options: Mapping[str, Any]) -> None:
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._nodes, self.num_nodes = nodes, nodes.num
        self._secret = nodes.secret()
        self._prefix = "paceline" if self._secret is None else self._secret.name("nodes")
        self._hosts_store, self.index, self.name = True, 0, socket.gethostname()
        self.environment: dict[str, str] = {}  # variables with which workers of several nodes connect
        self._start = 0
        self._lock = threading.Lock()
        self._heard_s: dict[int, float] = {}  # when the record of another node last changed
        self._store_error = ""
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None
        store = self._join() if nodes.num > 1 else None
        # Replaced, never changed: read without the lock.
        self._records = {self.index: _Record(self.name, num_workers, run_id, dict(options))}
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
        sizes = [record.num_workers for _, record in sorted(self._records.items())]
        self.run_id = self._records[0].run_id
        self.num_workers, self.num_workers_here = sum(sizes), num_workers
        self.first_rank = sum(sizes[: self.index])  # the lowest rank on this node

    def _join(self) -> TCPStore:
        nodes = self._nodes
        if self._secret is None:
            print(_NO_SECRET.format(address=nodes.address), file=sys.stderr)
        store, self._hosts_store, own_address = open_store(nodes)
        self.index = 0 if self._hosts_store else store.add(f"{self._prefix}/arrived", 1)
        if self.index >= nodes.num:
            raise NodesError(f"{nodes.num} nodes have already joined at {nodes.address}: choose another port")
        self.name = f"{self.name} ({own_address})"
        self.environment = {"MASTER_ADDR": nodes.host_and_port[0], "MASTER_PORT": str(store.port)}
        self.environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if nodes.secret_file is not None:
            self.environment[FILE_VARIABLE] = str(Path(nodes.secret_file).absolute())
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(own_address)) is not None:
            # Gloo's default is the interface of the host's own name, which often is the loopback.
            self.environment["GLOO_SOCKET_IFNAME"] = interface
        return store

    def _wait_for_all(self, deadline_s: float) -> None:
        nodes, own = self._nodes, self._own
        while True:
            if other := next((record for record in self._others() if record.options != own.options), None):
                raise NodesError(
                    f"node {other.name} was started with {other.options}, this one with {own.options}: use the same "
                    "command on every node"
                )
            if lost := self.lost():
                raise NodesError(f"the nodes could not connect: {lost}")
            if len(self._records) == nodes.num:
                return
            if time.monotonic() > deadline_s:
                names = ", ".join(record.name for record in self._records.values())
                raise NodesError(
                    f"{len(self._records)} of {nodes.num} nodes joined at {nodes.address} within join_timeout="
                    f"{nodes.join_timeout_s:g} s: {names}. Start the same command on the others, with the same secret "
                    "or none"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave, and let the others know. The node with the store leaves last."""
        if self._thread is not None and self._thread.is_alive():
            self._update(self.index, has_left=True)
            self._has_news.set()
            self._thread.join(LEAVE_S if self._hosts_store else LOST_S)

    def publish(self, result: NodeResult) -> None:
        """Tell the others how the current start ended here. Only a start's first result counts."""
        if self._start not in self._own.results:
            recent = {start: old for start, old in self._own.results.items() if start == self._start - 1}
            self._update(self.index, results={**recent, self._start: result})
            self._has_news.set()

    def wait_for_restart(self, poll_s: float) -> bool:
        """Wait until the current start has ended on all nodes. Whether all can restart; False if a node is lost."""
        while len(results := self._results()) < self.num_nodes:
            if self.lost():
                return False
            time.sleep(poll_s)
        return all(result.may_restart for result in results.values())

    def begin_next_start(self) -> None:
        self._start += 1

    def peer_failed(self) -> bool:
        """Whether this node's workers must end because of another node.

        A stop is not a reason: all workers stop after the same step, and each node ends once it has saved.
        """
        failed = (result for result in self._results().values() if not result.is_done)
        others = [result.failure for result in failed if result is not self._own.results.get(self._start)]
        return any(failure is None or failure.kind != ExitKind.STOPPED for failure in others) or bool(self.lost())

    def lost(self) -> str:
        """Which nodes cannot be reached any more though the start has not ended there; empty if none."""
        now_s, results = time.monotonic(), self._results()
        awaited = {i: each for i, each in self._records.items() if i != self.index and i not in results}
        if left := [record.name for record in awaited.values() if record.has_left]:
            return f"node {', '.join(left)} has left"
        silence = f"no heartbeat for {LOST_S:g} s: it is down, or the link to it"
        if awaited and self._store_error:
            return f"lost contact with the node at {self._nodes.address}: {self._store_error}"
        silent = [record.name for i, record in awaited.items() if now_s - self._heard_s[i] > LOST_S]
        return f"lost contact with node {', '.join(silent)}: {silence}" if silent else ""

    def first_failure(self) -> WorkerExit | None:
        """Why the current start failed, as far as this node knows; None if it has not."""
        failure = most_important(each.failure for each in self._results().values() if each.failure is not None)
        lost = self.lost()
        if failure is None:
            return WorkerExit(ExitKind.COMMUNICATION, self.first_rank, lost) if lost else None
        return failure.with_notes(lost)

    @property
    def _own(self) -> _Record:
        return self._records[self.index]

    def _others(self) -> list[_Record]:
        return [record for index, record in sorted(self._records.items()) if index != self.index]

    def _results(self) -> dict[int, NodeResult]:
        """Of the current start, by node."""
        records, start = self._records, self._start
        return {index: records[index].results[start] for index in sorted(records) if start in records[index].results}

    # In the thread

    def _exchange_all(self, store: TCPStore) -> None:
        try:
            while not self._exchange(store):
                self._has_news.wait(HEARTBEAT_S)
                self._has_news.clear()
        except (RuntimeError, ValueError) as error:  # what torch's stores raise
            self._store_error = str(error).partition("\n")[0]

    def _exchange(self, store: TCPStore) -> bool:
        """Write the own record and read the others'. Returns True if that was the last time."""
        self._update(self.index, heartbeat=self._own.heartbeat + 1)
        own = self._own
        store.set(self._key(self.index), self._sign(json.dumps(asdict(own)).encode(), self.index))  # type: ignore[arg-type]
        others = [index for index in range(self.num_nodes) if index != self.index]
        joined = [index for index in others if index in self._records or store.check([self._key(index)])]
        found = store.multi_get([self._key(index) for index in joined]) if joined else []
        for index, raw in zip(joined, found, strict=True):
            record = _Record.parse(self._verify(raw, index))
            if index not in self._records or record.heartbeat != self._records[index].heartbeat:
                self._heard_s[index] = time.monotonic()
                self._update(index, record)
        return own.has_left and (not self._hosts_store or self._all_others_left())

    def _all_others_left(self) -> bool:
        staying = [i for i, record in self._records.items() if not record.has_left]
        return all(time.monotonic() - self._heard_s[index] > LOST_S for index in staying)

    def _update(self, index: int, record: _Record | None = None, **changes: Any) -> None:
        with self._lock:
            self._records = self._records | {index: record or replace(self._records[index], **changes)}

    def _key(self, index: int) -> str:
        return f"{self._prefix}/node-{index}"

    def _sign(self, record: bytes, index: int) -> bytes:
        return record if self._secret is None else self._secret.sign(record, f"the record of node {index}")

    def _verify(self, record: bytes, index: int) -> bytes:
        return record if self._secret is None else self._secret.check(record, f"the record of node {index}")
