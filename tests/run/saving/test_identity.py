"""Whatever the samples come from, a run resumed on another number of workers is the run that never stopped."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouping import grouped
from models import images
from resumable import run
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from worker_pool import WorkerPool, WorkersFailed

import paceline as pl
from paceline.checkpoint.errors import CheckpointError
from paceline.data.sources.tokens import TokenFile
from paceline.plan.epoch import Position
from paceline.run.saving.identity import differences

X, Y = images(90)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def weighted() -> Any:
    sampler = WeightedRandomSampler(torch.arange(1.0, 91.0), 85, generator=torch.Generator())
    return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)


FORMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a sampler": (weighted, {"micro_batch": None}),
    "a sampler, dispatched": (weighted, {"micro_batch": None, "feed": "dispatched"}),
    "a stream": (Stream, {"num_shards": 4, "shuffle_buffer": 16}),
    "a stream, dispatched": (Stream, {"num_shards": 4, "shuffle_buffer": 16, "feed": "dispatched"}),
    "readers": (lambda: TensorDataset(X, Y), {"readers": 1}),
}


@pytest.mark.parametrize("form", FORMS)
def test_resumed_on_other_workers(tmp_path: Path, pool: WorkerPool, form: str) -> None:
    def part(until: int | None, folder: Path | None = tmp_path / "run") -> str:
        make_data, settings = FORMS[form]
        return run(folder, until, data=make_data(), **settings)

    undisturbed = part(None, None)
    pool.run(part, 2, 2)  # in the middle of the first epoch
    assert part(8) != undisturbed  # of the second
    assert pool.run(part, 3, None) == [undisturbed] * 3


# Data that is not what it was.


def write_rows(path: Path, first: int) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": [[float(first + i)] * 4 for i in range(12)]})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def arrow_files(folder: Path) -> Any:
    from paceline.data.sources.arrow import ArrowSource

    if not folder.exists():
        folder.mkdir()
        for number in range(3):
            write_rows(folder / f"part-{number}.arrow", 12 * number)
    return ArrowSource(folder)


def token_file(folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    if not (folder / "t.bin").exists():
        np.arange(145, dtype=np.uint16).tofile(folder / "t.bin")
    return TokenFile(folder / "t.bin", 4, targets=False)


ROWS = torch.arange(144.0).reshape(36, 4)


def steps_of(root: Path, until: int | None, data: Any, **settings: Any) -> list[Any]:
    """The samples of each step until the run is stopped, by their first number."""
    seen: list[Any] = []
    with pl.Trainer.setup(
        lambda: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=1e-4), data=data,
        **grouped(
            quiet=True, checkpoints=pl.Checkpoints(root, every_steps=1),
            **{"global_batch": 6, "micro_batch": 2, **settings},
        ),
    ) as trainer:  # fmt: skip
        for epoch in trainer.epochs(max_steps=until or 6):
            for batch in epoch:
                x = (batch["x"] if isinstance(batch, dict) else batch).float()
                seen += x[:, 0].tolist()
                trainer.backward(trainer.model(x).mean())
                trainer.step()
    return seen


def renamed(folder: Path) -> Any:
    (folder / "part-0.arrow").rename(folder / "part-9.arrow")
    return arrow_files(folder)


def rewritten(folder: Path) -> Any:
    write_rows(folder / "part-1.arrow", 50)
    return arrow_files(folder)


def other_tokens(folder: Path) -> Any:
    np.arange(145, dtype=np.uint16)[::-1].tofile(folder / "t.bin")
    return token_file(folder)


def hf(rows: torch.Tensor) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": rows.tolist()}).with_format("torch")


class Declared(IterableDataset[Any]):
    def __init__(self, version: str | None) -> None:
        self.fingerprint = version

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


CHANGES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "a renamed file": (arrow_files, renamed,
        r"data \(files, number 1\): 'part-0.arrow \(\d+-\w+ bytes, content \w+\)' in the checkpoint, 'part-1.arrow"),
    "rewritten rows": (arrow_files, rewritten, r"data \(files, number 2\): 'part-1.arrow .* now"),
    "tokens": (token_file, other_tokens, r"data \(files, number 1\): 't.bin \(290 bytes, content \w+\)' in"),
    "a tensor": (lambda _: ROWS, lambda _: ROWS.flip(0), r"data \(content\): '\w+' in the checkpoint, '\w+' now"),
    "a list": (lambda _: list(ROWS), lambda _: list(ROWS + 1), r"data \(content\)"),
    "an HF data set": (lambda _: hf(ROWS), lambda _: hf(ROWS.flip(0)), r"data \(content\)"),
    "a stream": (lambda _: Declared("one"), lambda _: Declared("two"),
        r"data \(fingerprint\): 'one' in the checkpoint, 'two' now"),
    "columns": (lambda _: {"x": ROWS}, lambda _: {"x": ROWS.double()}, r"data \(columns\): 'x: float32 \(36, 4\)' in"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_refused_and_can_be_allowed(tmp_path: Path, pool: WorkerPool, change: str) -> None:
    before, after, text = CHANGES[change]
    run_folder, folder = tmp_path / "run", tmp_path / "data"
    steps_of(run_folder, 2, before(folder))  # in the middle of the epoch
    steps_of(run_folder, 3, before(folder))
    data = after(folder)
    with pytest.raises(CheckpointError, match=text) as caught:
        steps_of(run_folder, None, data)
    assert "or list in allow=[...] those that may differ" in str(caught.value)
    with pytest.raises(WorkersFailed) as failed:
        pool.run(steps_of, 2, run_folder, None, data)
    assert len(failed.value.errors) == 2
    for error in failed.value.errors.values():
        assert re.search(text, str(error)), error
    assert len(steps_of(run_folder, None, data, allow=["data"])) == 18


def test_a_copy_of_the_data_is_the_same_data(tmp_path: Path, pool: WorkerPool) -> None:
    seen = steps_of(tmp_path / "run", 3, arrow_files(tmp_path / "data"))
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere", copy_function=shutil.copyfile)
    parts = pool.run(lambda: steps_of(tmp_path / "run", None, arrow_files(tmp_path / "elsewhere")), 2)
    assert sorted(seen + parts[0] + parts[1]) == [float(i) for i in range(36)]


def test_an_undeclared_stream_is_warned_of_once(tmp_path: Path) -> None:
    steps_of(tmp_path, 2, Declared(None))
    with pytest.warns(UserWarning, match=r"resumed with a stream without a fingerprint \(Declared\).*`fingerprint`"):
        steps_of(tmp_path, 4, Declared(None))
    facts = {"type": "Declared", "unchecked": "a stream without a fingerprint"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert differences({"data": facts}, {"data": facts}, ["data"], Position()) == []
        assert differences({"data": facts}, {"data": {"type": "Declared"}}, [], Position()) == []  # on other ranks


def test_a_hint_that_differs_is_only_told() -> None:
    before, now = ({"content": "1", "hint": f"fingerprint {n} of datasets"} for n in "ab")
    with pytest.warns(UserWarning, match="the data may differ elsewhere: fingerprint a of"):
        assert differences({"data": before}, {"data": now}, [], Position()) == []


@pytest.mark.parametrize("saved", [{}, {"data": None}, {"data": "data in the order of RandomSampler"}])
def test_checkpoints_without_a_fingerprint_are_resumed(saved: dict[str, Any]) -> None:
    now = {"data": {"type": "list", "content": "1"}, "order": "RandomSampler"}
    assert differences(saved, now, [], Position()) == []


def test_another_sampler_may_come_between_epochs_only() -> None:
    saved, now = {"order": "RandomSampler"}, {"order": None}
    assert differences(saved, now, [], Position()) == ["order: 'RandomSampler' in the checkpoint, None now"]
    assert differences(saved, now, ["order"], Position(1)) == []
    assert "may change between epochs only" in differences(saved, now, ["order"], Position(1, 3))[0]
