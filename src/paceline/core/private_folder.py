"""Folders of our own in places that all users share, such as /dev/shm and the folder for temporary files.

Any user can make any name there first. So a folder is made with mode 0700, looked at again after that, and used only
if it is a real folder, this user's own, and closed to everybody else. In a place with the sticky bit, as those two
have, nobody else can replace it afterwards.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def private_folder(folder: Path) -> None:
    """Make `folder`, whose parent exists, or check the one that is there; PermissionError if it is not ours alone."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if reason := why_not_private(folder):
        raise PermissionError(f"{folder} is not a private folder of this user: {reason}; remove it")


def new_private_folder(prefix: str, place: Path | None = None) -> Path:
    """A new folder with a name that nobody can guess, in `place` or among the temporary files."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    private_folder(folder)
    return folder


def why_not_private(folder: Path) -> str | None:
    """Why `folder` may not be used as a private one; None if it may."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return "it is not there"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"others have access to it, its mode is {stat.S_IMODE(status.st_mode):04o}"
    return None
