"""A worker is lost during an exchange over NCCL. Several GPUs are not at hand: the process groups are fakes.

They behave as torch's do: `wait` returns before the exchange is done, and an aborted exchange raises nothing.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_workers import fake_node

from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.core.errors import CommunicationError, GenerationEnded
from paceline.core.processes import STORE_VARIABLE
from paceline.core.world import World
from paceline.run.membership import communicator as membership_communicator
from paceline.run.membership.communicator import ElasticCommunicator

Calls = list[tuple[int, str]]  # by the number of the group


class FakeNccl:
    """Its exchanges are complete only when it was aborted: the other workers never arrive."""

    Options = SimpleNamespace

    def __init__(self, calls: Calls, *_: Any) -> None:
        self._number = sum(what == "open" for _, what in calls)
        self._calls = calls
        self.is_aborted = Event()
        self._note("open")

    def _note(self, what: str) -> None:
        self._calls.append((self._number, what))

    def allreduce(self, _: list[torch.Tensor]) -> Any:
        self._note("allreduce")
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self._note("abort")
        self.is_aborted.set()

    def shutdown(self) -> None:
        self._note("shutdown")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """What the groups are asked to do. The stream of the GPU is idle when the first group is aborted."""
    calls: Calls = []
    groups: list[FakeNccl] = []

    def make(*arguments: Any) -> FakeNccl:
        groups.append(FakeNccl(calls, *arguments))
        return groups[-1]

    def synchronize() -> None:
        assert groups[0].is_aborted.wait(60), "nobody has aborted the exchange"
        calls.append((0, "synchronize"))

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=synchronize))
    monkeypatch.setattr(
        membership_communicator,
        "connect",
        lambda world, backend, timeout_s, at: ProcessGroupCommunicator(
            world, backend, timeout_s, SimpleNamespace(store=None, check=at.check)
        ),
    )
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # `rejoin` sets them: restored after the test
    return calls


def test_an_exchange_is_aborted_and_the_survivors_connect_anew(calls: Calls, tmp_path: Path) -> None:
    """Abort before waiting ends, the new group before the old one is destroyed, and no result of what was aborted."""
    world = World(0, 3, device=torch.device("cpu"), local_size=3)
    with fake_node(tmp_path / "node", 3) as node:
        node.enter_all()
        communicator = ElasticCommunicator(node.membership(0), world, "nccl", 600.0)
        communicator.can_recover = True
        pending = communicator.all_reduce(torch.ones(4))
        node.end(1)
        with pytest.raises(GenerationEnded):
            pending.wait()
        assert calls == [(0, "open"), (0, "allreduce"), (0, "abort"), (0, "synchronize")]
        assert communicator.rejoin() == node.generation
        assert (communicator.world.rank, communicator.world.size) == (0, 2)
        assert calls[4:] == [(1, "open"), (0, "shutdown")]
        communicator.close()
        assert calls[6:] == [(1, "shutdown")], "the watcher aborts the generation that has ended, no other"


def test_without_survivors_that_go_on_the_error_stays(calls: Calls, tmp_path: Path) -> None:
    """Before set-up is complete nobody can begin the step again: all are restarted."""
    with fake_node(tmp_path / "node", 2) as node:
        node.enter_all()
        world = World(0, 2, device=torch.device("cpu"), local_size=2)
        communicator = ElasticCommunicator(node.membership(0), world, "nccl", 600.0)
        pending = communicator.all_reduce(torch.ones(4))
        node.end(1)
        with pytest.raises(CommunicationError, match="a worker was lost during the exchange"):
            pending.wait()
        communicator.close()
    assert calls[-1] == (0, "shutdown")
