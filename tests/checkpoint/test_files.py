"""Files that any safetensors reader loads, and damaged files that are refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_state import same
from safetensors.torch import load_file, save_file

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.files import CHUNK_BYTES, FileRecord, check_file, read_file, read_tensors, write_tensors
from paceline.core.tree import DTYPES

TENSORS = {
    **{name: torch.tensor([0, 1, 1, 0, 1]).to(dtype) for name, dtype in DTYPES.items()},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "large": torch.arange(CHUNK_BYTES // 4 + 16, dtype=torch.float32),
    "é\n": torch.ones(1),
}


def test_what_is_written_loads_here_and_with_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, TENSORS)
    assert record == FileRecord(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    for found in (read_tensors(path), read_tensors(path, record), load_file(path)):
        assert found.keys() == TENSORS.keys()
        assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


def test_what_safetensors_writes_loads_here(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert all(same(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path / "a.safetensors").items())


def test_no_tensors_make_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {})
    assert read_tensors(tmp_path / "a.safetensors") == load_file(tmp_path / "a.safetensors") == {}


def test_tensors_start_aligned(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5), "c": torch.ones(32), "d": torch.ones(3).double()}
    write_tensors(tmp_path / "a.safetensors", odd)
    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    starts = {name: 8 + length + e["data_offsets"][0] for name, e in json.loads(content[8 : 8 + length]).items()}
    assert starts["c"] % 64 == 0
    assert starts["d"] % 8 == starts["b"] % 4 == 0


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = (4,), dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BAD: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"1234",
    "pickle": b"\x80\x04cos\nsystem\n" + b"x" * 20,
    "long header": (2**63 - 1).to_bytes(8, "little") + b"{}",
    "no JSON": with_header(b"{nonsense"),
    "no UTF-8": with_header(b"\xff\xfe{}"),
    "a list": with_header([]),
    "deep": with_header(b"[" * 100_000),
    "unknown dtype": with_header({"a": entry(0, 4, dtype="OBJ")}, b"1234"),
    "negative shape": with_header({"a": entry(0, 4, [-2, -2])}, b"1234"),
    "float shape": with_header({"a": entry(0, 4, [4.0])}, b"1234"),
    "bool shape": with_header({"a": entry(0, 1, [True])}, b"1"),
    "wrong size": with_header({"a": entry(0, 4, [5])}, b"1234"),
    "overlap": with_header({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),
    "hole": with_header({"a": entry(0, 4), "b": entry(6, 10)}, b"1234567890"),
    "same bytes": with_header({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"),
    "short": with_header({"a": entry(0, 4)}, b"123"),
    "long": with_header({"a": entry(0, 4)}, b"12345"),
    "huge": with_header({"a": entry(0, 2**62, [2**62])}, b""),
    "no entries": with_header(b'{"a":1,"a":2}'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(BAD[name])
    with pytest.raises(CheckpointError, match="is damaged or not a safetensors file: ") as caught:
        read_tensors(tmp_path / "a.safetensors")
    assert str(tmp_path / "a.safetensors") in str(caught.value)


def test_a_read_against_a_record_finds_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, {"x": torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"has {record.size} bytes, the manifest says 7"):
        read_tensors(path, FileRecord(7, record.sha256))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    with pytest.raises(CheckpointError, match=f"SHA-256 is {found}, the manifest says {record.sha256}"):
        read_tensors(path, record)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    import os

    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(4)})
    (tmp_path / "link").symlink_to(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="link cannot be read: Too many levels of symbolic links"):
        read_tensors(tmp_path / "link")
    with pytest.raises(CheckpointError, match="pipe is not a regular file"):
        read_tensors(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        read_tensors(tmp_path / "gone")


def test_a_small_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, {"x": torch.zeros(CHUNK_BYTES)})
    check_file(path, record)
    with pytest.raises(CheckpointError, match=f"has {record.size} bytes, more than the limit of 100 for such a file"):
        read_file(path, 100)


def test_what_is_checked_is_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, TENSORS)
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: torch.zeros_like(clone(tensor)))
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is"):
        read_tensors(path, record)


def test_what_the_format_cannot_store_is_named_before_a_file_is_made(tmp_path: Path) -> None:
    for value, kind in ((torch.ones(1, dtype=torch.complex64), "of torch.complex64"), ({"a": 1}, "a dict")):
        with pytest.raises(TypeError, match=f"'x' is {kind}, which a safetensors file cannot store"):
            write_tensors(tmp_path / "a.safetensors", {"x": value})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())
