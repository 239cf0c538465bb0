"""Reading files below a runs folder, and nothing else: symbolic links, pipes and very large documents are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from paceline.observe.run_files import read_json

MAX_DOCUMENT_BYTES = 1 << 20


def file_stat(path: Path) -> os.stat_result | None:
    """None unless this is a regular file in a folder that is not a symbolic link."""
    return _stat(path, stat.S_ISREG) if is_folder(path.parent) else None


def is_folder(path: Path) -> bool:
    return _stat(path, stat.S_ISDIR) is not None


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


def document(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    found = file_stat(path)
    value = read_json(path) if found is not None and found.st_size <= max_bytes else None
    return value if isinstance(value, dict) else {}


def read_bytes(path: Path, max_bytes: int, *, from_end: bool = False) -> bytes | None:
    """At most this many bytes of a file, from its beginning or its end; None if it cannot be read."""
    if file_stat(path) is None:
        return None
    try:
        with path.open("rb") as file:
            if from_end:
                file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return None
