"""What a checkpoint looks like on the disk, who writes which part, and what is refused before anything is written."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_state import components, job, same, save_steps, state, world
from safetensors.torch import load_file

from paceline.checkpoint import saving
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.pieces import Component, Disk, part_of, pieces_of, split, writers
from paceline.checkpoint.reading import Checkpoint, verify
from paceline.checkpoint.saving import Job, save
from paceline.core.world import World


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_one_folder_of_plain_files(tmp_path: Path) -> None:
    folder = save(tmp_path, job(400))
    assert folder == tmp_path / "step-00000400"
    assert names(tmp_path) == {"step-00000400"}
    # rng has no tensors, so it needs no file for them.
    assert names(folder) == {
        "manifest.json",
        "model.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "rng.rank-0.json",
    }
    assert same(load_file(folder / "model.safetensors")["weight"], components(400)[0].state["weight"])


def test_a_checkpoint_comes_back_with_what_the_caller_said_about_it(tmp_path: Path) -> None:
    configuration = {"lr": 0.1, "betas": (0.9, 0.999), "limit": float("inf"), "name": "é", "layers": {1: None}}
    saved = Job(7, components(3), configuration, {"epoch": 1, "step": 7}, {"loss": float("nan"), "accuracy": 0.5})
    checkpoint = Checkpoint(save(tmp_path, saved))
    assert checkpoint.step == checkpoint.manifest.step == 7
    assert checkpoint.manifest.world_size == 1
    assert same(checkpoint.manifest.configuration, configuration)
    assert same(checkpoint.manifest.metrics, {"loss": float("nan"), "accuracy": 0.5})
    assert checkpoint.manifest.position == {"epoch": 1, "step": 7}
    assert checkpoint.manifest.versions["torch"] == torch.__version__
    assert checkpoint.manifest.versions["numpy"] == np.__version__
    assert checkpoint.manifest.contents.components["rng"].pattern is Pattern.PER_RANK
    for component, part in zip(components(3), ("whole", "whole", "rank-0"), strict=True):
        assert checkpoint.parts(component.name) == (part,)
        assert same(checkpoint.load(component.name, part), component.state)


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, job(4, seed=1))
    save(tmp_path, job(4, seed=2))
    assert names(tmp_path) == {"step-00000004"}
    assert same(Checkpoint(tmp_path / "step-00000004").load("optimizer"), state(3))


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "object": (lambda: [Component("a", {"x": [print]})], TypeError, r"a\['x'\]\[0\] is a builtin_function"),
    "same name": (lambda: [Component("a", 1), Component("a", 2)], ValueError, "several components are named a"),
    "path": (lambda: [Component("../a", 1)], ValueError, "component name '../a' cannot be a file's"),
    "dot": (lambda: [Component("a.b", 1)], ValueError, "component name 'a.b' cannot be"),
    "manifest": (lambda: [Component("manifest", 1)], ValueError, "component name 'manifest'"),
    "nan": (
        lambda: [Component("a", {"w": torch.tensor([1, float("nan")])}, must_be_finite=True)],
        CheckpointError,
        "tensor 'w' of component 'a' has values that are inf or NaN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        save(tmp_path, Job(1, make()))
    assert names(tmp_path) == set()


def test_what_the_manifest_cannot_hold_is_refused_when_the_job_is_made() -> None:
    with pytest.raises(TypeError, match=r"configuration\['model'\] is a type"):
        Job(1, [], {"model": torch.nn.Linear})
    with pytest.raises(TypeError, match="metrics has tensors in loss"):
        Job(1, [], metrics={"loss": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="step=-1 is not a count"):
        Job(-1, [])


def test_names_that_mean_something_to_the_format_can_be_keys(tmp_path: Path) -> None:
    tensors = {"__metadata__": torch.ones(2), "$": torch.zeros(1), "a": {"b": torch.ones(3)}, "a.b": torch.zeros(3)}
    assert same(Checkpoint(save(tmp_path, Job(1, [Component("a", tensors)]))).load("a"), tensors)


def test_inf_is_saved_where_finite_is_not_asked_for(tmp_path: Path) -> None:
    mask = {"mask": torch.tensor([float("-inf"), 0.0])}
    assert same(Checkpoint(save(tmp_path, Job(1, [Component("a", mask)]))).load("a"), mask)


# Two nodes of unequal size: ranks 0, 1, 2 and ranks 3, 4.
NODES = [world(0, 5, 0, 3), world(1, 5, 1, 3), world(2, 5, 2, 3), world(3, 5, 0, 2), world(4, 5, 1, 2)]
ALL_PATTERNS = [Component(p.value.lower(), {"t": torch.ones(1)}, p) for p in Pattern]
SHARED_FILES = [
    {"replicated", "global", "per_rank.rank-0", "per_node.node-0"},
    {"per_rank.rank-1"},
    {"per_rank.rank-2"},
    {"per_rank.rank-3", "per_node.node-3"},
    {"per_rank.rank-4"},
]
PER_NODE_FILES = [*SHARED_FILES[:3], SHARED_FILES[3] | {"replicated"}, SHARED_FILES[4]]


@pytest.mark.parametrize(("disk", "expected"), [(Disk.SHARED, SHARED_FILES), (Disk.PER_NODE, PER_NODE_FILES)])
def test_who_writes_what(disk: Disk, expected: list[set[str]]) -> None:
    for each, stems in zip(NODES, expected, strict=True):
        pieces = pieces_of(ALL_PATTERNS, each, disk)
        assert len(pieces) == len(stems)
        assert {name for piece in pieces for name in piece.texts} == {f"{stem}.json" for stem in stems}
        assert {name for piece in pieces for name in piece.tensors} == {f"{stem}.safetensors" for stem in stems}
    assert writers(NODES[4], disk) == (range(5) if disk is Disk.SHARED else range(3, 5))
    assert part_of(Pattern.PER_NODE, NODES[4]) == "node-3"


@pytest.mark.parametrize(
    ("sizes", "num_shards", "expected"),
    [
        ({}, 3, []),
        ({"a": 5}, 1, [["a"]]),
        ({"a": 5}, 4, [["a"]]),
        ({"a": 1, "b": 9, "c": 5, "d": 4}, 2, [["b", "a"], ["c", "d"]]),
        ({"a": 0, "b": 0, "c": 0}, 2, [["a", "b", "c"], []]),
    ],
)
def test_shards_are_about_equal(sizes: dict[str, int], num_shards: int, expected: list[list[str]]) -> None:
    assert split(sizes, num_shards) == expected


def save_together(root: Path, size: int, **options: Any) -> list[Path | None]:
    token = saving.new_token()

    def worker(rank: int) -> Path | None:
        mine = Job(5, components(5, rank), token=token)
        return save(root, mine, world(rank, size), timeout_s=20, **options)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(worker, range(size)))


def test_workers_write_one_checkpoint_together(tmp_path: Path) -> None:
    folders = save_together(tmp_path, 3)
    assert folders == [tmp_path / "step-00000005", None, None]
    checkpoint = Checkpoint(tmp_path / "step-00000005")
    assert verify(checkpoint.folder) == []
    assert checkpoint.manifest.world_size == 3
    assert checkpoint.parts("rng") == ("rank-0", "rank-1", "rank-2")
    assert checkpoint.load("rng", "rank-2") == {"seed": 5, "rank": 2}
    with pytest.raises(CheckpointError, match=r"'rng' of .* has no part 'rank-3': it has rank-0, rank-1, rank-2"):
        checkpoint.load("rng", "rank-3")
    assert not any("written" in name for name in names(checkpoint.folder))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicated_tensors_can_be_written_in_shards(size: int, tmp_path: Path) -> None:
    save_together(tmp_path, size, num_shards=size)
    checkpoint = Checkpoint(tmp_path / "step-00000005")
    for component in components(5)[:2]:
        assert same(checkpoint.load(component.name), component.state)
    # The model has two tensors, so two shards at most.
    index = json.loads((checkpoint.folder / "model.safetensors.index.json").read_text())
    expected = {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
    assert index == {"metadata": {"total_size": 6 * 4 * 4 + 3 * 4}, "weight_map": expected}
    for name, file in expected.items():
        assert same(load_file(checkpoint.folder / file)[name], components(5)[0].state[name])


def test_disks_of_their_own_each_get_a_checkpoint(tmp_path: Path) -> None:
    def worker(each: World) -> Path | None:
        root = tmp_path / f"node-{each.rank - each.local_rank}"
        return save(root, Job(5, ALL_PATTERNS, token="t"), each, disk=Disk.PER_NODE, timeout_s=20)

    for name in ("node-0", "node-3"):
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(len(NODES)) as threads:
        list(threads.map(worker, NODES))
    first, second = (Checkpoint(tmp_path / node / "step-00000005") for node in ("node-0", "node-3"))
    assert first.parts("per_rank") == ("rank-0", "rank-1", "rank-2")
    assert second.parts("per_rank") == ("rank-3", "rank-4")
    assert same(first.load("replicated"), second.load("replicated"))
    assert "global" not in second.manifest.contents.components


def test_a_worker_that_fails_fails_the_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    token = saving.new_token()
    bad = [Component("rng", {"t": torch.tensor(float("nan"))}, Pattern.PER_RANK, must_be_finite=True)]
    good = [Component("rng", {"t": torch.tensor(1.0)}, Pattern.PER_RANK)]
    failed = threading.Event()

    def first() -> None:
        failed.wait(20)
        save(tmp_path, Job(5, good, token=token), world(0, 2), timeout_s=20)

    def second() -> None:
        try:
            save(tmp_path, Job(5, bad, token=token), world(1, 2))
        finally:
            failed.set()

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(first), threads.submit(second)]
    with pytest.raises(
        CheckpointError, match=r"step 5 was not saved in .*: rank 1 could not write its part: tensor 't'"
    ):
        ends[0].result()
    with pytest.raises(CheckpointError, match=f"'t' of component 'rng' has values .* still {tmp_path}/step-00000001"):
        ends[1].result()
    assert names(tmp_path) == {"step-00000001"}


def test_a_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 did not finish its part in time: .*rank-1.written.json did"):
        save(tmp_path, job(5), world(0, 2), timeout_s=0.05)
    assert names(tmp_path) == set()


def test_a_folder_that_vanishes_while_waiting_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shutil import rmtree

    monkeypatch.setattr(saving.Event, "wait", lambda *_: rmtree(tmp_path))
    with pytest.raises(CheckpointError, match=r"partial-.* vanished while rank 1 was writing its part"):
        save(tmp_path, job(5), world(0, 2), timeout_s=20)


def test_a_run_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was not saved in .*/gone: No such file or directory .*no older one"):
        save(tmp_path / "gone", job(5))
    assert complete_steps(tmp_path / "gone") == []
    assert names(tmp_path) == set()
