"""Checkpoints on the disk: their files, which worker writes which, and saving in the background."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_state import components, job, same, save, save_steps, settled, state, world
from safetensors.torch import load_file

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps, new_token
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.policy import Retention
from paceline.checkpoint.reader import Checkpoint, verify
from paceline.checkpoint.run_folder import writer_ranks
from paceline.checkpoint.staging import HostStaging
from paceline.checkpoint.writer import AsyncWriter, Component, files_of, split
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
    metrics = {"loss": float("nan"), "accuracy": 0.5}
    manifest = Manifest(7, configuration=configuration, position={"epoch": 1, "step": 7}, metrics=metrics)
    checkpoint = Checkpoint(save(tmp_path, (manifest, components(3))))
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
    "path": (lambda: [Component("../a", 1)], ValueError, "component name '../a' cannot be a file name"),
    "dot": (lambda: [Component("a.b", 1)], ValueError, "component name 'a.b' cannot be"),
    "manifest": (lambda: [Component("manifest", 1)], ValueError, "component name 'manifest'"),
    "nan in float8": (
        lambda: [Component("a", {"w": torch.tensor([1, torch.nan]).to(torch.float8_e4m3fn)}, must_be_finite=True)],
        CheckpointError,
        "tensor 'w' of component 'a' contains inf or NaN",
    ),
    "nan": (
        lambda: [Component("a", {"w": torch.tensor([1, float("nan")])}, must_be_finite=True)],
        CheckpointError,
        "tensor 'w' of component 'a' contains inf or NaN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        save(tmp_path, (Manifest(1), make()))
    assert names(tmp_path) == set()


def test_names_that_mean_something_to_the_format_can_be_keys(tmp_path: Path) -> None:
    tensors = {"__metadata__": torch.ones(2), "$": torch.zeros(1), "a": {"b": torch.ones(3)}, "a.b": torch.zeros(3)}
    assert same(Checkpoint(save(tmp_path, (Manifest(1), [Component("a", tensors)]))).load("a"), tensors)


def test_inf_is_saved_where_finite_is_not_asked_for(tmp_path: Path) -> None:
    mask = {"mask": torch.tensor([float("-inf"), 0.0])}
    assert same(Checkpoint(save(tmp_path, (Manifest(1), [Component("a", mask)]))).load("a"), mask)


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


@pytest.mark.parametrize(("shared_disk", "stems_by_rank"), [(True, SHARED_FILES), (False, PER_NODE_FILES)])
def test_who_writes_what(shared_disk: bool, stems_by_rank: list[set[str]]) -> None:
    for each, stems in zip(NODES, stems_by_rank, strict=True):
        files = files_of(ALL_PATTERNS, each, writer_ranks(each, shared_disk=shared_disk))
        expected = {f"{stem}{suffix}" for stem in stems for suffix in (".json", ".safetensors")}
        assert set(files) == expected
    assert writer_ranks(NODES[4], shared_disk=shared_disk) == (range(5) if shared_disk else range(3, 5))
    assert Pattern.PER_NODE.part_of(NODES[4]) == "node-3"


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


def save_together(root: Path, size: int, **options: Any) -> None:
    token = new_token()

    def worker(rank: int) -> None:
        save(root, (Manifest(5), components(5, rank)), world(rank, size), token=token, timeout_s=20, **options)

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(worker, range(size)))


def test_workers_write_one_checkpoint_together(tmp_path: Path) -> None:
    save_together(tmp_path, 3)
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
    def worker(each: World) -> None:
        root = tmp_path / f"node-{each.rank - each.local_rank}"
        save(root, (Manifest(5), ALL_PATTERNS), each, shared_disk=False, timeout_s=20)

    with ThreadPoolExecutor(len(NODES)) as threads:
        list(threads.map(worker, NODES))
    first, second = (Checkpoint(tmp_path / node / "step-00000005") for node in ("node-0", "node-3"))
    assert first.parts("per_rank") == ("rank-0", "rank-1", "rank-2")
    assert second.parts("per_rank") == ("rank-3", "rank-4")
    assert same(first.load("replicated"), second.load("replicated"))
    assert "global" not in second.manifest.contents.components


def test_a_worker_that_fails_fails_the_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    bad = [Component("rng", {"t": torch.tensor(float("nan"))}, Pattern.PER_RANK, must_be_finite=True)]
    good = [Component("rng", {"t": torch.tensor(1.0)}, Pattern.PER_RANK)]
    failed = threading.Event()

    def first() -> None:
        failed.wait(20)
        save(tmp_path, (Manifest(5), good), world(0, 2), timeout_s=20)

    def second() -> None:
        try:
            save(tmp_path, (Manifest(5), bad), world(1, 2))
        finally:
            failed.set()

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(first), threads.submit(second)]
    with pytest.raises(
        CheckpointError, match=r"step 5 was not saved in .*: rank 1 could not write its part: tensor 't'"
    ):
        ends[0].result()
    with pytest.raises(CheckpointError, match=f"'rng' contains inf or NaN.* checkpoint is {tmp_path}/step-00000001"):
        ends[1].result()
    assert names(tmp_path) == {"step-00000001"}


def test_a_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 did not finish its part in time: .*rank-1.written.json did"):
        save(tmp_path, job(5), world(0, 2), timeout_s=0.05)
    assert names(tmp_path) == set()


def test_a_folder_that_vanishes_while_waiting_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shutil import rmtree

    with closing(AsyncWriter(tmp_path, world(0, 2), timeout_s=20)) as writer:
        monkeypatch.setattr("paceline.checkpoint.writer.sleep", lambda _: rmtree(tmp_path))
        writer.save(*job(5))
        error = settled(writer).poll()
    assert "vanished while rank 1 was writing its part" in str(error)


# In the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing begins only when this is set."""
    event, write = threading.Event(), AsyncWriter._write

    def write_later(*arguments: Any) -> None:
        assert event.wait(20)
        write(*arguments)

    monkeypatch.setattr(AsyncWriter, "_write", write_later)
    yield event
    event.set()


