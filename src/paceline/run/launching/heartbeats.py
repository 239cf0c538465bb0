"""Heartbeats between the agents of several nodes: each publishes a record in a store, and reads all others.

A thread does this several times a second, because a broken link can block it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from paceline.core.timing import ActiveTimer
from paceline.run.launching.worker_exit import WorkerExit
from paceline.run.membership.roster import Report

HEARTBEAT_S = 0.2
# Nodes that have left, or were lost for this long, are no longer read: hosts may come and go for weeks.
FORGET_S = 60.0
LEAVE_S = 30.0  # how long the node with the store waits for the others at the end


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every node publishes.

    options: must be equal on all nodes. results: how its workers ended, by start; of the current start and the one
    before, since a node can be one start behind. report: the state of its workers, if they may change.
    """

    name: str
    num_workers: int
    options: Mapping[str, Any]
    run_id: str = ""
    has_left: bool = False
    heartbeat: int = 0
    results: dict[int, WorkerExit] = field(default_factory=dict)
    report: Report = field(default_factory=Report)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"report": self.report.to_dict()})

    @classmethod
    def parse(cls, text: bytes) -> Self:
        values = json.loads(text)
        results = {int(start): WorkerExit.from_dict(result) for start, result in values["results"].items()}
        return cls(**values | {"results": results, "report": Report.from_dict(values["report"])})


class Heartbeats:
    """The latest records of all nodes. Without a store this node is the only one.

    lost_s: a node is lost after this long without a heartbeat. hosts_store: this node has the store and leaves last.
    count_nodes: how many nodes may have joined. also: called with this object after each exchange of records. Both are
    called in the thread.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        own: Record,
        *,
        lost_s: float,
        hosts_store: bool,
        count_nodes: Callable[[], int],
        also: Callable[[Heartbeats], object] = lambda _: None,
    ) -> None:
        # The thread replaces `peers`, other threads replace `own`. Neither is ever modified.
        self.own = own
        self.peers: dict[int, Record] = {}
        self.has_unreadable = False  # records
        self.store_error = ""
        self.lost_s = lost_s
        self._store_silence = ActiveTimer()
        self._index = index
        self._is_alone = store is None
        self._hosts_store = hosts_store
        self._silence: dict[int, ActiveTimer] = {}  # since the record of a peer last changed
        self._num_heartbeats = 0
        self._has_news = threading.Event()
        # The store is open as long as something refers to it: only the thread does.
        self._thread = threading.Thread(
            target=self._run, args=(store, count_nodes, also), name="paceline-nodes", daemon=True
        )
        if not self._is_alone:
            self._thread.start()

    def publish(self, **changes: Any) -> None:
        """Change fields of this node's record, and send it immediately."""
        self.own = replace(self.own, **changes)
        self.wake()

    def wake(self) -> None:
        self._has_news.set()

    @property
    def records(self) -> dict[int, Record]:
        """Of all nodes that have joined, in the order of their indices."""
        return dict(sorted({**self.peers, self._index: self.own}.items()))

    @property
    def silent(self) -> dict[int, Record]:
        """The lost nodes."""
        return {index: peer for index, peer in self.peers.items() if self._silence[index].seconds > self.lost_s}

    @property
    def store_silence_s(self) -> float:
        """The seconds since the store's last answer. An unreachable store blocks the thread."""
        return 0.0 if self._is_alone else self._store_silence.update()

    @property
    def are_others_gone(self) -> bool:
        """Whether all other nodes were lost or have left."""
        return all(peer.has_left or index in self.silent for index, peer in self.peers.items())

    def leave(self, timeout_s: float) -> None:
        """Notify the others that this node leaves. timeout_s: for this message, if the store does not answer."""
        if not self._is_alone:
            self.publish(has_left=True)
            self._thread.join(LEAVE_S if self._hosts_store else timeout_s)

    # In the thread

    def _run(self, *arguments: Any) -> None:
        try:
            while not self._exchange(*arguments):
                self._has_news.wait(HEARTBEAT_S)
                self._has_news.clear()
        except (RuntimeError, ValueError) as error:  # what torch's stores raise
            self.store_error = str(error).partition("\n")[0]

    def _exchange(self, store: Any, count_nodes: Callable[[], int], also: Callable[[Heartbeats], object]) -> bool:
        """Write this node's record and read the others. Returns True after the last exchange."""
        self._num_heartbeats += 1
        own = replace(self.own, heartbeat=self._num_heartbeats)
        store.set(f"node-{self._index}", own.to_json())
        for index in range(count_nodes()):
            if index == self._index or self._is_forgotten(index):
                continue
            if index in self.peers or store.check([f"node-{index}"]):
                content = store.get(f"node-{index}")
                try:
                    self._receive(index, Record.parse(content))
                except (KeyError, TypeError):
                    self.has_unreadable = True  # of another version: it must not disturb the others
        also(self)
        self._store_silence.reset()
        return own.has_left and (self.are_others_gone or not self._hosts_store)

    def _is_forgotten(self, index: int) -> bool:
        peer = self.peers.get(index)
        return peer is not None and (peer.has_left or self._silence[index].seconds > FORGET_S)

    def _receive(self, index: int, record: Record) -> None:
        silence = self._silence.setdefault(index, ActiveTimer())
        if index in self.peers and record.heartbeat == self.peers[index].heartbeat:
            silence.update()
        else:
            silence.reset()
            self.peers = {**self.peers, index: record}
