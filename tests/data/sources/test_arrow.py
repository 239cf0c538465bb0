"""Rows of Arrow and Parquet files."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_pool import WorkerPool

from paceline.data.errors import SampleError
from paceline.data.sources import arrow_files
from paceline.data.sources.arrow import ArrowSource

FORMATS = ["stream", "file", "parquet", "compressed stream", "compressed file"]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def write(path: Path, table: pa.Table | dict[str, Any], format: str = "stream", rows_per_batch: int = 4) -> str:
    table = table if isinstance(table, pa.Table) else pa.table(table)
    if format == "parquet":
        pq.write_table(table, path, row_group_size=rows_per_batch)
        return str(path)
    options = pa.ipc.IpcWriteOptions(compression="zstd" if "compressed" in format else None)
    new = pa.ipc.new_file if "file" in format else pa.ipc.new_stream
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return str(path)


def numbered(count: int, start: int = 0) -> dict[str, Any]:
    return {"id": np.arange(start, start + count), "text": [f"row {i}" for i in range(start, start + count)]}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Rows 0 to 9, 10 to 12, and 13 to 29."""
    return [write(tmp_path / f"{i}.arrow", numbered(*part)) for i, part in enumerate([(10, 0), (3, 10), (17, 13)])]


# Addressing


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    rows_per_batch=st.integers(1, 5),
    formats=st.lists(st.sampled_from(FORMATS), min_size=4, max_size=4),
    max_decoded_bytes=st.sampled_from([0, 200, 1 << 20]),
    data=st.data(),
)
def test_any_rows_of_any_files_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    rows_per_batch: int,
    formats: list[str],
    max_decoded_bytes: int,
    data: st.DataObject,
) -> None:
    folder, expected, paths = tmp_path_factory.mktemp("rows"), [], []
    for i, (size, format) in enumerate(zip(sizes, formats, strict=False)):
        rows = numbered(size, len(expected))
        rows["text"] = pa.array(rows["text"], pa.string())
        paths.append(write(folder / f"{i}", rows, format, rows_per_batch))
        expected += rows["text"].to_pylist()
    source = ArrowSource(paths, max_decoded_bytes=max_decoded_bytes)
    assert len(source) == len(expected)
    for _ in range(3):
        wanted = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=30))
        batch = source.read(indices(*wanted), 0, 0)
        assert batch["id"].tolist() == wanted
        assert batch["text"] == [expected[i] for i in wanted]
    everything = np.arange(len(expected))
    assert source.read(everything, 0, 0)["id"].tolist() == everything.tolist()