def test_training_may_go_on_while_the_state_is_written(tmp_path: Path, gate: threading.Event) -> None:
    with closing(AsyncWriter(tmp_path)) as writer:
        position = {"step": 1}
        first = components(1)
        expected = components(1)[0].state
        writer.save(Manifest(1, position=position), first)
        assert writer.is_busy
        for component in first[:2]:
            component.state["weight"].zero_()
        gate.set()
        writer.wait()
        assert not writer.is_busy
    checkpoint = Checkpoint(tmp_path / "step-00000001")
    assert same(checkpoint.load("model"), expected)
    assert checkpoint.manifest.position == {"step": 1}


def test_a_second_save_waits_for_the_first_and_spoils_nothing(tmp_path: Path, gate: threading.Event) -> None:
    with closing(AsyncWriter(tmp_path)) as writer, ThreadPoolExecutor(1) as trainer:
        writer.save(*job(1))
        second: Future[None] = trainer.submit(writer.save, *job(2))
        assert not wait([second], timeout=0.1).done
        gate.set()
        second.result(20)
    for step in (1, 2):
        assert same(Checkpoint(tmp_path / f"step-{step:08d}").load("model"), components(step)[0].state)


def test_closing_finishes_the_save_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with closing(AsyncWriter(tmp_path)) as writer:
        writer.save(*job(1))
    assert complete_steps(tmp_path) == [1]
    assert threading.active_count() == before


def fails(*_: Any) -> None:
    raise CheckpointError("the disk is on fire")


def test_a_failure_is_told_once_by_whatever_is_called_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AsyncWriter(tmp_path)) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(AsyncWriter, "_write", fails)
            writer.save(*job(1))
            error = settled(writer).poll()
            assert isinstance(error, CheckpointError)
            assert str(error) == "the disk is on fire"
            assert writer.poll() is None
            writer.save(*job(2))
            settled(writer)
        with pytest.raises(CheckpointError, match="the disk is on fire"):
            writer.save(*job(3))
        writer.save(*job(4))
        writer.wait()
    assert complete_steps(tmp_path) == [4]


def test_a_failure_nobody_asked_about_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncWriter, "_write", fails)
    with pytest.raises(CheckpointError, match="the disk is on fire"), closing(AsyncWriter(tmp_path)) as writer:
        writer.save(*job(1))


def test_an_error_of_ours_is_not_taken_for_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncWriter, "_write", lambda *_: 1 / 0)
    with closing(AsyncWriter(tmp_path)) as writer:
        writer.save(*job(1))
        with pytest.raises(ZeroDivisionError):
            settled(writer).poll()


