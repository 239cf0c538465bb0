"""Where a run begins: with the newest checkpoint that every worker can read, an older one, or nothing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reading import Checkpoint
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.weights import checkpoint_at
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, gather
from paceline.core.errors import PacelineError
from paceline.core.rank_variables import is_worker
from paceline.run.saving.options import Resume

logger = logging.getLogger("paceline")

RESTART_NAME = ".restart.json"


class NoProgressError(PacelineError):
    """The workers were restarted, died again, and no step was saved in between: another restart would gain nothing."""


@dataclass(frozen=True)
class Start:
    """Where to begin. See `Trainer.setup`."""

    resume: Resume = "auto"
    init_from: str | os.PathLike[str] | None = None
    allow: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, and the states that were read from it."""

    checkpoint: Checkpoint
    states: dict[str, Any]


def restarts() -> tuple[str, int]:
    """Which launch this worker belongs to, and how often it was restarted: its launcher, ours or torchrun, tells."""
    if not is_worker():
        return "", 0
    return os.environ.get("TORCHELASTIC_RUN_ID", ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def find(
    folder: RunFolder, resume: Resume, read: Callable[[Checkpoint], dict[str, Any]], communicator: Communicator
) -> Found | None:
    """The checkpoint to begin with, read by every worker; None for a fresh start.

    A group that was restarted goes on with its newest checkpoint: what `resume` says was for its first start.
    """
    is_restarted = restarts()[1] > 0
    newest_first, flaws = _common(folder, communicator)
    if flaws and not newest_first and (resume is None or resume == "auto" or isinstance(resume, bool)):
        raise CheckpointError(
            f"{folder.root} has no checkpoint that can be used, but what looks like one:\n  "
            + "\n  ".join(flaws)
            + "\nA fresh start beside them is refused: apply the remedy to the one to resume from, give resume=PATH, "
            "or move them out of the folder"
        )
    if communicator.world.is_main:
        for flaw in flaws:
            logger.warning("not used: %s", flaw)
    if (newest_first and is_restarted) or resume == "auto" or resume is True:
        found = _first_readable(newest_first, read, communicator)
        if found is None and resume is True:
            raise CheckpointError(f"{folder.root} has no checkpoint to resume from: begin with resume='auto'")
        return found
    if resume is None or resume is False:
        if newest_first:
            raise CheckpointError(
                f"{folder.root} has checkpoints up to {newest_first[0].name}: choose resume='auto' to go on from "
                "there, or another folder"
            )
        return None
    checkpoint = checkpoint_at(Path(resume))
    return Found(checkpoint, read(checkpoint))


def forget_newer(folder: RunFolder, found: Found) -> None:
    """Leave nothing in the run's folders that is not an earlier step of the same course."""
    is_own = found.checkpoint.folder.parent.resolve() in (folder.root.resolve(), folder.memory.resolve())
    steps = [step for _, step in folder.found() if not is_own or step > found.checkpoint.step]
    if aside := folder.forget(steps):
        logger.warning(
            "the run goes on from %s; checkpoints of %s that it does not come from were moved to %s",
            found.checkpoint.folder,
            folder.root,
            aside,
        )


def check_progress(root: Path, step: int, communicator: Communicator) -> None:
    """Raise on every worker if the group was restarted twice from the same step."""
    launch, count = restarts()
    if count and (before := decided_by_rank_0(lambda: _note_restart(root / RESTART_NAME, launch, step), communicator)):
        raise NoProgressError(
            f"the workers were restarted at step {before['step']} and died before a newer one was saved: save more "
            "often, or look at what ended them"
        )


def _note_restart(path: Path, launch: str, step: int) -> dict[str, Any] | None:
    """The restart before this one, if it was at this step or a later one; else this one is the last known."""
    try:
        last = json.loads(path.read_text())
    except (OSError, ValueError):
        last = {}
    if last.get("launch") == launch and step <= last["step"]:
        return dict(last)
    try:
        path.write_text(json.dumps({"launch": launch, "step": step}))
    except OSError as error:
        logger.warning(
            "restarts without progress are not noticed, since %s cannot be written: %s", path, error.strerror
        )
    return None


def _common(folder: RunFolder, communicator: Communicator) -> tuple[list[Path], list[str]]:
    """The checkpoints that every worker sees, newest first; of two of one step the one on disk.

    And what some worker sees that looks like a checkpoint and is none: where it is, and why.
    """
    own = json.dumps({"found": folder.found(), "unusable": folder.unusable()})
    told = [json.loads(text) for text in gather(own, communicator)]
    seen = [{(where, step) for where, step in worker["found"]} for worker in told]
    flaws = {path: flaw for worker in told for path, flaw in worker["unusable"].items()}
    common = sorted(set.intersection(*seen), key=lambda place: (-place[1], place[0]))
    if not common and any(where == "disk" for places in seen for where, _ in places):
        ranks = [rank for rank, places in enumerate(seen) if not places]
        raise CheckpointError(
            f"some workers have checkpoints in {folder.root}, but ranks {ranks or 'of different nodes'} share none of "
            "them: bring the folder to every node, or choose an empty one"
        )
    return [folder.path(where, step) for where, step in common], list(flaws.values())


def _first_readable(
    candidates: list[Path], read: Callable[[Checkpoint], dict[str, Any]], communicator: Communicator
) -> Found | None:
    problem = ""
    for path in candidates:
        found, own = None, ""
        try:
            checkpoint = Checkpoint(path)
            found = Found(checkpoint, read(checkpoint))
        except (CheckpointError, OSError) as error:
            own = str(error)
        problem = next(filter(None, gather(own, communicator)), "")
        if found is not None and not problem:
            return found
        logger.warning("%s cannot be resumed from, the one before it is tried: %s", path, problem)
    if problem:
        raise CheckpointError(f"no checkpoint can be read. The last one tried: {problem}")
    return None
