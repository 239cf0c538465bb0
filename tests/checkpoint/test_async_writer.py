"""Saving beside the training: what is written is the state at the time of `save`, whatever happens afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import components, job, same, settled, world

from paceline.checkpoint import writer as writer_module
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps, new_token
from paceline.checkpoint.host_copy import HostCopy
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.pieces import Component
from paceline.checkpoint.reading import Checkpoint, verify
from paceline.checkpoint.saving import Job
from paceline.checkpoint.writer import AsyncWriter


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing begins only when this is set."""
    event, save_pieces = threading.Event(), writer_module.save_pieces

    def save_later(*arguments: Any) -> Any:
        assert event.wait(20)
        return save_pieces(*arguments)

    monkeypatch.setattr(writer_module, "save_pieces", save_later)
    yield event
    event.set()


def test_training_may_go_on_while_the_state_is_written(tmp_path: Path, gate: threading.Event) -> None:
    with AsyncWriter(tmp_path) as writer:
        position = {"step": 1}
        first = Job(1, components(1), position=position)
        expected = components(1)[0].state
        writer.save(first)
        assert writer.is_busy
        for component in first.components[:2]:
            component.state["weight"].zero_()
        position["step"] = 2
        gate.set()
        writer.wait()
        assert not writer.is_busy
    checkpoint = Checkpoint(tmp_path / "step-00000001")
    assert same(checkpoint.load("model"), expected)
    assert checkpoint.manifest.position == {"step": 1}


def test_a_second_save_waits_for_the_first_and_spoils_nothing(tmp_path: Path, gate: threading.Event) -> None:
    with AsyncWriter(tmp_path) as writer, ThreadPoolExecutor(1) as trainer:
        writer.save(job(1))
        second: Future[bool] = trainer.submit(writer.save, job(2))
        assert not wait([second], timeout=0.1).done
        gate.set()
        assert second.result(20)
    for step in (1, 2):
        assert same(Checkpoint(tmp_path / f"step-{step:08d}").load("model"), components(step)[0].state)


def test_a_save_can_be_skipped_while_another_is_under_way(tmp_path: Path, gate: threading.Event) -> None:
    with AsyncWriter(tmp_path) as writer:
        assert writer.save(job(1), skip_if_busy=True)
        assert not writer.save(job(2), skip_if_busy=True)
        gate.set()
        writer.wait()
        assert writer.save(job(3), skip_if_busy=True)
    assert complete_steps(tmp_path) == [1, 3]


def test_leaving_the_block_finishes_the_save_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with AsyncWriter(tmp_path) as writer:
        writer.save(job(1))
    assert complete_steps(tmp_path) == [1]
    assert threading.active_count() == before


def fails(*_: Any) -> None:
    raise CheckpointError("the disk is on fire")


def test_a_failure_is_told_once_by_whatever_is_called_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "save_pieces", fails)
            writer.save(job(1))
            error = settled(writer).poll()
            assert isinstance(error, CheckpointError)
            assert str(error) == "the disk is on fire"
            assert writer.poll() is None
            writer.save(job(2))
            settled(writer)
        with pytest.raises(CheckpointError, match="the disk is on fire"):
            writer.save(job(3))
        writer.save(job(4))
        writer.wait()
    assert complete_steps(tmp_path) == [4]


def test_a_failure_nobody_asked_about_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "save_pieces", fails)
    with pytest.raises(CheckpointError, match="the disk is on fire"), AsyncWriter(tmp_path) as writer:
        writer.save(job(1))
    with pytest.raises(ZeroDivisionError) as caught, AsyncWriter(tmp_path) as writer:
        writer.save(job(1))
        raise ZeroDivisionError
    assert caught.value.__notes__ == ["the disk is on fire"]


def test_an_error_of_ours_is_not_taken_for_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "save_pieces", lambda *_: 1 / 0)
    with AsyncWriter(tmp_path) as writer:
        writer.save(job(1))
        with pytest.raises(ZeroDivisionError):
            settled(writer).poll()


