"""Starts a run: from the newest checkpoint that every worker can read, from given weights, or from scratch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import step_folder, step_of, unusable
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.reader import Checkpoint, checkpoint_at, read_weights
from paceline.checkpoint.run_folder import RunFolder, raising_on_all_workers
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, gather
from paceline.core.errors import PacelineError
from paceline.core.processes import is_worker
from paceline.plan.epoch import Position
from paceline.run.saving.identity import differences
from paceline.run.saving.options import OWN as OWN
from paceline.run.saving.options import Checkpoints, Resume
from paceline.run.saving.state import (
    HasState,
    load_model,
    load_random_state,
    load_replica,
    model_differences,
    model_state,
    without_wrapper,
)
from paceline.run.saving.validation import optimizer_differences, replica_problems, structure_problems
from paceline.run.step import loop_state
from paceline.run.step.loop import Loop
from paceline.run.step.replica import Replica

logger = logging.getLogger("paceline")

States: TypeAlias = dict[str, Any]

RESTART_NAME = ".restart.json"

# What load_state_dict raises for a state of the wrong structure.
_LOAD_ERRORS = (CheckpointError, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


class NoProgressError(PacelineError):
    """The workers were restarted and died again before a step was saved, so another restart would not help."""


class Resumption:
    """Finds the checkpoint and loads the replica. Then: `load_loop`, `load` for registered objects, `complete`."""

    def __init__(
        self,
        settings: Checkpoints,
        init_from: str | os.PathLike[str] | None,
        folder: RunFolder,
        communicator: Communicator,
        replica: Replica,
        identity: Mapping[str, Any],
    ) -> None:
        self._world = communicator.world
        self._has_shared_disk = settings.disk == "shared"
        self._skip = set(settings.skip)
        excluded = {*settings.skip, *settings.leave_out, *(() if replica.schedulers else ("scheduler",))}
        self._own = [name for name in OWN if name not in excluded]
        self.position = Position()
        self.folder: Path | None = None  # of the checkpoint; None for a fresh start
        self._checkpoint: Checkpoint | None = None
        self._states: States = {}
        self._expected: list[str] = []  # components that are not registered yet
        if (found := _find(folder, settings.resume, self._read, communicator)) is not None:
            self._checkpoint, self._states = found
            self.folder = self._checkpoint.folder
            with raising_on_all_workers(communicator):
                self._check(self._checkpoint, replica, identity, settings.allow)
                with self._explaining("the model, optimizer or scheduler"):
                    load_replica(replica, self._states)
            _discard_newer(folder, self._checkpoint)
            self._expected = [name for name in self.saved if name not in {*OWN, *self._skip}]
        elif init_from is not None:
            load_weights(replica.model, Path(init_from))
        _check_progress(folder.root, self.position.step, communicator)

    def load_loop(self, loop: Loop) -> None:
        if "engine" in self._states:
            with self._explaining("component 'engine'"):
                loop_state.load_state(loop, self._states["engine"])

    def load(self, name: str, thing: HasState, pattern: Pattern) -> None:
        """Load the state that was saved under this name."""
        if self._checkpoint is None or name in self._skip:
            return
        if name not in self._expected:
            if pattern is Pattern.GLOBAL and not self._has_shared_disk and not self._world.is_main:
                return  # it is on the disk of rank 0's node
            raise CheckpointError(
                f"{self.folder} has no component {name!r}: register it under the name it was saved with, before the "
                f"first epoch, or add it to skip=[{name!r}] if it is new"
            )
        state = self._checkpoint.load_own(name, self._world)
        with self._explaining(f"component {name!r}", f"skip=[{name!r}]"):
            thing.load_state_dict(state)
        self._expected.remove(name)

    @property
    def saved(self) -> Collection[str]:
        """The components of the checkpoint; empty for a fresh start."""
        return () if self._checkpoint is None else self._checkpoint.manifest.contents.components

    def complete(self) -> None:
        """Called before the first step: raises if saved state was not loaded, and restores the random generators."""
        if self._expected:
            raise CheckpointError(
                f"{self.folder} holds state of {', '.join(self._expected)}, which was not registered: call "
                f"trainer.register before the first epoch, or set skip={self._expected}"
            )
        if "random" in self._states:
            load_random_state(self._states["random"], self._world.device)
        self._states.clear()  # as large as the replica

    def _read(self, checkpoint: Checkpoint) -> States:
        if missing := [name for name in self._own if name not in checkpoint.manifest.contents.components]:
            raise CheckpointError(
                f"{checkpoint.folder} does not hold {', '.join(missing)}: set skip={missing} to start without"
            )
        return {name: checkpoint.load_own(name, self._world) for name in self._own}

    @contextmanager
    def _explaining(self, what: str, skip: str = "skip=[...]") -> Iterator[None]:
        """Add to a loading error what was loaded, and from where."""
        try:
            yield
        except _LOAD_ERRORS as error:
            if isinstance(error, PacelineError) and not isinstance(error, CheckpointError):
                raise
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{what} of {self.folder} cannot be loaded: {text}. The files are intact, so it was saved like this: "
                f"resume from another checkpoint, or set {skip} to start without the saved state"
            ) from error

    def _check(
        self, checkpoint: Checkpoint, replica: Replica, identity: Mapping[str, Any], allow: Collection[str]
    ) -> None:
        """Raise, before anything is loaded, if the checkpoint is of another run or has invalid states."""
        states = self._states
        invalid = f"the files of {checkpoint.folder} are intact, but do not contain valid states of a run"
        start_without = "Resume from another checkpoint, or set skip=[...] to start without these components"
        _refuse(invalid, structure_problems(states, checkpoint.step), start_without)
        if "engine" in states:
            self.position = Position.from_dict(states["engine"]["position"])
        lines = differences(checkpoint.manifest.configuration, identity, allow, self.position)
        if "model" in states:
            lines += model_differences(states["model"], model_state(replica.model))
        if "optimizer" in states:
            replica.add_groups(states.get("engine", {}).get("groups", []))
            lines += optimizer_differences(states["optimizer"], replica.optimizers)
        remedy = "Use the settings that the checkpoint was saved with, or list in allow=[...] those that may differ"
        _refuse(f"{checkpoint.folder} is of another run than this one", lines, remedy)
        _refuse(invalid, replica_problems(states, replica), start_without)


def load_weights(model: Any, path: Path) -> None:
    """Load weights whose names, apart from those of wrappers, and shapes must match the model's."""
    own = model_state(model)
    weights = without_wrapper(read_weights(path), own)
    lines = model_differences(weights, own)
    _refuse(f"the weights in {path} do not fit the model", lines, "Give weights that were saved from such a model")
    load_model(model, weights)


