"""The files of a checkpoint: hashed while they are written, checked against size and SHA-256 before they are used.

Tensors are stored in the safetensors format: the header's length (8 bytes, little endian), a JSON header, the tensors'
bytes. The `safetensors` library reads it. Writing is done here, because the library cannot hash in the same pass.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.errors import CheckpointError

# torch is imported where tensors are written or read: commands that list checkpoints do not wait for it.
if TYPE_CHECKING:
    import torch

# Small enough to be hashed and written from the processor's cache, large enough to make Python's overhead negligible.
CHUNK_BYTES = 1 << 20
# Tensors whose size is a multiple of this start at a multiple of it.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class FileRecord:
    """The expected size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


def write_file(path: Path, contents: Iterable[bytes | memoryview], *, flush: bool = True) -> FileRecord:
    """Write a new file; raise FileExistsError if there is one. With `flush` it is on the disk when this returns.

    Hashing and writing release the GIL, also for contents of many gigabytes.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("xb", buffering=0) as file:
            for content in contents:
                view = memoryview(content)
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = view[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    size += len(chunk)
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
            if flush:
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # errors of an open descriptor do not name the file
        raise
    return FileRecord(size, digest.hexdigest())


def read_file(path: Path, limit_bytes: int, expected: FileRecord | None = None) -> bytes:
    """The content of a small file. A file larger than the limit is refused before it is read."""
    with open_regular(path, expected) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit_bytes:
            raise CheckpointError(f"{path} has {size} bytes, more than the limit of {limit_bytes} for such a file")
        content = file.readall()
    if expected is not None:
        _check_digest(path, hashlib.sha256(content).hexdigest(), expected)
    return content


def check_file(path: Path, expected: FileRecord) -> None:
    """Raise unless the file's size and content are as recorded."""
    with open_regular(path, expected) as file:
        _check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), expected)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, flush: bool = True) -> FileRecord:
    """Write CPU tensors in the safetensors format. Contiguous tensors are not copied. See `write_file`."""
    import torch

    from paceline.core.tree import DTYPE_NAMES

    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
            kind = f"of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{name!r} is {kind}, which a safetensors file cannot store")
    # Multiples of the alignment first, then by decreasing item size: every tensor starts aligned.
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT_BYTES > 0, -item[1].itemsize))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered:
        offsets = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    contents = (bytes_of(tensor.contiguous()) for _, tensor in ordered)
    return write_file(path, chain([len(text).to_bytes(8, "little"), text], contents), flush=flush)


def read_tensors(path: Path, expected: FileRecord | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, copied into new memory. With `expected` the copies are checked."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path, expected) as file:
        try:
            # By descriptor: the library refuses paths that are not UTF-8.
            with safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as tensors:
                # Cloned: the library returns views of the mapped file, aligned as the file happens to be.
                copies = {name: tensors.get_tensor(name).clone() for name in tensors.offset_keys()}
        except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from None
        if expected is not None:
            # The library has checked that the file is a header and the tensors, one after another.
            length = file.read(8)
            digest = hashlib.sha256(length + file.read(int.from_bytes(length, "little")))
            for copy in copies.values():
                digest.update(bytes_of(copy))
            _check_digest(path, digest.hexdigest(), expected)
        return copies


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary name beside `path`, for a file or folder that is renamed to `path` when the block has succeeded."""
    unfinished = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        _remove(unfinished)
    if flush:
        flush_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed in `replacing(path)` has left."""
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        _remove(unfinished)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush the folder's entries (names and renames, not contents) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path, expected: FileRecord | None = None) -> Iterator[FileIO]:
    """A regular file, of the expected size. Links are not followed, and a pipe does not block."""
    try:
        with FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            if expected is not None and status.st_size != expected.size:
                raise CheckpointError(f"{path} has {status.st_size} bytes, the manifest says {expected.size}")
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _check_digest(path: Path, found: str, expected: FileRecord) -> None:
    if found != expected.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, the manifest says {expected.sha256}")
