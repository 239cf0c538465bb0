"""Reading and writing the safetensors format: raw tensors behind a JSON header, loadable by anyone, running no code.

A file is the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape and place of every
tensor) and the tensors' bytes, without holes between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.hashed_file import FileRecord, HashingReader, HashingWriter
from paceline.core.tree import DTYPE_NAMES as DTYPE_NAMES
from paceline.core.tree import DTYPES as DTYPES
from paceline.core.tree import RESERVED_NAME as RESERVED_NAME

# Every tensor whose size is a multiple of this starts at a multiple of it.
ALIGNMENT_BYTES = 64
# The limit of the reference implementation.
MAX_HEADER_BYTES = 100_000_000


def write(path: Path, tensors: Mapping[str, torch.Tensor], *, flush: bool = True) -> FileRecord:
    """Write CPU tensors of the dtypes in `DTYPES`; contiguous ones are not copied. See `HashingWriter`."""
    ordered = _by_alignment(tensors)
    with HashingWriter(path, flush=flush) as file:
        file.write(_header(ordered))
        for _, tensor in ordered:
            file.write(bytes_of(tensor.contiguous()))
    return file.record


def read(path: Path, expected: FileRecord | None = None) -> dict[str, torch.Tensor]:
    """The file's tensors, in memory of their own. With `expected`, damage anywhere in the file is an error."""
    with HashingReader(path) as file:
        if expected is not None:
            file.expect_size(expected)
        tensors = {}
        for entry in _read_header(file):
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
            file.read_into(bytes_of(tensors[entry.name]))
        if expected is not None:
            file.expect(expected)
        return tensors


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _by_alignment(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Whole multiples of the alignment first, then by falling item size: so that everything starts aligned."""
    return sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT_BYTES > 0, -item[1].itemsize))


def _header(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    header = {}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: HashingReader) -> list[_Entry]:
    """The tensors in the order of their bytes, which are known to fill the file exactly."""
    if file.size < 8:
        raise CheckpointError(f"{file.path} has {file.size} bytes, which is no safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise CheckpointError(f"{file.path} of {file.size} bytes is damaged: its header claims {length} bytes")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        header.pop(RESERVED_NAME, None)
        entries = [_parse(name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged: its header is not one of safetensors ({error})") from None
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    offset = 0
    for entry in entries:
        if entry.begin != offset:
            raise CheckpointError(
                f"{file.path} is damaged: tensor {entry.name!r} begins at byte {entry.begin}, expected {offset}"
            )
        offset = entry.end
    if file.position + offset != file.size:
        raise CheckpointError(f"{file.path} has {file.size} bytes, its header describes {file.position + offset}")
    return entries


def _parse(name: str, entry: dict[str, Any]) -> _Entry:
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has the entries {sorted(entry)}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has shape {shape} at {begin} to {end}")
    dtype = DTYPES[entry["dtype"]]
    size = math.prod(shape) * dtype.itemsize
    if end - begin != size:
        raise ValueError(f"tensor {name!r} of shape {shape} takes {size} bytes, not {end - begin}")
    return _Entry(name, dtype, tuple(shape), begin, end)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found
