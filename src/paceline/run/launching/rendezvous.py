"""What the nodes of one launch know of each other.

Every launcher keeps one small record in a store on the address's node and reads everybody's, several times a second, in
a thread of its own: a link that is cut can block that thread and nothing else. What is decided from the records (to
start, to start again, to end) comes out the same everywhere, since each decides when it has read them all.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.core.secret import FILE_VARIABLE
from paceline.run.launching.failure import ASKED, Ending, first
from paceline.run.launching.nodes import Nodes, NodesError, Opened, interface_of, open_store
from paceline.run.launching.worker import COMMUNICATION, STOPPED

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

TALK_S = 0.2  # between two looks at the others' records
LOST_S = 10.0  # without a new record of a node: it is gone, or the link to it
_NO_SECRET = (
    "paceline: this run has no secret: whoever can reach {address} can join it or disturb it. Give --secret-file, the "
    "same on every node; docs/security.md says what it protects"
)
LEAVE_S = 30.0  # the address's node stays at most so long for those who still read
POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a start ended on one node. Neither done nor with an ending: its workers were ended because others' failed."""

    is_done: bool
    ending: Ending | None = None
    may_start_again: bool = False


@dataclass(frozen=True)
class _Record:
    """What a node tells the others. Of outcomes there are two: who is ahead has already begun the next start."""

    name: str
    num_workers: int
    run_id: str
    terms: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    outcome: Outcome | None = None
    outcome_before: Outcome | None = None
    has_left: bool = False
    beat: int = 0

    def outcome_of(self, start: int) -> Outcome | None:
        return {self.start: self.outcome, self.start - 1: self.outcome_before}.get(start)

    @classmethod
    def parse(cls, text: bytes) -> _Record:
        values = json.loads(text)
        for key in ("outcome", "outcome_before"):
            if values[key] is not None:
                ending = values[key]["ending"]
                values[key] = Outcome(**values[key] | {"ending": Ending(**ending) if ending else None})
        return cls(**values)