def test_what_cannot_be_stored_is_told_by_save_itself(tmp_path: Path) -> None:
    with closing(AsyncWriter(tmp_path)) as writer:
        with pytest.raises(TypeError, match=r"model\['hook'\] is a builtin_function"):
            writer.save(Manifest(1), [Component("model", {"hook": print})])
        writer.save(*job(2))
    assert complete_steps(tmp_path) == [2]


def test_the_best_two_and_the_last_are_kept(tmp_path: Path) -> None:
    left = []
    with closing(AsyncWriter(tmp_path, retention=Retention(best=("loss", 2)))) as writer:
        for step, loss in enumerate([3, 2, 2.5, 2.2, 2.1, 9], 1):
            writer.save(Manifest(step, metrics={"loss": loss}), components(step))
            writer.wait()
            left.append(complete_steps(tmp_path))
    assert left == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [2, 5, 6]]


def test_a_damaged_checkpoint_does_not_push_out_an_intact_one(tmp_path: Path) -> None:
    with closing(AsyncWriter(tmp_path, retention=Retention(last=2))) as writer:
        for step in (1, 2):
            writer.save(*job(step))
        writer.wait()
        (tmp_path / "step-00000002" / "model.json").unlink()
        writer.save(*job(3))
    assert complete_steps(tmp_path) == [1, 2, 3]


