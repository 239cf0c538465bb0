"""Whether the places that a project names are there, and can be used: looked at before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reader import checkpoint_at
from paceline.cli.config import ConfigError, Project
from paceline.cli.config.errors import Problem, in_order
from paceline.core.world import devices


def check_places(project: Project) -> None:
    """Raise `ConfigError` with all that is missing or taken: checkpoints to begin with, folders to write to, GPUs."""
    problems = [Problem(project.origin(key), f"{key}: {message}") for key, message in _problems(project)]
    if problems:
        raise ConfigError(in_order(problems))


def _problems(project: Project) -> Iterator[tuple[str, str]]:
    settings = project.settings
    saving = settings.checkpoints
    if saving.save and isinstance(saving.resume, str) and saving.resume != "auto":
        yield from _no_checkpoint("checkpoints.resume", project.folder / saving.resume)
    if saving.init_from is not None:
        path = project.folder / saving.init_from
        if not path.exists():
            yield "checkpoints.init_from", f"there are no weights at {path}: give a checkpoint, or a file of weights"
        elif path.is_dir():
            yield from _no_checkpoint("checkpoints.init_from", path)
    if saving.save and saving.folder is not None:
        yield from _no_folder("checkpoints.folder", project.folder / saving.folder)
    yield from _no_folder("output", Path(settings.output))
    if isinstance(settings.devices, tuple):
        visible = sum(device.type == "cuda" for device in devices())
        if visible < len(settings.devices):
            named = ", ".join(map(str, settings.devices))
            yield (
                "devices",
                f"of the GPUs {named} this machine has {visible}: `paceline devices` shows them; or say cpu",
            )


def _no_checkpoint(key: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        checkpoint_at(path)
    except CheckpointError as error:
        yield key, str(error)


def _no_folder(key: str, path: Path) -> Iterator[tuple[str, str]]:
    """A problem if neither the folder nor one above it is there to make it in."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        yield key, f"{path} cannot be a folder, since {there} is a file: choose another"
