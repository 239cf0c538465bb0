"""Files that anyone can load, and a reader that trusts nothing in them."""

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
from paceline.checkpoint.hashed_file import CHUNK_BYTES, FileRecord
from paceline.checkpoint.safetensors_file import DTYPES, read, write

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
    record = write(path, TENSORS)
    assert record == FileRecord(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    for found in (read(path), read(path, record), load_file(path)):
        assert found.keys() == TENSORS.keys()
        assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


def test_what_safetensors_writes_loads_here(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert all(same(tensor, tensors[name]) for name, tensor in read(tmp_path / "a.safetensors").items())


def test_no_tensors_make_a_file_too(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {})
    assert read(tmp_path / "a.safetensors") == load_file(tmp_path / "a.safetensors") == {}


def test_tensors_start_aligned(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5), "c": torch.ones(32), "d": torch.ones(3).double()}
    write(tmp_path / "a.safetensors", odd)
    content = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    starts = {name: 8 + length + e["data_offsets"][0] for name, e in json.loads(content[8 : 8 + length]).items()}
    assert starts["c"] % 64 == 0
    assert starts["d"] % 8 == starts["b"] % 4 == 0


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.safetensors", {"x": torch.zeros(1)})


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = (4,), dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "has 0 bytes, which is no safetensors file"),
    "half a length": (b"1234", "has 4 bytes"),
    "pickle": (b"\x80\x04cos\nsystem\n" + b"x" * 20, "its header claims"),
    "long header": (with_header({}) + b"", "its header claims 9223372036854775807 bytes"),
    "no JSON": (with_header(b"{nonsense"), "is not one of safetensors"),
    "no UTF-8": (with_header(b"\xff\xfe{}"), "is not one of safetensors"),
    "a list": (with_header([]), "is not one of safetensors"),
    "deep": (with_header(b"[" * 100_000), "is not one of safetensors"),
    "unknown dtype": (with_header({"a": entry(0, 4, dtype="OBJ")}, b"1234"), "unknown dtype 'OBJ'"),
    "more entries": (with_header({"a": {**entry(0, 4), "code": 1}}, b"1234"), "has the entries"),
    "negative shape": (with_header({"a": entry(0, 4, [-2, -2])}, b"1234"), r"has shape \[-2, -2\]"),
    "float shape": (with_header({"a": entry(0, 4, [4.0])}, b"1234"), r"has shape \[4.0\]"),
    "bool shape": (with_header({"a": entry(0, 1, [True])}, b"1"), r"has shape \[True\]"),
    "wrong size": (with_header({"a": entry(0, 4, [5])}, b"1234"), r"of shape \[5\] takes 5 bytes, not 4"),
    "overlap": (with_header({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "'b' begins at byte 2, expected 4"),
    "hole": (with_header({"a": entry(0, 4), "b": entry(6, 10)}, b"1234567890"), "'b' begins at byte 6, expected 4"),
    "same bytes": (with_header({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "'b' begins at byte 0, expected 4"),
    "short": (with_header({"a": entry(0, 4)}, b"123"), "its header describes"),
    "long": (with_header({"a": entry(0, 4)}, b"12345"), "its header describes"),
    "huge": (with_header({"a": entry(0, 2**62, [2**62])}, b""), "its header describes"),
    "twice": (with_header(b'{"a":1,"a":2}'), "a name appears twice"),
}
BAD["long header"] = ((2**63 - 1).to_bytes(8, "little") + b"{}", BAD["long header"][1])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path / "a.safetensors")
    assert str(tmp_path / "a.safetensors") in str(caught.value)


def test_a_read_against_a_record_finds_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write(path, {"x": torch.ones(4)})
    with pytest.raises(CheckpointError, match=f"has {record.size} bytes, the manifest says 7"):
        read(path, FileRecord(7, record.sha256))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    with pytest.raises(CheckpointError, match=f"SHA-256 is {found}, the manifest says {record.sha256}"):
        read(path, record)


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    import os

    write(tmp_path / "a.safetensors", {"x": torch.ones(4)})
    (tmp_path / "link").symlink_to(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="link cannot be opened: Too many levels of symbolic links"):
        read(tmp_path / "link")
    with pytest.raises(CheckpointError, match="pipe is not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="gone cannot be opened: No such file"):
        read(tmp_path / "gone")