def test_a_folder_a_pattern_and_a_list_name_the_same_rows(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("not data")
    for paths in (tmp_path, str(tmp_path / "*.arrow"), str(tmp_path / "**" / "?.arrow"), files):
        assert ArrowSource(paths).read(np.arange(30), 0, 0)["id"].tolist() == list(range(30))
    # The order given is the order read.
    assert ArrowSource(files[::-1]).read(indices(0), 0, 0)["id"].tolist() == [13]


@pytest.mark.parametrize("wanted", [(30,), (-1, 3)])
def test_rows_outside_of_the_data_are_refused(files: list[str], wanted: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match="are out of range: the source has 30"):
        ArrowSource(files).read(indices(*wanted), 0, 0)


# Columns

TOKENS = np.arange(30, dtype=np.int32).reshape(10, 3)

# Column -> the micro-batch of rows 7 and 2.
COLUMNS: dict[str, tuple[pa.Array, Any]] = {
    "int64": (pa.array(range(10)), torch.tensor([7, 2])),
    "uint16": (pa.array(range(10), pa.uint16()), torch.tensor([7, 2])),
    "uint32": (pa.array([2**32 - 1] * 10, pa.uint32()), torch.tensor([2**32 - 1] * 2)),
    "uint8": (pa.array(range(10), pa.uint8()), torch.tensor([7, 2], dtype=torch.uint8)),
    "float32": (pa.array(np.arange(10, dtype=np.float32) / 2), torch.tensor([3.5, 1.0])),
    "float16": (pa.array(np.arange(10).astype(np.float16)), torch.tensor([7, 2], dtype=torch.float16)),
    "bool": (pa.array([i == 7 for i in range(10)]), torch.tensor([True, False])),
    "fixed-size list": (
        pa.FixedSizeListArray.from_arrays(pa.array(TOKENS.ravel()), 3),
        torch.from_numpy(TOKENS[[7, 2]]),
    ),
    "list": (pa.array(TOKENS.tolist(), pa.list_(pa.int32())), torch.from_numpy(TOKENS[[7, 2]])),
    "large list": (pa.array(TOKENS.tolist(), pa.large_list(pa.int32())), torch.from_numpy(TOKENS[[7, 2]])),
    "empty list": (pa.array([[]] * 10, pa.list_(pa.float32())), torch.empty(2, 0)),
    "list of lists": (
        pa.array([[[i, 1], [2, 3], [4, 5]] for i in range(10)]),
        torch.tensor([[[7, 1], [2, 3], [4, 5]], [[2, 1], [2, 3], [4, 5]]]),
    ),
    "string": (pa.array([str(i) for i in range(10)]), ["7", "2"]),
    "large string": (pa.array([str(i) for i in range(10)], pa.large_string()), ["7", "2"]),
    "dictionary": (pa.array(["a", "b"] * 5).dictionary_encode(), ["b", "a"]),
    "struct": (pa.array([{"n": i} for i in range(10)]), [{"n": 7}, {"n": 2}]),
    "binary": (pa.array([bytes([i]) for i in range(10)]), [b"\7", b"\2"]),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_numbers_become_tensors_and_the_rest_python_values(tmp_path: Path, kind: str, format: str) -> None:
    column, expected = COLUMNS[kind]
    batch = ArrowSource(write(tmp_path / "t", {"c": column}, format)).read(indices(7, 2), 0, 0)
    assert list(batch) == ["c"]
    if isinstance(expected, torch.Tensor):
        assert batch["c"].dtype == expected.dtype
        assert torch.equal(batch["c"], expected)
    else:
        assert batch["c"] == expected


@pytest.mark.parametrize("wanted", [(3, 1), (4, 5, 6)], ids=["scattered", "in one piece"])
def test_tensors_are_writable_aligned_and_no_part_of_the_file(tmp_path: Path, wanted: tuple[int, ...]) -> None:
    source = ArrowSource(write(tmp_path / "t", {"x": np.arange(8.0)}, rows_per_batch=8))
    x = source.read(indices(*wanted), 0, 0)["x"]
    assert x.data_ptr() % 64 == 0
    x.zero_()
    assert source.read(indices(*wanted), 0, 0)["x"].tolist() == [float(i) for i in wanted]


def test_chosen_columns_in_the_order_chosen(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a", {"x": [1], "y": [2], "z": ["only here"]}),
        write(tmp_path / "b", {"y": [20], "x": [10]}, "parquet"),
    ]
    batch = ArrowSource(paths, columns=["y", "x"]).read(indices(1, 0), 0, 0)
    assert {name: column.tolist() for name, column in batch.items()} == {"y": [20, 2], "x": [10, 1]}
    assert list(batch) == ["y", "x"]


def test_metadata_and_nullability_may_differ_between_files(tmp_path: Path) -> None:
    required = pa.schema([pa.field("x", pa.int64(), nullable=False)], metadata={"written": "yesterday"})
    paths = [write(tmp_path / "a", pa.table({"x": [1]}, required)), write(tmp_path / "b", {"x": [2]})]
    assert ArrowSource(paths).read(indices(0, 1), 0, 0)["x"].tolist() == [1, 2]


# Code of the user's


def test_a_transform_sees_single_rows(tmp_path: Path) -> None:
    rows = {"n": pa.array([1, None], pa.int32()), "tokens": [[1, 2, 3], [4]], "text": ["a", None]}
    seen: list[Any] = []
    ArrowSource(write(tmp_path / "t", rows), transform=lambda row: seen.append(row) or 0).read(indices(1, 0), 0, 0)
    assert seen[0]["n"] is None
    assert seen[0]["text"] is None
    assert seen[0]["tokens"].tolist() == [4]
    assert seen[1]["n"].dtype == torch.int32
    assert seen[1]["tokens"].tolist() == [1, 2, 3]


def test_what_a_transform_gives_is_collated_as_torch_does(files: list[str]) -> None:
    source = ArrowSource(files, transform=lambda row: (row["id"] * 2, row["text"]))
    batch = source.read(indices(20, 3), 0, 0)
    assert batch.x.tolist() == [40, 6]
    assert list(batch.y) == ["row 20", "row 3"]


def test_a_collate_function_pads(tmp_path: Path) -> None:
    def pad(rows: list[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True)

    path = write(tmp_path / "t", {"tokens": [[1, 2, 3], [4], []]})
    batch = ArrowSource(path, collate_fn=pad).read(indices(1, 0, 2), 0, 0)
    assert batch.tolist() == [[4, 0, 0], [1, 2, 3], [0, 0, 0]]


def noisy(row: dict[str, Any]) -> torch.Tensor:
    noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return torch.tensor([float(row["id"]), *noise])


def test_a_random_transform_belongs_to_seed_epoch_and_sample(files: list[str]) -> None:
    source = ArrowSource(files, transform=noisy)
    together = source.read(np.arange(30), 1, 0)
    assert len({tuple(row[1:].tolist()) for row in together}) == 30
    assert torch.equal(source.read(indices(20, 4), 1, 7), together[[20, 4]])
    assert not torch.equal(source.read(np.arange(30), 2, 0), together)
    assert not torch.equal(source.with_seed(5).read(np.arange(30), 1, 0), together)
    own = ArrowSource(files, transform=noisy, seed=5)
    assert torch.equal(own.with_seed(9).read(np.arange(30), 1, 0), source.with_seed(5).read(np.arange(30), 1, 0))


@pytest.mark.parametrize("format", FORMATS)
def test_another_process_reads_the_same_from_the_paths(tmp_path: Path, format: str, pool: WorkerPool) -> None:
    table = {"id": np.arange(4000), "tokens": pa.array(np.arange(400_000).reshape(4000, 100).tolist())}
    path = write(tmp_path / "t", table, format, rows_per_batch=1000)
    plain, drawn = ArrowSource(path), ArrowSource(path, ["id"], transform=noisy, seed=3)
    wanted = indices(3999, 0, 17, 1800)
    here = plain.read(wanted, 2, 64)["tokens"], drawn.read(wanted, 2, 64)
    assert len(pickle.dumps(plain)) < 2000, "the data must not travel"
    (there,) = pool.run(lambda: (plain.read(wanted, 2, 64)["tokens"], drawn.read(wanted, 2, 64)), 1)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


# Memory


@pytest.mark.parametrize("format", ["parquet", "compressed file", "compressed stream"])
def test_what_is_decoded_stays_within_its_bound(tmp_path: Path, format: str) -> None:
    rows = np.arange(8000.0)
    source = ArrowSource(write(tmp_path / "t", {"x": rows}, format, 1000), max_decoded_bytes=20_000)
    for start in range(0, 8000, 500):
        assert source.read(np.arange(start, start + 500), 0, 0)["x"].tolist() == rows[start : start + 500].tolist()
        assert sum(batch.nbytes for batch in source._batches._decoded.values()) <= 20_000
    assert list(source._batches._decoded) == [6, 7]


def test_the_last_used_row_groups_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"x": np.arange(4000.0)}, "parquet", 1000)
    source = ArrowSource(path, max_decoded_bytes=20_000)
    for group in (0, 1, 0, 2):
        source.read(indices(1000 * group), 0, 0)
    assert list(source._batches._decoded) == [0, 2]


def test_a_row_group_in_use_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ArrowSource(write(tmp_path / "t", numbered(20), "parquet", 10))
    decoded: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda file, i, **kw: decoded.append(i) or read_row_group(file, i, **kw)
    )
    for i in (0, 11, 5, 19, 1):
        source.read(indices(i), 0, 0)
    assert decoded == [0, 1]


