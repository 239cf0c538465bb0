"""The folders of a run: which checkpoints there are, making one visible, deleting one.

A checkpoint of step 400 is the folder `step-00000400`. While it is written it is `.step-00000400.partial-TOKEN`; the
rename is atomic. A checkpoint has the final name and a manifest. Entries with the name and without a manifest are
reported by `unusable` and never deleted.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from paceline.checkpoint.errors import cause_of
from paceline.checkpoint.files import flush_folder
from paceline.checkpoint.manifest import MANIFEST_NAME as MANIFEST_NAME

logger = logging.getLogger("paceline")

_NAMED = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(?P<final>step-\d{8,})\.(?P<state>partial|replaced|deleted)-[A-Za-z0-9]+")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the folder's name; None if it is not a checkpoint's name."""
    match = _NAMED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def partial_folder(root: Path, step: int, token: str) -> Path:
    """The hidden name of a checkpoint that is being written."""
    return root / f".{step_folder(root, step).name}.partial-{token}"


def new_token() -> str:
    """Names one attempt at saving. Workers that write into the same folder need the same token."""
    return secrets.token_hex(4)


def complete_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint in `root`, ascending; empty if there is no such folder."""
    return sorted(step for path, step in _named(root) if _flaw(path, step) is None)


def unusable(root: Path) -> dict[Path, str]:
    """Entries of `root` that are named like a checkpoint and are not one, with reason and remedy; by step."""
    entries = sorted(_named(root), key=lambda found: found[1])
    return {path: flaw for path, step in entries if (flaw := _flaw(path, step))}


def _named(root: Path) -> list[tuple[Path, int]]:
    paths = root.iterdir() if root.is_dir() else ()
    return [(path, step) for path in paths if (step := step_of(path)) is not None]


def _flaw(path: Path, step: int) -> str | None:
    """Why this is not a complete checkpoint of the step, without reading its content."""
    if path.is_symlink():
        return f"{path} is a symbolic link: replace it with the folder it points to"
    if not path.is_dir():
        return f"{path} is a file, not a folder: remove it"
    if not (path / MANIFEST_NAME).is_file():
        return f"{path} has no {MANIFEST_NAME}, so it is not complete: copy it again with all its files, or remove it"
    if path.name != (name := step_folder(path.parent, step).name):
        return f"{path} is not a checkpoint's name: rename it to {name}"
    return None


def latest(root: Path) -> Path | None:
    """The checkpoint with the highest step."""
    steps = complete_steps(root)
    return step_folder(root, steps[-1]) if steps else None


def make_visible(partial: Path, final: Path, *, flush: bool = True) -> None:
    """Rename a finished folder. An older checkpoint of that name is deleted after the rename succeeded."""
    replaced = partial.with_name(partial.name.replace(".partial-", ".replaced-"))
    if final.exists():
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    if flush:
        flush_folder(partial.parent)
    with suppress(OSError):  # usually, there is none
        # Renamed before: `clean_up` must not restore what is deleted in part.
        shutil.rmtree(replaced.rename(partial.with_name(partial.name.replace(".partial-", ".deleted-"))))


def delete(folder: Path) -> None:
    """Delete a checkpoint. It is renamed before, so an incomplete one is never visible."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted-{new_token()}")))


def move_aside(root: Path, entries: Sequence[Path]) -> Path:
    """Move these entries of `root` into a new folder `set-aside-N`, in the given order; returns the folder."""
    aside = next(path for number in count(1) if not (path := root / f"set-aside-{number}").exists())
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
    flush_folder(aside)
    flush_folder(root)
    return aside


def clean_up(root: Path) -> None:
    """Remove the remains of interrupted saves and deletions, and restore a checkpoint that was being replaced.

    Only for the worker that holds the run's lock, at the start of a run: it also removes a save in progress.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        final = root / match["final"]
        if match["state"] == "replaced" and not final.exists():
            path.rename(final)
            flush_folder(root)
        else:
            try:
                shutil.rmtree(path)
            except OSError as error:  # on NFS, for example, while a process has one of its files open
                logger.warning("%s could not be removed: %s", path, cause_of(error))
