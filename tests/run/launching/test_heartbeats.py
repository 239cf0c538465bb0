"""What an agent reads of the other nodes: also after weeks in which hosts have come and gone."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core import timing
from paceline.run.launching import heartbeats
from paceline.run.launching.heartbeats import Heartbeats, Record
from paceline.run.launching.nodes import Nodes, NodesError, wait_for_nodes


class FakeStore(dict[str, str]):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> Any:  # type: ignore[override]
        self.read.append(key)
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Agents:
    """This node is the first of `count`; a test writes the records of the others."""

    def __init__(self, count: int) -> None:
        self.store, self.count = FakeStore(), count
        self.own: Heartbeats = Heartbeats(None, 0, note(0), lost_s=1.5, hosts_store=False, count_nodes=lambda: 0)
        for index in range(1, count):
            self.store.set(f"node-{index}", note(index).to_json())

    def exchange(self) -> list[str]:
        """What is read of the others."""
        self.store.read.clear()
        self.own._exchange(self.store, lambda: self.count, lambda _: None)
        return self.store.read


def note(index: int, **values: Any) -> Record:
    return Record(name=f"node {index}", num_workers=1, options={}, **values)


def test_nodes_that_left_are_not_read_again() -> None:
    agents = Agents(4)
    assert agents.exchange() == ["node-1", "node-2", "node-3"]
    agents.store.set("node-2", note(2, has_left=True, heartbeat=9).to_json())
    assert agents.exchange() == ["node-1", "node-2", "node-3"]
    assert agents.exchange() == ["node-1", "node-3"]
    assert agents.own.peers[2].has_left


def test_nodes_that_were_lost_are_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may come back. Later they stay lost."""
    now_s = 100.0
    monkeypatch.setattr(timing, "monotonic", lambda: now_s)
    agents = Agents(3)
    agents.exchange()
    num_read = 0
    for beat in range(1, 200):
        now_s += timing.MAX_INTERVAL_S
        agents.store.set("node-1", note(1, heartbeat=beat).to_json())
        read = agents.exchange()
        assert read[0] == "node-1"
        num_read += "node-2" in read
        assert (2 in agents.own.silent) == (beat > 3)
    assert num_read == heartbeats.FORGET_S / timing.MAX_INTERVAL_S + 1
    assert {*agents.own.silent} == {2}


def test_a_node_of_another_version_disturbs_no_other() -> None:
    """It finds none that it can read, and says so."""
    agents = Agents(3)
    agents.store.set("node-2", '{"name": "from the future", "num_workers": 1, "options": {}}')
    agents.exchange()
    assert {*agents.own.peers} == {1}
    nodes = Nodes(2, "node-1:29500")
    wait_for_nodes(nodes, agents.own, str, lambda: True, 0.0)
    agents.own.peers = {}
    with pytest.raises(NodesError, match="the nodes at node-1:29500 run another version of Paceline"):
        wait_for_nodes(nodes, agents.own, str, lambda: True, 0.0)