def test_mapped_files_are_neither_decoded_nor_held_open(files: list[str]) -> None:
    source = ArrowSource(files)
    source.read(np.arange(30), 0, 0)
    assert not source._batches._decoded
    held = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    assert not held & set(files)


# The index


def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    scan = arrow_files._scan
    monkeypatch.setattr(arrow_files, "_scan", lambda path, *rest: names.append(Path(path).name) or scan(path, *rest))
    return names


def test_a_second_start_scans_nothing(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = scanned(monkeypatch)
    ArrowSource(files)
    assert names == ["0.arrow", "1.arrow", "2.arrow"]
    names.clear()
    assert len(ArrowSource(files)) == 30
    assert not names


def test_a_second_start_does_not_even_need_pyarrow(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ArrowSource(files)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(ArrowSource(files)) == 30


def test_only_what_changed_is_scanned_again(files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ArrowSource(files)
    names = scanned(monkeypatch)
    write(tmp_path / "1.arrow", numbered(5, 10))
    write(tmp_path / "3.arrow", numbered(1, 32))
    assert len(ArrowSource(tmp_path)) == 33
    assert names == ["1.arrow", "3.arrow"]
    names.clear()
    Path(files[0]).unlink()
    assert len(ArrowSource(tmp_path)) == 23
    assert not names


def test_files_of_a_folder_may_be_indexed_in_parts(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ArrowSource(files[:1])
    ArrowSource(files[1:])
    names = scanned(monkeypatch)
    ArrowSource(files)
    assert not names


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_change_that_size_and_time_do_not_show_is_found(
    files: list[str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    path = Path(files[2])
    write(path, {"id": np.arange(17), "text": ["x" * 5000] * 17})
    ArrowSource(files)
    names = scanned(monkeypatch)
    status, content = path.stat(), bytearray(path.read_bytes())
    assert len(content) > 20_000
    place = content.index(b"text") if end == "first" else len(content) - 100
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    if end == "first":
        with pytest.raises(ValueError, match="differ in column"):
            ArrowSource(files)
    else:
        ArrowSource(files)
    assert names == ["2.arrow"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 0}', '{"version": 1, "files": [{"path": 3}]}'])
def test_a_broken_index_is_made_anew(files: list[str], content: str, tmp_path: Path) -> None:
    ArrowSource(files)
    (index,) = (tmp_path / "cache" / "arrow").iterdir()
    index.write_text(content)
    assert len(ArrowSource(files)) == 30
    assert len(json.loads(index.read_text())["files"]) == 3


def test_a_cache_that_cannot_be_written_is_no_error(
    files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in the way").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "in the way"))
    assert len(ArrowSource(files)) == 30


def test_an_index_that_cannot_be_replaced_leaves_nothing_behind(files: list[str], tmp_path: Path) -> None:
    ArrowSource(files)
    (index,) = (tmp_path / "cache" / "arrow").iterdir()
    index.unlink()
    index.mkdir()
    assert len(ArrowSource(files)) == 30
    assert list(index.parent.iterdir()) == [index]


# Errors


def test_no_file_is_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file matches .*\*\.arrow: check the path"):
        ArrowSource(str(tmp_path / "*.arrow"))
    with pytest.raises(FileNotFoundError, match=r"folder .* has no file that ends with \.arrow, \.feather"):
        ArrowSource(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot open data file .*gone\.arrow: No such file"):
        ArrowSource(tmp_path / "gone.arrow")
    with pytest.raises(ValueError, match="paths is empty: give at least one"):
        ArrowSource([])


def test_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows: give files with at least one row"):
        ArrowSource(write(tmp_path / "t", {"x": pa.array([], pa.int64())}))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_off_anywhere_is_named(tmp_path: Path, format: str) -> None:
    path = Path(write(tmp_path / "cut.arrow", {"x": np.random.default_rng(0).random(4000)}, format, 1000))
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 8, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.arrow is corrupt or truncated, or neither an Arrow nor a Parquet"):
            ArrowSource(path)


def test_a_stream_that_ends_between_two_batches_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    batch = pa.record_batch({"x": np.arange(4)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
        length = file.tell()
        writer.write_batch(batch)
    assert len(ArrowSource(path)) == 8
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="the end-of-stream marker is missing"):
        ArrowSource(path)


def test_something_else_is_no_arrow_file(tmp_path: Path) -> None:
    (tmp_path / "t.arrow").write_text("id,text\n" * 1000)
    with pytest.raises(ValueError, match=r"t\.arrow is corrupt or truncated, or neither an Arrow nor a Parquet file"):
        ArrowSource(tmp_path)


def test_a_row_group_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "t.parquet", {"x": np.random.default_rng(0).random(4000)}, "parquet", 2000))
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    source = ArrowSource(path)
    with pytest.raises(SampleError, match=r"t\.parquet cannot be read: .*: write it again") as caught:
        source.read(indices(3), 0, 0)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("rows_per_batch", [3, 4], ids=["other batches", "fewer batches"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changed_under_the_run_is_an_error(tmp_path: Path, format: str, rows_per_batch: int) -> None:
    path = tmp_path / "t"
    travelled = pickle.dumps(ArrowSource(write(path, numbered(10), format)))
    write(path, numbered(8), format, rows_per_batch)
    with pytest.raises(SampleError, match="t has changed since the run started: restore the file, or start a new run"):
        pickle.loads(travelled).read(indices(9), 0, 0)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"x": [1]}, {"x": [1.0]}, r"/a and .*/b differ in column 'x' \(int64 and double\): all files need"),
        ({"x": [1], "y": [1]}, {"x": [1]}, r"/a and .*/b differ in column 'y' \(int64 and None\)"),
        ({"x": [1]}, {"x": [1], "y": ["s"]}, r"/a and .*/b differ in column 'y' \(None and string\)"),
    ],
)
def test_files_of_unequal_columns(tmp_path: Path, first: Any, second: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ArrowSource([write(tmp_path / "a", first), write(tmp_path / "b", second)])


def test_an_unknown_column_gets_the_nearest_name(files: list[str]) -> None:
    with pytest.raises(ValueError, match=r"there is no column 'txt' in .*0\.arrow: did you mean 'text'\?"):
        ArrowSource(files, columns=["id", "txt"])
    with pytest.raises(ValueError, match=r"there is no column 'pixels' in .*: choose from 'id', 'text'"):
        ArrowSource(files, columns=["pixels"])
    with pytest.raises(ValueError, match=r"columns=\['id', 'id'\]: give at least one column, and each only once"):
        ArrowSource(files, columns=["id", "id"])


def test_rows_of_unequal_shapes_are_named(tmp_path: Path) -> None:
    source = ArrowSource(write(tmp_path / "t", {"tokens": [[1, 2], [3], [4, 5]]}))
    assert source.read(indices(0, 2), 0, 0)["tokens"].tolist() == [[1, 2], [4, 5]]
    text = r"samples 2 and 1 do not fit .* shapes of column 'tokens' are \(2,\) and \(1,\): give a collate_fn that pads"
    with pytest.raises(ValueError, match=text):
        source.read(indices(2, 0, 1), 0, 0)


@pytest.mark.parametrize("column", [[1, None, 3], [[1, 2], [3, None], [4, 5]], [[[1], [2]], [[3], []], [[4], [5]]]])
def test_a_null_among_numbers_names_its_row(tmp_path: Path, column: list[Any]) -> None:
    path = write(tmp_path / "t", {"x": pa.array(column)})
    source = ArrowSource(path)
    source.read(indices(0, 2), 0, 0)
    with pytest.raises(
        SampleError, match=r"sample 1 in .*/t has a null or lists of unequal lengths in column 'x'"
    ) as e:
        source.read(indices(0, 1), 0, 0)
    assert (e.value.index, e.value.file) == (1, path)


def test_a_transform_that_fails_names_row_and_file(files: list[str]) -> None:
    def fail(row: dict[str, Any]) -> Any:
        return {}[row["text"]]

    with pytest.raises(SampleError, match=r"sample 12 in .*1\.arrow cannot be read: KeyError: 'row 12'") as caught:
        ArrowSource(files, transform=fail).read(indices(12, 0), 0, 0)
    assert (caught.value.index, caught.value.file) == (12, files[1])
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_pyarrow_the_error_says_what_to_install(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pyarrow is not installed.*pip install 'paceline\[arrow\]'"):
        ArrowSource(files)
