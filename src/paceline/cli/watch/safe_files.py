"""Reading files below a runs folder, and nothing else: symbolic links, pipes and very large documents are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from paceline.observe.run_files import read_mapping, unchanged

MAX_DOCUMENT_BYTES = 1 << 20


def file_stat(path: Path) -> os.stat_result | None:
    """None unless this is a regular file in a folder that is not a symbolic link."""
    found = _stat(path, stat.S_ISREG)
    return found if found is not None and is_folder(path.parent) else None


def is_folder(path: Path) -> bool:
    return _stat(path, stat.S_ISDIR) is not None


def folder_stamp(path: Path) -> int:
    """When something was added to a folder or removed from it, in nanoseconds; 0 if there is none."""
    found = _stat(path, stat.S_ISDIR)
    return 0 if found is None else found.st_mtime_ns


def entries(folder: Path) -> list[Path]:
    """What is in a folder; empty for a symbolic link."""
    try:
        return list(folder.iterdir()) if is_folder(folder) else []
    except OSError:
        return []


def _stat(path: Path, is_kind: Any) -> os.stat_result | None:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):  # a name with a zero byte
        return None
    return found if is_kind(found.st_mode) else None


def document(path: Path) -> dict[str, Any]:
    """The object in a JSON file, which must not be changed; empty if there is none."""
    found = file_stat(path)
    return {} if found is None or found.st_size > MAX_DOCUMENT_BYTES else unchanged(read_mapping, path)


def read_bytes(path: Path, max_bytes: int, *, from_end: bool = False) -> bytes | None:
    """At most this many bytes of a file, from its beginning or its end; None if it cannot be read."""
    if not is_folder(path.parent):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(descriptor)
        start = max(0, found.st_size - max_bytes) if from_end else 0
        return os.pread(descriptor, max_bytes, start) if stat.S_ISREG(found.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