class Meeting:
    """All nodes of one launch, or this one alone: they are there when it is constructed, or it raises.

    Ranks go by node, the address's first. `terms` must be the same on all nodes. No method waits for another node but
    the constructor, `begin` and `close`, each with a limit.
    """

    def __init__(self, nodes: Nodes, num_workers: int, run_id: str, terms: Mapping[str, Any]) -> None:
        self._nodes = nodes
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._store: TCPStore | None = None
        self._is_here, self.index = True, 0
        self.name = socket.gethostname()
        self.environment: dict[str, str] = {}  # where workers of several nodes meet
        self._secret = nodes.secret()
        self._prefix = "paceline" if self._secret is None else self._secret.name("nodes")
        if nodes.num > 1:
            if self._secret is None:
                print(_NO_SECRET.format(address=nodes.address), file=sys.stderr)
            self._arrive(open_store(nodes))

        self._lock = threading.Lock()
        self._records = {self.index: _Record(self.name, num_workers, run_id, dict(terms))}  # replaced, never changed
        self._raw: dict[int, bytes] = {}
        self._heard_s: dict[int, float] = {}
        self._contact_s = time.monotonic()
        self._broken = ""
        self._has_news = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="paceline-nodes", daemon=True)
        if nodes.num > 1:
            self._talker.start()
            try:
                self._wait_for_all(deadline_s)
            except BaseException:
                self.close()
                raise

    def _arrive(self, opened: Opened) -> None:
        self._store, self._is_here = opened.store, opened.is_here
        self.index = 0 if opened.is_here else opened.store.add(f"{self._prefix}/arrived", 1)
        if self.index >= self._nodes.num:
            raise NodesError(
                f"{self._nodes.num} nodes have already met at {self._nodes.address}: choose another port for another "
                "run"
            )
        self.name = f"{self.name} ({opened.own_address})"
        self.environment = {"MASTER_ADDR": self._nodes.place[0], "MASTER_PORT": str(opened.store.port)}
        self.environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if self._nodes.secret_file is not None:
            self.environment[FILE_VARIABLE] = str(Path(self._nodes.secret_file).absolute())
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(opened.own_address)) is not None:
            # By itself Gloo takes the one behind the host's own name, which often is the loopback.
            self.environment["GLOO_SOCKET_IFNAME"] = interface

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What does not change any more

    @property
    def num_nodes(self) -> int:
        return self._nodes.num

    @property
    def run_id(self) -> str:
        """The same on all nodes."""
        return self._records[0].run_id

    @property
    def num_workers(self) -> int:
        """Of all nodes together."""
        return sum(record.num_workers for record in self._records.values())

    @property
    def num_workers_here(self) -> int:
        return self._own.num_workers

    @property
    def first_rank(self) -> int:
        """Of this node's workers."""
        return sum(record.num_workers for index, record in self._records.items() if index < self.index)

    # What happens

    def begin(self, start: int) -> None:
        """Wait until all nodes are ready for this start."""
        if start > self._own.start:
            self._tell(start=start, outcome=None, outcome_before=self._own.outcome)
        deadline_s = time.monotonic() + self._nodes.join_timeout_s
        while late := [record.name for record in self._others() if record.start < start]:
            if trouble := self._departed() or self.lost():
                raise NodesError(f"the workers cannot be started again: {trouble}")
            if time.monotonic() > deadline_s:
                limit = f"join_timeout={self._nodes.join_timeout_s:g} s"
                raise NodesError(f"the workers cannot be started again: no {', '.join(late)} within {limit}")
            time.sleep(POLL_S)

    def say(self, outcome: Outcome) -> None:
        """Tell the others how the current start ended here."""
        self._tell(outcome=outcome)

    def outcomes(self) -> list[Outcome] | None:
        """How the current start ended on every node; None while it has not on all."""
        found = [outcome for record in self._records.values() if (outcome := record.outcome_of(self._own.start))]
        return found if len(found) == self.num_nodes else None

    def is_failing(self) -> bool:
        """Whether this node's workers must end because of another node.

        Workers that were stopped are no reason: all stop after the same step, each node once it has saved.
        """
        outcomes = [outcome for record in self._others() if (outcome := record.outcome_of(self._own.start))]
        endings = [outcome.ending for outcome in outcomes if not outcome.is_done]
        return any(ending is None or ending.kind != STOPPED for ending in endings) or bool(self.lost())

    def lost(self) -> str:
        """Who is not heard any more though the start has not ended there, as a sentence; empty if nobody."""
        now_s, start = time.monotonic(), self._own.start
        records = {i: record for i, record in self._records.items() if i != self.index}
        awaited = {i: record for i, record in records.items() if record.outcome_of(start) is None}
        if awaited and (self._broken or now_s - self._contact_s > LOST_S):
            return f"lost contact with the node at {self._nodes.address}: " + (self._broken or _silence())
        silent = [record.name for i, record in awaited.items() if now_s - self._heard_s[i] > LOST_S]
        return f"lost contact with node {', '.join(silent)}: {_silence()}" if silent else ""

    def first_ending(self) -> Ending | None:
        """How the current start failed, as far as is known here; None if it has not."""
        outcomes = [record.outcome_of(self._own.start) for record in (self._own, *self._others())]
        ending = first([outcome.ending for outcome in outcomes if outcome is not None and outcome.ending is not None])
        lost = self.lost()
        if ending is None:
            return Ending(COMMUNICATION, self.first_rank, lost) if lost else None
        return ending.add(lost) if lost else ending

    def close(self) -> None:
        """Leave, and let the others know. The address's node goes last, since it has the store."""
        if self._talker.is_alive():
            ended = Outcome(False, Ending(ASKED, self.first_rank, f"the command was ended on node {self.name}"))
            self._tell(has_left=True, outcome=self._own.outcome or ended)
            self._talker.join(LEAVE_S if self._is_here else LOST_S)
        self._store = None

    # How the records come and go

    @property
    def _own(self) -> _Record:
        return self._records[self.index]

    def _others(self) -> list[_Record]:
        return [record for index, record in sorted(self._records.items()) if index != self.index]

    def _departed(self) -> str:
        return next((f"node {record.name} has left" for record in self._others() if record.has_left), "")

    def _wait_for_all(self, deadline_s: float) -> None:
        while True:
            if other := next((record for record in self._others() if record.terms != self._own.terms), None):
                raise NodesError(
                    f"node {other.name} was started with {other.terms}, this one with {self._own.terms}: give the same "
                    "command on every node"
                )
            if trouble := self._departed() or self.lost():
                raise NodesError(f"the nodes did not come together: {trouble}")
            if len(self._records) == self.num_nodes:
                return
            if time.monotonic() > deadline_s:
                names = ", ".join(record.name for record in self._records.values())
                raise NodesError(
                    f"{len(self._records)} of {self.num_nodes} nodes came to {self._nodes.address} within join_timeout="
                    f"{self._nodes.join_timeout_s:g} s: {names}. Start the same command on the others too, with the "
                    "same secret or none"
                )
            time.sleep(POLL_S)

    def _tell(self, **changes: Any) -> None:
        self._note(self.index, **changes)
        self._has_news.set()

    def _note(self, index: int, record: _Record | None = None, **changes: Any) -> None:
        with self._lock:
            self._records = self._records | {index: replace(record or self._records[index], **changes)}

    def _talk(self) -> None:
        store = self._store
        assert store is not None
        try:
            while not self._exchange(store):
                self._has_news.wait(TALK_S)
                self._has_news.clear()
        except (RuntimeError, ValueError) as error:  # the stores of torch raise nothing better
            self._broken = str(error).partition("\n")[0]

    def _exchange(self, store: TCPStore) -> bool:
        """Write the own record and read the others'; True if that was the last time."""
        self._note(self.index, beat=self._own.beat + 1)
        own = self._own
        store.set(self._key(self.index), self._sealed(json.dumps(asdict(own)).encode(), self.index))  # type: ignore[arg-type]
        others = [index for index in range(self.num_nodes) if index != self.index]
        there = [index for index in others if index in self._raw or store.check([self._key(index)])]
        found = store.multi_get([self._key(index) for index in there]) if there else []
        for index, raw in zip(there, found, strict=True):
            if raw != self._raw.get(index):
                self._raw[index], self._heard_s[index] = raw, time.monotonic()
                self._note(index, _Record.parse(self._unsealed(raw, index)))
        self._contact_s = time.monotonic()
        return own.has_left and (not self._is_here or self._is_last())

    def _key(self, index: int) -> str:
        return f"{self._prefix}/node-{index}"

    def _sealed(self, record: bytes, index: int) -> bytes:
        return record if self._secret is None else self._secret.sign(record, f"the record of node {index}")

    def _unsealed(self, record: bytes, index: int) -> bytes:
        return record if self._secret is None else self._secret.check(record, f"the record of node {index}")

    def _is_last(self) -> bool:
        staying = [index for index, record in self._records.items() if not record.has_left]
        return all(time.monotonic() - self._heard_s[index] > LOST_S for index in staying)


def _silence() -> str:
    return f"nothing heard for {LOST_S:g} s, so it is down, or the link to it is"
