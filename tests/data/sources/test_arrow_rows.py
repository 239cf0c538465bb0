"""Numbers are copied straight out of memory-mapped files; whatever cannot be goes through a table, with one result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.sources.arrow_files import FileBatches, index_files
from paceline.data.sources.arrow_rows import RecordBatches

NUM_ROWS = 20
COLUMNS = {
    "number": pa.array(range(NUM_ROWS), pa.uint16()),
    "list": pa.array([[i, -i, 2 * i] for i in range(NUM_ROWS)], pa.list_(pa.int64())),
    "matrix": pa.array([[[i, 1.5], [2.5, i]] for i in range(NUM_ROWS)], pa.list_(pa.list_(pa.float32(), 2))),
    "flag": pa.array([i % 3 == 0 for i in range(NUM_ROWS)]),
    "text": pa.array([f"row {i}" for i in range(NUM_ROWS)]),
    "maybe": pa.array([[i] if i != 7 else None for i in range(NUM_ROWS)], pa.list_(pa.int32())),
}
IN_PLACE = ["number", "list", "matrix"]


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def write(path: Path, *names: str, **options: Any) -> str:
    """A file in record batches of 3."""
    table = pa.table({name: COLUMNS[name] for name in names})
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)
    return str(path)


def batches_of(path: str, *names: str) -> FileBatches:
    return FileBatches(index_files([path]), names, 1 << 20)


def test_any_rows_are_the_same_in_place_and_through_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(write(tmp_path / "a.arrow", *IN_PLACE), *IN_PLACE)

    @given(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=30))
    def examples(rows: list[int]) -> None:
        indices = np.array(rows, np.int64)
        in_place = batches.read_columns(indices, indices)
        with monkeypatch.context() as patch:
            patch.setattr(RecordBatches, "_copy_views", lambda *_: None)
            through_table = batches.read_columns(indices, indices)
        assert in_place.keys() == through_table.keys()
        for name, column in in_place.items():
            assert column.dtype == through_table[name].dtype
            assert torch.equal(column, through_table[name])

    examples()


@pytest.mark.parametrize("name", IN_PLACE)
def test_numbers_need_no_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RecordBatches, "_gather")
    rows = np.array([19, 0, 1, 2, 3], np.int64)
    columns = batches_of(write(tmp_path / "a.arrow", name), name).read_columns(rows, rows)
    assert columns[name].tolist() == [COLUMNS[name][i].as_py() for i in rows.tolist()]
    # Its own memory: a batch may be written to, and lives on without the file.
    columns[name].zero_()


@pytest.mark.parametrize("name", ["flag", "text", "maybe"])
def test_what_is_no_array_of_numbers_goes_through_a_table(name: str, tmp_path: Path) -> None:
    batches = batches_of(write(tmp_path / "a.arrow", "number", name), "number", name)
    rows = np.array([3, 1], np.int64)
    assert batches.arrays(2) is None or name == "maybe"
    columns = batches.read_columns(rows, rows)
    assert columns["number"].tolist() == [3, 1]
    values = columns[name]
    assert (values if isinstance(values, list) else values.tolist()) == [COLUMNS[name][i].as_py() for i in (3, 1)]


def test_decoded_batches_have_no_views_that_would_keep_them(tmp_path: Path) -> None:
    batches = batches_of(write(tmp_path / "a.arrow", "list", compression="zstd"), "list")
    assert batches.arrays(0) is None


def test_record_batches_of_unequal_shapes_are_named_by_sample() -> None:
    table = pa.concat_tables([pa.table({"list": [[1, 2]]}), pa.table({"list": [[1, 2, 3]]})])
    with pytest.raises(ValueError, match=r"samples 40 and 41 do not fit .* are \(2,\) and \(3,\)"):
        RecordBatches([1, 1], table.to_batches()).read_columns(np.array([0, 1], np.int64), np.array([40, 41], np.int64))