def _refuse(what: str, lines: Collection[str], remedy: str) -> None:
    """Raise an error that lists the problems, if there are any."""
    if lines:
        raise CheckpointError("\n  ".join([f"{what}:", *lines]) + f"\n{remedy}")


# Which checkpoint


def _find(
    folder: RunFolder, resume: Resume, read: Callable[[Checkpoint], States], communicator: Communicator
) -> tuple[Checkpoint, States] | None:
    """The checkpoint to resume from and its states, from `read`; None to start from scratch.

    Restarted workers resume from the newest checkpoint: `resume` applies to the first start only.
    """
    newest_first, flaws = _common_checkpoints(folder, communicator)
    is_path = not (resume is None or resume == "auto" or isinstance(resume, bool))
    if not newest_first and not is_path:
        _refuse(
            f"{folder.root} has no usable checkpoint, but entries that look like one",
            flaws,
            "To resume from one of them, apply its remedy or set resume=PATH; to start from scratch, move them out of "
            "the folder",
        )
    if communicator.world.is_main:
        for flaw in flaws:
            logger.warning("not used: %s", flaw)
    if newest_first and (resume == "auto" or resume is True or _restart_count()):
        return _first_readable(newest_first, read, communicator)
    if resume is True:
        raise CheckpointError(f"{folder.root} has no checkpoint to resume from: start with resume='auto'")
    if newest_first and not is_path:
        raise CheckpointError(
            f"{folder.root} has checkpoints up to {newest_first[0].name}: set resume='auto' to continue from there, or "
            "choose another folder"
        )
    if not is_path:
        return None
    with raising_on_all_workers(communicator):
        checkpoint = checkpoint_at(Path(resume))  # type: ignore[arg-type]  # not a bool
        return checkpoint, read(checkpoint)


