"""Private folders in places that all users share, such as /dev/shm and the folder for temporary files.

Another user may create a name there first. So a folder is created with mode 0700, then checked, and used only if it is
a real folder that belongs to this user and is closed to all others. Such places have the sticky bit, so other users
cannot replace it afterwards.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def private_folder(folder: Path) -> None:
    """Create `folder`, or check the existing one. PermissionError if it is not private to this user."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if reason := why_not_private(folder):
        raise PermissionError(f"{folder} is not a private folder of this user: {reason}; remove it")


def why_not_private(folder: Path) -> str | None:
    """Why `folder` is not private to this user; None if it is."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return "it does not exist"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"others have access to it, its mode is {stat.S_IMODE(status.st_mode):04o}"
    return None
