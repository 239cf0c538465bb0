"""The folders of a run: which checkpoints there are, making one visible, taking one away.

A checkpoint of step 400 is the folder `step-00000400`. While it is written it is `.step-00000400.partial-TOKEN`; the
rename in between is one step for everybody who looks. Only what has the final name and a manifest is a checkpoint;
what has only the name is reported by `unusable`, and never deleted.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.checkpoint.hashed_file import flush_folder
from paceline.checkpoint.manifest import MANIFEST_NAME

_NAMED = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(?P<final>step-\d{8,})\.(?P<state>partial|replaced|deleted)-[A-Za-z0-9]+")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that the folder's name says; None if it is not a checkpoint's name."""
    match = _NAMED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def partial_folder(root: Path, step: int, token: str) -> Path:
    return _hidden(root, step, "partial", token)


def new_token() -> str:
    """A name for one attempt at saving. Workers that write into one folder need the same: rank 0's."""
    return secrets.token_hex(4)


def complete_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint in `root`, rising; none where there is no such folder."""
    return sorted(step for path, step in _named(root) if _flaw(path, step) is None)


def unusable(root: Path) -> dict[Path, str]:
    """What has the name of a checkpoint in `root` and is none, with the reason and the remedy; by rising step."""
    flaws = {path: _flaw(path, step) for path, step in sorted(_named(root), key=lambda found: found[1])}
    return {path: flaw for path, flaw in flaws.items() if flaw is not None}


def _named(root: Path) -> list[tuple[Path, int]]:
    if not root.is_dir():
        return []
    steps = [(path, step_of(path)) for path in root.iterdir()]
    return [(path, step) for path, step in steps if step is not None]


def _flaw(path: Path, step: int) -> str | None:
    """Why this is not a complete checkpoint of the step, as far as can be told without reading it."""
    if path.is_symlink():
        return f"{path} is a symbolic link: put the folder that it leads to in its place"
    if not path.is_dir():
        return f"{path} is a file, not a folder: remove it"
    if not (path / MANIFEST_NAME).is_file():
        return f"{path} has no {MANIFEST_NAME}, so it is not complete: copy it again with all its files, or remove it"
    if path.name != (name := step_folder(path.parent, step).name):
        return f"{path} is not how a checkpoint is named: rename it to {name}"
    return None


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
    return move_aside(root, [step_folder(root, step) for step in falling]) if falling else None


def move_aside(root: Path, entries: Sequence[Path]) -> Path:
    """Move these entries of `root`, whatever they are, into a new folder `set-aside-N`, in this order; returns it."""
    number = 1
    while (aside := root / f"set-aside-{number}").exists():
        number += 1
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
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
