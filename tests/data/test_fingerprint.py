"""What data says about what it holds: the same for a copy, another for other samples or another order."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import paceline as pl
from paceline.data.adopt import LoadingOptions, adopt
from paceline.data.fingerprint import Facts, facts_of, positions
from paceline.data.sources.base import as_source
from paceline.data.sources.images import ImageFolder
from paceline.data.sources.skip_bad import SkipBad
from paceline.data.sources.tokens import TokenFile

X = torch.arange(60.0).reshape(20, 3)


@dataclass
class Record:
    x: Any
    label: int


class Own(Dataset):
    def __init__(self, fingerprint: Any) -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nobody asked for a sample")


def changed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[7, 1] += 1
    return x


def records(x: torch.Tensor) -> list[Any]:
    return [Record({"x": row, "parts": [1, None, ("a", 2.5)]}, i) for i, row in enumerate(x)]


PAIRS = [
    (X, changed(X)),
    ((X, X), (X, changed(X))),
    ({"a": X}, {"b": X}),
    (X, X.double()),
    (X, X.reshape(20, 3, 1)),
    (X.numpy(), changed(X).numpy()),
    (list(X), list(changed(X))),
    (list(X), list(X.flip(0))),
    (records(X), records(changed(X))),
    (["a", "b", "c"], ["a", "c", "b"]),
    ([{"text": "a" * 9000}], [{"text": "a" * 8999 + "b"}]),
    ([np.int64(3)], [np.int64(4)]),
    ([{"a": 1}], [{"b": 1}]),
    (TensorDataset(X), TensorDataset(changed(X))),
    (Subset(TensorDataset(X), [1, 2]), Subset(TensorDataset(X), [2, 1])),
    (Subset(list(X), [1, 2]), Subset(list(changed(X)), [1, 2])),
    (ConcatDataset([TensorDataset(X), TensorDataset(X)]), ConcatDataset([TensorDataset(X), TensorDataset(changed(X))])),
    (StackDataset(a=list(X)), StackDataset(a=list(changed(X)))),
    (Own("one"), Own("two")),
    (Own(lambda: 1), Own(lambda: 2)),
    (SkipBad(as_source(X)), SkipBad(as_source(changed(X)))),
]  # fmt: skip


@pytest.mark.parametrize(("data", "other"), PAIRS, ids=range(len(PAIRS)))
def test_other_samples_or_another_order(data: Any, other: Any) -> None:
    own, same = facts_of(as_source(data)), facts_of(as_source(data))
    assert own == same
    assert own != facts_of(as_source(other))
    assert len(str(own)) < 1000


def test_large_data_is_compared_at_some_places() -> None:
    large = torch.zeros(20_000, 3, 8, 8)
    facts = facts_of(as_source(large))
    for layout in (large.to(memory_format=torch.channels_last), large.numpy()):
        assert facts_of(as_source(layout)) == facts
    for row in (0, -1):
        large[row] += 1
        assert facts_of(as_source(large)) != facts
        large[row] -= 1
    large[::2] += 1
    assert facts_of(as_source(large)) != facts
    assert positions(10**12, 3) == [0, (10**12 - 1) // 2, 10**12 - 1]


def test_no_sample_of_a_data_set_is_read_and_no_object_is_guessed_at() -> None:
    class Plain(Own):
        pass

    assert facts_of(as_source(Plain(None))) == {"type": "Plain"}
    opaque = facts_of(as_source([object(), 1]))
    assert opaque["unread"] == "object"
    assert opaque == facts_of(as_source([object(), 1]))
    assert opaque != facts_of(as_source([object(), 2]))


def write_arrow(path: Path, values: list[int], text: str = "") -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": values, "t": [f"{text}{v:08d}" for v in values]})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=1000)


def arrow(folder: Path) -> Any:
    from paceline.data.sources.arrow import ArrowSource

    return ArrowSource(folder)


def test_arrow_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("a", 0), ("b", 12), ("c", 24)):
        write_arrow(folder / f"{name}.arrow", list(range(start, start + 12)))
    facts = facts_of(arrow(folder))
    assert [text.split(" (")[0] for text in facts["files"]] == ["a.arrow", "b.arrow", "c.arrow"]
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert facts_of(arrow(copy)) == facts
    (copy / "a.arrow").rename(copy / "d.arrow")  # the same rows in another order
    assert facts_of(arrow(copy)) != facts
    write_arrow(folder / "b.arrow", [*range(12, 20), 99, *range(21, 24)])
    assert facts_of(arrow(folder)) != facts


def test_rows_in_the_middle_of_a_large_file(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", list(range(200_000)))
    facts = facts_of(arrow(tmp_path))
    write_arrow(tmp_path / "a.arrow", [*range(50_000), *range(149_999, 49_999, -1), *range(150_000, 200_000)])
    assert facts_of(arrow(tmp_path)) != facts


def test_many_files_are_not_listed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i:03d}.bin" for i in range(100)]
    for i, path in enumerate(paths):
        np.arange(i, i + 9, dtype=np.uint16).tofile(path)
    facts = facts_of(TokenFile(paths, 4))
    assert facts["num_files"] == 100
    assert len(str(facts)) < 500
    assert facts_of(TokenFile([*paths[1:], paths[0]], 4)) != facts
    np.zeros(9, np.uint16).tofile(paths[0])
    assert facts_of(TokenFile(paths, 4)) != facts


@pytest.mark.parametrize("name", ["t.bin", "t.npy"])
def test_token_files(tmp_path: Path, name: str) -> None:
    def write(tokens: Any) -> None:
        tokens = np.asarray(tokens, np.uint16)
        np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)

    def facts(**settings: Any) -> Facts:
        return facts_of(TokenFile(tmp_path / name, **{"length": 8, **settings}))

    write(np.arange(500))
    first = facts()
    write(np.arange(500))
    assert facts() == first
    assert facts(length=9) != first
    assert facts(stride=4) != first
    write([*range(250), 9, *range(251, 500)])
    assert facts() != first


def test_image_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8), (len(name), ord(name[0]), ord(name[2]))).save(path)
    facts = facts_of(ImageFolder(tmp_path / "root"))
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    assert facts_of(ImageFolder(tmp_path / "copy")) == facts
    assert facts_of(ImageFolder(tmp_path / "copy", size=32)) != facts
    (tmp_path / "copy/a/1.png").rename(tmp_path / "copy/a/3.png")
    assert facts_of(ImageFolder(tmp_path / "copy")) != facts


def test_hf_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(200)), "t": [str(i) for i in range(200)]})

    def compared(dataset: Any, **settings: Any) -> Facts:
        facts = facts_of(as_source(dataset, **settings))
        facts.pop("hint")
        return facts

    again = datasets.Dataset.from_dict({"x": list(range(200)), "t": [str(i) for i in range(200)]})
    assert compared(rows) == compared(again) == compared(rows, collate_fn=list) == compared(rows.with_format("torch"))
    for other in (rows.shuffle(seed=1), rows.select(range(199)), rows.map(lambda row: {"x": row["x"] + 1})):
        assert compared(other) != compared(rows)
    one = datasets.Dataset.from_dict({"x": [*range(101), 7, *range(102, 200)], "t": [str(i) for i in range(200)]})
    assert facts_of(as_source(one))["hint"] != facts_of(as_source(rows))["hint"]


def test_streams_say_what_they_declare() -> None:
    class Lines:
        fingerprint: Any = None

        def __iter__(self) -> Any:
            raise AssertionError("nobody asked for a sample")

    lines = Lines()
    lines.__class__.__iter__ = lambda _: iter([])  # making one asks whether it starts again
    stream = adopt(lines, LoadingOptions(global_batch=4), 0).data
    assert facts_of(stream) == {"type": "Lines", "unchecked": "a stream without a fingerprint"}
    lines.fingerprint = "v2"
    assert facts_of(stream) == {"fingerprint": "v2"}
    assert "content" in facts_of(adopt(pl.Batches(list(X.split(4))), LoadingOptions(batches_per_step=1), 0).data)
    both = facts_of(adopt(pl.PerWorker([list(X), list(changed(X))]), LoadingOptions(batches_per_step=2), 0).data)
    assert both["0.content"] != both["1.content"]


def test_the_order_of_a_sampler_is_told_beside_the_data() -> None:
    def order(**settings: Any) -> Any:
        loader = DataLoader(TensorDataset(X), **settings)
        return facts_of(adopt(loader, LoadingOptions(batches_per_step=1), 0).data).get("order")

    assert order(batch_size=2, shuffle=True) is None  # a permutation of Paceline's own
    assert order(batch_size=2, sampler=SubsetRandomSampler([1, 2])) == "SubsetRandomSampler"
    assert order(batch_sampler=[[0, 1], [2]]) != order(batch_sampler=[[2, 1], [0]])