def test_an_error_after_saving_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(root: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle", str(root))

    monkeypatch.setattr("paceline.checkpoint.writer.complete_steps", unreadable)
    with closing(AsyncWriter(tmp_path, retention=Retention(last=1))) as writer:
        writer.save(*job(1))
    assert f"step 1 was saved, but outdated ones could not be deleted: Stale file handle ({tmp_path})" in caplog.text
    assert complete_steps(tmp_path) == [1]


def test_the_time_in_which_a_run_was_suspended_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system suspends all workers while they save, and continues them an hour later."""
    now_s, intervals_s, has_continued = [0.0], iter([3600.0]), threading.Event()

    def sleep(seconds: float) -> None:
        now_s[0] += next(intervals_s, seconds)
        if now_s[0] > 3600.0:
            has_continued.set()

    for module in ("paceline.checkpoint.writer", "paceline.core.timing"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: now_s[0])
    monkeypatch.setattr("paceline.checkpoint.writer.sleep", sleep)
    part = Manifest(1), [Component("random", {"seed": 1}, Pattern.PER_RANK)]
    with closing(AsyncWriter(tmp_path, world(0, 2))) as first, closing(AsyncWriter(tmp_path, world(1, 2))) as late:
        first.save(*part)
        assert has_continued.wait(20.0)
        late.save(*part)
        first.wait()
    assert complete_steps(tmp_path) == [1]


def test_workers_save_together(tmp_path: Path) -> None:
    token = new_token()

    def worker(rank: int) -> None:
        options: Any = {"token": token, "num_shards": 3, "retention": Retention(last=1), "timeout_s": 20}
        with closing(AsyncWriter(tmp_path, world(rank, 3), **options)) as writer:
            writer.save(Manifest(1), components(1, rank))
            writer.save(Manifest(2), components(2, rank))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(worker, range(3)))
    assert complete_steps(tmp_path) == [2]
    checkpoint = Checkpoint(tmp_path / "step-00000002")
    assert verify(checkpoint.folder) == []
    assert same(checkpoint.load("optimizer"), components(2)[1].state)
    assert checkpoint.load("rng", "rank-2") == {"seed": 2, "rank": 2}


def test_prepared_memory_is_what_saves_are_copied_into(tmp_path: Path) -> None:
    with closing(AsyncWriter(tmp_path)) as writer:
        writer.reserve(components(1))
        writer.wait()
        prepared = writer._staging._memory.data_ptr()
        for step in (1, 2):
            writer.save(*job(step))
        writer.wait()
        assert writer._staging._memory.data_ptr() == prepared
    assert complete_steps(tmp_path) == [1, 2]


def test_host_memory_is_used_again_and_grows_when_it_must() -> None:
    staging = HostStaging()
    tensors = [
        torch.randn(5, 3),
        torch.tensor(2, dtype=torch.int8),
        torch.empty(0, 2),
        torch.arange(6.0).view(2, 3).t(),
    ]
    first, _ = staging.copy(tensors)
    places = [place.data_ptr() for place in first]
    assert all(same(a, b) for a, b in zip(first, tensors, strict=True))
    again, _ = staging.copy([tensor + 1 for tensor in tensors])
    assert [place.data_ptr() for place in again] == places
    smaller, _ = staging.copy([torch.ones(7)])
    assert smaller[0].data_ptr() == places[0]
    larger = torch.randn(1000)
    assert same(staging.copy([larger])[0][0], larger)
    assert all(pointer % 64 == 0 for place, pointer in zip(first, places, strict=True) if place.numel())


def test_a_tied_tensor_is_copied_once_and_found_under_both_names(tmp_path: Path) -> None:
    tied = torch.randn(1000)
    with closing(AsyncWriter(tmp_path)) as writer:
        writer.save(Manifest(1), [Component("model", {"embed": tied, "head": tied})])
        writer.wait()
        assert writer._staging._memory.numel() < 1.5 * tied.nbytes
    loaded = load_file(tmp_path / "step-00000001" / "model.safetensors")
    assert torch.equal(loaded["embed"], tied)
    assert torch.equal(loaded["head"], tied)
    restored = Checkpoint(tmp_path / "step-00000001").load("model")
    assert restored["embed"] is restored["head"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_the_gpu_is_copied_without_stopping_it(tmp_path: Path) -> None:
    weight = torch.randn(2000, 2000, device="cuda")
    half = torch.randn(999, device="cuda").bfloat16()
    expected = {"weight": weight.cpu(), "half": half.cpu(), "step": torch.tensor(3.0)}
    with closing(AsyncWriter(tmp_path)) as writer:
        writer.save(Manifest(1), [Component("model", {"weight": weight, "half": half, "step": torch.tensor(3.0)})])
        assert writer._staging._memory.is_pinned()
        weight.zero_()
        half.fill_(7)
    assert same(Checkpoint(tmp_path / "step-00000001").load("model"), expected)


def test_a_worker_that_leaves_does_not_wait_for_anothers_part(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path, world(0, 2))
    writer.save(*job(5))
    writer.abandon()
    with pytest.raises(CheckpointError, match="the run ended before rank 1 had written its part"):
        writer.close()
    assert complete_steps(tmp_path) == []


def test_an_abandoned_save_waits_a_moment_for_a_part_that_is_still_written(tmp_path: Path) -> None:
    first, second = (AsyncWriter(tmp_path, world(rank, 2)) for rank in range(2))
    first.save(*job(5))
    first.abandon(wait_s=30)
    second.save(*job(5))
    first.close()
    second.close()
    assert complete_steps(tmp_path) == [5]


def test_without_flushing_the_same_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", job(5))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: pytest.fail("the disk was waited for"))
        with closing(AsyncWriter(tmp_path / "b", flush=False)) as writer:
            writer.save(*job(5))
    files = [{path.name for path in (tmp_path / root / "step-00000005").iterdir()} for root in ("a", "b")]
    assert files[0] == files[1]


def test_the_format_is_that_of_the_version_before(tmp_path: Path) -> None:
    """Two workers of paceline 0.2.0 wrote `golden`: it loads, and the same state is stored in the same bytes."""
    golden = Checkpoint(Path(__file__).parent / "golden" / "step-00000003")
    assert verify(golden.folder) == []
    old = golden.manifest
    mixed = golden.load("mixed")
    assert mixed["tuple"] == (1, 2.5, float("inf"))
    assert same(mixed[3], torch.arange(4).to(torch.uint16))
    assert mixed["numpy"][1].dtype == np.uint32

    def worker(rank: int) -> None:
        manifest = Manifest(3, configuration=old.configuration, position=old.position, metrics=old.metrics)
        parts = {name: golden.load_own(name, world(rank, 2)) for name in old.contents.components}
        saved = [Component(name, state, old.contents.components[name].pattern) for name, state in parts.items()]
        save(tmp_path, (manifest, saved), world(rank, 2), num_shards=2, timeout_s=20)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(worker, range(2)))
    new = Checkpoint(tmp_path / "step-00000003")
    assert names(new.folder) == names(golden.folder)
    for name in old.contents.files:
        assert (new.folder / name).read_bytes() == (golden.folder / name).read_bytes(), name
    same_header = {"created": old.created, "versions": old.versions}
    assert replace(new.manifest, **same_header).render() == (golden.folder / "manifest.json").read_bytes()
