"""Windows of tokens out of flat files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_pool import WorkerPool

from paceline.data.errors import SampleError
from paceline.data.sources.base import Pair
from paceline.data.sources.tokens import TokenFile


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def write(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    array = np.asarray(tokens, dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


@pytest.mark.parametrize("name", ["t.bin", "t.npy"])
def test_targets_are_one_token_further(tmp_path: Path, name: str) -> None:
    source = TokenFile(write(tmp_path / name, range(10)), 3)
    assert len(source) == 3
    batch = source.read(indices(2, 0), 0, 0)
    assert type(batch) is Pair
    assert batch.x.dtype == batch.y.dtype == torch.int64
    assert batch.x.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert batch.y.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert batch.x.is_contiguous()
    assert batch.y.is_contiguous()


def test_without_targets_a_window_needs_no_token_after_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", range(9))
    assert len(TokenFile(path, 3)) == 2
    source = TokenFile(path, 3, targets=False)
    assert len(source) == 3
    assert source.read(indices(2), 0, 0).tolist() == [[6, 7, 8]]


def test_windows_may_overlap_or_leave_gaps(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", range(10))
    overlapping = TokenFile(path, 4, stride=2, targets=False)
    assert overlapping.read(np.arange(len(overlapping)), 0, 0)[:, 0].tolist() == [0, 2, 4, 6]
    sparse = TokenFile(path, 2, stride=5, targets=False)
    assert sparse.read(np.arange(len(sparse)), 0, 0).tolist() == [[0, 1], [5, 6]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int16", "int32", "int64"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_ids_of_any_integer_type(tmp_path: Path, dtype: str, suffix: str) -> None:
    largest = np.iinfo(dtype).max
    path = write(tmp_path / f"t{suffix}", [1, 2, largest], dtype)
    source = TokenFile(path, 3, targets=False, dtype=dtype)
    assert source.read(indices(0), 0, 0).tolist() == [[1, 2, largest]]


@given(
    lengths=st.lists(st.integers(4, 40), min_size=1, max_size=4),
    stride=st.integers(1, 6),
    targets=st.booleans(),
    data=st.data(),
)
def test_windows_of_several_files_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], stride: int, targets: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    contents = [[100 * file + i for i in range(length)] for file, length in enumerate(lengths)]
    paths = [write(folder / f"{file}.bin", tokens) for file, tokens in enumerate(contents)]
    width = 3 + targets
    expected = [t[s : s + width] for t in contents for s in range(0, len(t) - width + 1, stride)]
    source = TokenFile(paths, 3, stride=stride, targets=targets)
    assert len(source) == len(expected)
    wanted = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20))
    batch = source.read(indices(*wanted), 0, 0)
    assert (batch.x if targets else batch).tolist() == [expected[i][:3] for i in wanted]
    if targets:
        assert batch.y.tolist() == [expected[i][1:] for i in wanted]


def test_each_read_has_memory_of_its_own(tmp_path: Path) -> None:
    source = TokenFile(write(tmp_path / "t.bin", range(10)), 3)
    first = source.read(indices(0), 0, 0)
    first.x.zero_()
    assert source.read(indices(0), 0, 0).x.tolist() == [[0, 1, 2]]
    assert first.y.tolist() == [[1, 2, 3]]


def test_another_process_reads_the_same_from_the_paths(tmp_path: Path, pool: WorkerPool) -> None:
    paths = [write(tmp_path / f"{i}.bin", np.arange(20_000) + i) for i in range(2)]
    source = TokenFile(paths, 100)
    wanted = indices(0, 397, 7, 250)
    here = source.read(wanted, 0, 0)
    assert len(pickle.dumps(source)) < 2000, "the data must not travel"
    (there,) = pool.run(lambda s: tuple(s.read(wanted, 0, 0)), 1, source)
    assert torch.equal(here.x, there[0])
    assert torch.equal(here.y, there[1])


# Errors


@pytest.mark.parametrize("index", [3, -1])
def test_windows_outside_of_the_files_are_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match="are out of range: the source has 3"):
        TokenFile(write(tmp_path / "t.bin", range(10)), 3).read(indices(0, index), 0, 0)


@pytest.mark.parametrize(
    ("name", "content", "settings", "error", "text"),
    [
        ("none.bin", None, {}, FileNotFoundError, r".*none\.bin does not exist: check the path of the token file"),
        ("t.bin", b"\0" * 7, {}, ValueError, r"t\.bin has 7 bytes, which is not a multiple of the 2 bytes of uint16"),
        ("t.bin", b"\0" * 8, {}, ValueError, r"t\.bin has 4 tokens, fewer than one window of 5: choose a smaller"),
        ("t.bin", b"", {}, ValueError, r"t\.bin has 0 tokens, fewer than one window of 5"),
        ("t.bin", b"\0" * 8, {"dtype": "float32"}, ValueError, r"t\.bin holds float32: token ids must be integers"),
        ("t.bin", b"\0" * 8, {"dtype": "uint64"}, ValueError, r"t\.bin holds uint64: token ids must be integers that"),
        ("t.npy", b"abc", {}, ValueError, r"t\.npy is not a NumPy file of token ids, or it is truncated"),
        ("t.bin", b"\0" * 40, {"length": 0}, ValueError, "length=0 is too small: choose length >= 1"),
        ("t.bin", b"\0" * 40, {"stride": 0}, ValueError, "stride=0 is too small: choose stride >= 1"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, name: str, content: bytes | None, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=text):
        TokenFile(tmp_path / name, **{"length": 4} | settings)


def test_numpy_files_that_cannot_be_used(tmp_path: Path) -> None:
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.uint16))
    with pytest.raises(ValueError, match=r"square\.npy holds an array of shape \(4, 4\): token ids must be in one"):
        TokenFile(tmp_path / "square.npy", 2)
    np.save(tmp_path / "wide.npy", np.zeros(9, np.uint32))
    with pytest.raises(ValueError, match=r"wide\.npy holds uint32, but dtype=uint16: leave dtype out"):
        TokenFile(tmp_path / "wide.npy", 2, "uint16")
    np.save(tmp_path / "objects.npy", np.array([{}] * 9), allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects\.npy is not a NumPy file of token ids"):
        TokenFile(tmp_path / "objects.npy", 2)
    with pytest.raises(ValueError, match="paths is empty: give at least one token file"):
        TokenFile([], 2)


@pytest.mark.parametrize(("bad_id", "dtype"), [(50, "uint16"), (60_000, "uint16"), (-1, "int32")])
def test_an_id_outside_of_the_vocabulary_is_named_with_file_and_offset(tmp_path: Path, bad_id: int, dtype: str) -> None:
    good = write(tmp_path / "good.bin", [49] * 10, dtype)
    tokens = np.arange(20)
    tokens[13] = bad_id
    bad = write(tmp_path / "bad.bin", tokens, dtype)
    source = TokenFile([good, bad], 4, dtype, vocab_size=50)
    assert len(source) == 2 + 4
    source.read(indices(0, 1, 2, 3, 4), 0, 0)
    with pytest.raises(
        SampleError, match=rf"sample 5 .*bad\.bin has the token id {bad_id} at token 13 of the"
    ) as caught:
        source.read(indices(0, 5), 0, 0)
    assert (caught.value.index, caught.value.file) == (5, str(bad))
    TokenFile([good, bad], 4, dtype).read(indices(0, 5), 0, 0)


def test_a_file_that_changed_under_the_run_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", range(100))
    travelled = pickle.dumps(TokenFile(path, 4))
    write(path, range(50))
    with pytest.raises(SampleError, match=r"t\.bin has 50 tokens, but had 100 when the run started: restore the file"):
        pickle.loads(travelled).read(indices(0), 0, 0)