def test_what_cannot_be_stored_is_told_by_save_itself(tmp_path: Path) -> None:
    with AsyncWriter(tmp_path) as writer:
        with pytest.raises(TypeError, match=r"model\['hook'\] is a builtin_function"):
            writer.save(Job(1, [Component("model", {"hook": print})]))
        writer.save(job(2))
    assert complete_steps(tmp_path) == [2]


def test_the_best_two_and_the_last_are_kept(tmp_path: Path) -> None:
    left = []
    with AsyncWriter(tmp_path, keep=Keep(best=2, metric="loss")) as writer:
        for step, loss in enumerate([3, 2, 2.5, 2.2, 2.1, 9], 1):
            writer.save(Job(step, components(step), metrics={"loss": loss}))
            writer.wait()
            left.append(complete_steps(tmp_path))
    assert left == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [2, 5, 6]]


def test_a_damaged_checkpoint_does_not_push_out_an_intact_one(tmp_path: Path) -> None:
    with AsyncWriter(tmp_path, keep=Keep(last=2)) as writer:
        for step in (1, 2):
            writer.save(job(step))
        writer.wait()
        (tmp_path / "step-00000002" / "model.json").unlink()
        writer.save(job(3))
    assert complete_steps(tmp_path) == [1, 2, 3]


def test_workers_save_together(tmp_path: Path) -> None:
    token = new_token()

    def worker(rank: int) -> None:
        with AsyncWriter(tmp_path, world(rank, 3), num_shards=3, keep=Keep(last=1), timeout_s=20) as writer:
            writer.save(Job(1, components(1, rank), token=token))
            writer.save(Job(2, components(2, rank), token=token))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(worker, range(3)))
    assert complete_steps(tmp_path) == [2]
    checkpoint = Checkpoint(tmp_path / "step-00000002")
    assert verify(checkpoint.folder) == []
    assert same(checkpoint.load("optimizer"), components(2)[1].state)
    assert checkpoint.load("rng", "rank-2") == {"seed": 2, "rank": 2}


def test_prepared_memory_is_what_saves_are_copied_into(tmp_path: Path) -> None:
    with AsyncWriter(tmp_path) as writer:
        writer.prepare(components(1))
        writer.wait()
        prepared = writer._copy._memory.data_ptr()
        for step in (1, 2):
            writer.save(job(step))
        writer.wait()
        assert writer._copy._memory.data_ptr() == prepared
    assert complete_steps(tmp_path) == [1, 2]


def test_host_memory_is_used_again_and_grows_when_it_must() -> None:
    copy = HostCopy()
    tensors = [
        torch.randn(5, 3),
        torch.tensor(2, dtype=torch.int8),
        torch.empty(0, 2),
        torch.arange(6.0).view(2, 3).t(),
    ]
    first, _ = copy.take(tensors)
    places = [place.data_ptr() for place in first]
    assert all(same(a, b) for a, b in zip(first, tensors, strict=True))
    again, _ = copy.take([tensor + 1 for tensor in tensors])
    assert [place.data_ptr() for place in again] == places
    smaller, _ = copy.take([torch.ones(7)])
    assert smaller[0].data_ptr() == places[0]
    larger = torch.randn(1000)
    assert same(copy.take([larger])[0][0], larger)
    assert all(pointer % 64 == 0 for place, pointer in zip(first, places, strict=True) if place.numel())


def test_a_tied_tensor_is_copied_once_and_found_under_both_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tied = torch.randn(1000)
    with AsyncWriter(tmp_path) as writer:
        writer.save(Job(1, [Component("model", {"embed": tied, "head": tied})]))
        writer.wait()
        assert writer._copy._memory.numel() < 1.5 * tied.nbytes
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
    with AsyncWriter(tmp_path) as writer:
        writer.save(Job(1, [Component("model", {"weight": weight, "half": half, "step": torch.tensor(3.0)})]))
        assert writer._copy._memory.is_pinned()
        weight.zero_()
        half.fill_(7)
    assert same(Checkpoint(tmp_path / "step-00000001").load("model"), expected)
