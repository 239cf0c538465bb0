"""The beginning of a run that is saved: from a checkpoint, from given weights, or from nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reading import Checkpoint
from paceline.checkpoint.run_folder import RunFolder, failing_together
from paceline.checkpoint.weights import read_weights
from paceline.comm.base import Communicator
from paceline.core.errors import PacelineError
from paceline.plan.steps import Position
from paceline.run.saving.identity import differences
from paceline.run.saving.recovery import Found, Start, check_progress, find, forget_newer
from paceline.run.saving.shapes import (
    engine_problems,
    group_problems,
    optimizer_differences,
    optimizer_problems,
    random_problems,
    scheduler_problems,
    shown,
)
from paceline.run.saving.state import (
    listed,
    load_model,
    load_random_state,
    load_replica,
    model_differences,
    model_state,
    optimizer_state,
)
from paceline.run.step.loop import Loop
from paceline.run.step.replica import Replica

# What code that is handed a state of the wrong shape raises.
_LOAD_ERRORS = (CheckpointError, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)

# The components that are the engine's own.
OWN = ("model", "optimizer", "scheduler", "engine", "random")


class HasState(Protocol):
    """What can take part in checkpoints."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Beginning:
    """Finds where to begin and loads the replica; then `load_loop`, `load` for what the user registers, `complete`.

    `unsaved` names components that this run does not save, and so does not expect.
    """

    def __init__(
        self,
        start: Start,
        folder: RunFolder,
        communicator: Communicator,
        replica: Replica,
        identity: Mapping[str, Any],
        unsaved: Collection[str],
    ) -> None:
        self._world = communicator.world
        self._skip = set(start.skip)
        self._own = [name for name in OWN if name not in self._skip and name not in unsaved]
        if not replica.schedulers and "scheduler" in self._own:
            self._own.remove("scheduler")
        self._found = find(folder, start.resume, self._read, communicator)
        with failing_together(communicator):
            if self._found is not None:
                self._check(self._found, replica, identity, start.allow)
                with self._naming("the model, optimizer or scheduler"):
                    load_replica(replica, self._found.states)
        check_progress(folder.root, self.position.step, communicator)
        if self._found is not None:
            forget_newer(folder, self._found)
        elif start.init_from is not None:
            load_weights(replica.model, Path(start.init_from))
        self._expected = [] if self._found is None else self._others(self._found.checkpoint)

    @property
    def checkpoint(self) -> Path | None:
        return None if self._found is None else self._found.checkpoint.folder

    @property
    def position(self) -> Position:
        if self._found is None or "engine" not in self._found.states:
            return Position()
        return Position.from_dict(self._found.states["engine"]["position"])

    def load_loop(self, loop: Loop) -> None:
        if self._found is not None and "engine" in self._found.states:
            with self._naming("component 'engine'"):
                loop.load_state_dict(self._found.states["engine"])

    def load(self, name: str, thing: HasState) -> None:
        """Put back what was registered under this name when the checkpoint was saved."""
        if self._found is None or name in self._skip:
            return
        if name not in self._expected:
            raise CheckpointError(
                f"{self.checkpoint} has no component {name!r}: register it under the name it had, before the first "
                f"epoch, or name it in skip=[{name!r}] if it is new"
            )
        state = self._found.checkpoint.load_own(name, self._world)
        with self._naming(f"component {name!r}", f" or name it in skip=[{name!r}] to begin it anew"):
            thing.load_state_dict(state)
        self._expected.remove(name)

    def complete(self) -> None:
        """Training is about to go on: the last moment for everything that was saved to have found its place."""
        if self._found is None:
            return
        if self._expected:
            raise CheckpointError(
                f"{self.checkpoint} holds state of {', '.join(self._expected)}, which nobody registered: call "
                f"trainer.register before the first epoch, or name them in skip={self._expected}"
            )
        if "random" in self._found.states:
            load_random_state(self._found.states["random"], self._world.device)
        self._found.states.clear()  # memory as large as the replica

    def _read(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if missing := [name for name in self._own if name not in checkpoint.manifest.contents.components]:
            raise CheckpointError(
                f"{checkpoint.folder} does not hold {', '.join(missing)}: name in skip={missing} what is to begin anew"
            )
        return {name: checkpoint.load_own(name, self._world) for name in self._own}

    def _others(self, checkpoint: Checkpoint) -> list[str]:
        return [name for name in checkpoint.manifest.contents.components if name not in {*OWN, *self._skip}]

    @contextmanager
    def _naming(self, what: str, remedy: str = "") -> Iterator[None]:
        """An error of loading says what was loaded, and from where."""
        try:
            yield
        except _LOAD_ERRORS as error:
            if isinstance(error, PacelineError) and not isinstance(error, CheckpointError):
                raise
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{what} of {self.checkpoint} cannot be loaded: {text}. The files are intact, so it was saved so: "
                f"resume from another checkpoint,{remedy or ' or name in skip=[...] what is to begin anew'}"
            ) from error

    def _check(self, found: Found, replica: Replica, identity: Mapping[str, Any], allow: Collection[str]) -> None:
        states, folder = found.states, found.checkpoint.folder
        _refuse_shapes(folder, _first_problems(states, found.checkpoint.step))
        lines = differences(found.checkpoint.manifest.configuration, identity, allow, self.position)
        if "model" in states:
            lines += model_differences(states["model"], model_state(replica.model))
        if "optimizer" in states:
            replica.add_groups(states.get("engine", {}).get("groups", []))
            lines += optimizer_differences(listed(states["optimizer"]), listed(optimizer_state(replica)))
        if lines:
            raise CheckpointError(
                f"{folder} is of another run than this one:\n  "
                + "\n  ".join(lines)
                + "\nGive what the checkpoint was saved with, or name in allow=[...] the settings that may differ"
            )
        problems = []
        if "optimizer" in states:
            problems += optimizer_problems(listed(states["optimizer"]), replica.optimizers)
        if "scheduler" in states:
            problems += scheduler_problems(listed(states["scheduler"]), replica.schedulers)
        _refuse_shapes(folder, problems)


def _first_problems(states: Mapping[str, Any], step: int) -> list[str]:
    """What is wrong with the states of a checkpoint of this step, whatever run it is of."""
    problems = []
    if "engine" in states:
        problems += engine_problems(states["engine"], step)
    if "model" in states and not isinstance(states["model"], Mapping):
        problems += model_differences(states["model"], {})
    if "optimizer" in states:
        problems += group_problems(listed(states["optimizer"]))
    if "scheduler" in states:
        found = [state for state in listed(states["scheduler"]) if not isinstance(state, Mapping)]
        problems += [f"scheduler: it is {shown(state)}, expected a dict" for state in found]
    if "random" in states:
        problems += random_problems(states["random"])
    return problems


def _refuse_shapes(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder} is intact, but does not hold what a run saves:\n  "
            + "\n  ".join(problems)
            + "\nResume from another checkpoint, or name in skip=[...] the components that are to begin anew"
        )


def load_weights(model: Any, path: Path) -> None:
    """Start from these weights, whose names and shapes must be the model's."""
    weights = read_weights(path)
    if lines := model_differences(weights, model_state(model)):
        raise CheckpointError(f"the weights in {path} are not this model's:\n  " + "\n  ".join(lines))
    load_model(model, weights)
