"""The folders of a run: which checkpoints there are, making one visible, taking one away.

A checkpoint of step 400 is the folder `step-00000400`. While it is written it is `.step-00000400.partial-TOKEN`; the
rename in between is one step for everybody who looks. Only what has the final name and a manifest is a checkpoint.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.checkpoint.hashed_file import flush_folder
from paceline.checkpoint.manifest import MANIFEST_NAME

_COMPLETE = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(?P<final>step-\d{8,})\.(?P<state>partial|replaced|deleted)-[A-Za-z0-9]+")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int, token: str) -> Path:
    return _hidden(root, step, "partial", token)


def new_token() -> str:
    """A name for one attempt at saving. Workers that write into one folder need the same: rank 0's."""
    return secrets.token_hex(4)


def complete_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint in `root`, rising; none where there is no such folder."""
    if not root.is_dir():
        return []
    matches = ((_COMPLETE.fullmatch(path.name), path) for path in root.iterdir())
    return sorted(
        int(match[1])
        for match, path in matches
        if match is not None and not path.is_symlink() and (path / MANIFEST_NAME).is_file()
    )


def latest(root: Path) -> Path | None:
    """The checkpoint with the highest step."""
    steps = complete_steps(root)
    return step_folder(root, steps[-1]) if steps else None


def latest_common(steps_by_node: Sequence[Sequence[int]]) -> int | None:
    """With disks of their own, the highest step of which every one of the nodes, at least one, has a checkpoint."""
    first, *others = steps_by_node
    return max(set(first).intersection(*others), default=None)


def make_visible(partial: Path, final: Path, *, flush: bool = True) -> None:
    """Rename a finished folder. A checkpoint that already has the name stays until the new one is there."""
    root = partial.parent
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
        flush_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(root: Path, step: int) -> None:
    """Remove a checkpoint: first from sight, then from the disk, so that half of one is never seen."""
    hidden = _hidden(root, step, "deleted", new_token())
    step_folder(root, step).rename(hidden)
    shutil.rmtree(hidden)


def set_aside(root: Path, steps: Iterable[int]) -> Path | None:
    """Move these checkpoints into a new folder `set-aside-N` in `root`, whole; returns it, None if there was none.

    For who went back to an older step: what came after it belongs to a course that was given up. The highest goes
    first, so that an interruption leaves the lower ones in sight, as they were.
    """
    falling = sorted(steps, reverse=True)
    if not falling:
        return None
    number = 1
    while (aside := root / f"set-aside-{number}").exists():
        number += 1
    aside.mkdir()
    for step in falling:
        step_folder(root, step).rename(aside / step_folder(root, step).name)
    flush_folder(aside)
    flush_folder(root)
    return aside


def clean_up(root: Path) -> list[Path]:
    """Remove what an interrupted save or deletion left, and put back what it was about to replace.

    For one worker to call at the start of a run, holding the run's lock: it would remove a save under way.
    """
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        final = root / match["final"]
        if match["state"] == "replaced" and not final.exists():
            path.rename(final)
            flush_folder(root)
        else:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _hidden(root: Path, step: int, state: str, token: str) -> Path:
    return root / f".{step_folder(root, step).name}.{state}-{token}"
