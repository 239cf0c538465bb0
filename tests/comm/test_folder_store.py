"""The store of workers of one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.comm.folder_store import FolderStore
from paceline.comm.rendezvous import Rendezvous, RendezvousPoint, generation_store
from paceline.core.processes import STORE_VARIABLE
from paceline.core.world import World

SOON = timedelta(milliseconds=20)


def test_what_one_process_sets_others_get(tmp_path: Path) -> None:
    ours, theirs = FolderStore(tmp_path / "store"), FolderStore(tmp_path / "store")
    assert not theirs.check(["a/b", "c"])
    ours.set("a/b", "text")
    ours.set("c", b"\x00\xff")
    assert theirs.check(["a/b", "c"])
    assert (theirs.get("a/b"), theirs.get("c")) == (b"text", b"\x00\xff")
    ours.set("c", b"")
    assert theirs.get("c") == b""
    assert theirs.delete_key("c")
    assert not theirs.delete_key("c")
    assert not ours.check(["a/b", "c"])


def test_a_value_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.set("a", "1")
    with pytest.raises(RuntimeError, match=r"^b, c did not arrive within 0\.02 s$"):
        store.wait(["a", "b", "c"], SOON)
    store.set_timeout(SOON)
    with pytest.raises(RuntimeError, match="d did not arrive"):
        store.clone().get("d")


def test_counters_count_each_addition(tmp_path: Path) -> None:
    def count(_: int) -> int:
        store = FolderStore(tmp_path / "store")
        return max(store.add("count", 1) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(count, range(4))) == 200


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of torch's FileStore hang in an entry that was written in part, in code that cannot be interrupted."""
    store = FolderStore(tmp_path / "store")

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(SystemExit):
            store.set("a", "1")
    others = FolderStore(tmp_path / "store")
    assert not others.check(["a"])
    others.set("a", "2")
    assert others.get("a") == b"2"


def test_generations_of_one_host_have_such_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    for number in range(5):
        store = generation_store(number)
        assert isinstance(store, FolderStore)
        assert not store.check(["a"])  # each generation has its own
        store.set("a", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store-3", "store-4"]


def test_process_groups_connect_through_it(tmp_path: Path) -> None:
    def sum_of_ranks(rank: int) -> float:
        import torch

        point = RendezvousPoint(FolderStore(tmp_path / "store"))
        rendezvous = Rendezvous(World(rank=rank, size=2), 60.0, at=point)
        group = dist.ProcessGroupGloo(rendezvous.store, rank, 2, timedelta(seconds=60))  # type: ignore[attr-defined]
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce(tensor).wait()
        return tensor.item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sum_of_ranks, range(2))) == [3.0, 3.0]