def _common_checkpoints(folder: RunFolder, communicator: Communicator) -> tuple[list[Path], list[str]]:
    """The checkpoints that every worker sees, newest first and disk before memory; and the flaws of others."""
    own = [(step_of(path), path.parent == folder.memory) for path in folder.found()]
    flaws_here = {str(path): flaw for path, flaw in unusable(folder.root).items()}
    workers = [json.loads(text) for text in gather(json.dumps([own, flaws_here]), communicator)]
    seen = [{(step, is_memory) for step, is_memory in found} for found, _ in workers]
    flaws = {path: flaw for _, flaws_there in workers for path, flaw in flaws_there.items()}
    common = sorted(set.intersection(*seen), key=lambda found: (-found[0], found[1]))
    if not common and any(not is_memory for found in seen for _, is_memory in found):
        ranks = [rank for rank, found in enumerate(seen) if not found]
        raise CheckpointError(
            f"some workers have checkpoints in {folder.root}, but ranks {ranks or 'of different nodes'} share none of "
            "them: copy the folder to every node, or choose an empty one"
        )
    paths = [step_folder(folder.memory if is_memory else folder.root, step) for step, is_memory in common]
    return paths, list(flaws.values())


def _first_readable(
    candidates: list[Path], read: Callable[[Checkpoint], States], communicator: Communicator
) -> tuple[Checkpoint, States]:
    """The first candidate that every worker can read."""
    problem = ""
    for path in candidates:
        try:
            with raising_on_all_workers(communicator):
                checkpoint = Checkpoint(path)
                return checkpoint, read(checkpoint)
        except CheckpointError as error:
            problem = str(error)
            if communicator.world.is_main:
                logger.warning("%s cannot be resumed from, trying the one before it: %s", path, problem)
    raise CheckpointError(f"no checkpoint can be read. The last one tried: {problem}")


def _discard_newer(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Move checkpoints that are not earlier steps of the resumed run out of the run's folders."""
    is_own = checkpoint.folder.parent.resolve() in (folder.root.resolve(), folder.memory.resolve())
    newer = [path for path in folder.found() if not is_own or (step_of(path) or 0) > checkpoint.step]
    if aside := folder.discard(newer):
        text = "resumed from %s; the checkpoints of %s that do not precede it were moved to %s"
        logger.warning(text, checkpoint.folder, folder.root, aside)


def _restart_count() -> int:
    """How often the workers were restarted, according to their launcher (Paceline's or torchrun)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_worker() else 0


def _check_progress(root: Path, step: int, communicator: Communicator) -> None:
    """Raise on all workers if they were restarted twice at the same step."""
    if _restart_count() and not decided_by_rank_0(lambda: _note_restart(root / RESTART_NAME, step), communicator):
        raise NoProgressError(
            f"the workers were restarted at step {step} and died before a newer one was saved: save more often, or "
            "find out why they died"
        )


def _note_restart(path: Path, step: int) -> bool:
    """Record this restart; False if the previous one of this launch was at this step or a later one."""
    launch, last = os.environ.get("TORCHELASTIC_RUN_ID", ""), {}
    if _restart_count() > 1:  # else a record is of another launch, even under this name: torchrun's default is "none"
        with suppress(OSError, ValueError):
            last = json.loads(path.read_text())
    if last.get("launch") == launch and step <= last["step"]:
        return False
    try:
        path.write_text(json.dumps({"launch": launch, "step": step}))
    except OSError as error:
        logger.warning("restarts without progress are not detected: %s cannot be written: %s", path, error.strerror)
    return True
