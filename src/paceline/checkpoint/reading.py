"""Reading checkpoints back: every byte is checked before it is used, and nothing in a checkpoint is ever run."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import safetensors_file
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import complete_steps, step_folder, step_of
from paceline.checkpoint.hashed_file import check_file, read_file
from paceline.checkpoint.manifest import MANIFEST_NAME, WHOLE, Manifest
from paceline.checkpoint.pieces import part_of
from paceline.checkpoint.tree import unflatten
from paceline.core.world import World

MAX_JSON_BYTES = 1 << 30


class Checkpoint:
    """A complete checkpoint: its manifest is intact and its files, as far as can be told unread, are there.

    `load` reads a component and checks its files' checksums on the way. Errors name the file, what was expected and
    found, and the newest older checkpoint that is intact.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _pointing_to_an_older_one(folder):
            self.manifest = inspect(folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    def parts(self, name: str) -> tuple[str, ...]:
        """The parts of a component that are in this folder: `whole`, or `rank-0`, `rank-1`, or `node-0`."""
        components = self.manifest.contents.components
        if name not in components:
            raise CheckpointError(f"{self.folder} has no component {name!r}: it has {', '.join(components)}")
        return tuple(components[name].parts)

    def load(self, name: str, part: str = WHOLE) -> Any:
        """A component's state, its tensors on the CPU in memory of their own."""
        if part not in self.parts(name):
            raise CheckpointError(
                f"component {name!r} of {self.folder} has no part {part!r}: it has {', '.join(self.parts(name))}"
            )
        with _pointing_to_an_older_one(self.folder):
            return self._load(name, part)

    def load_own(self, name: str, world: World) -> Any:
        """This worker's part of a component's state; in a world of another size, that of the worker it stands for."""
        parts = self.parts(name)
        own = part_of(self.manifest.contents.components[name].pattern, world)
        return self.load(name, own if own in parts else parts[world.rank % len(parts)])

    def _load(self, name: str, part: str) -> Any:
        contents = self.manifest.contents
        stem = name if part == WHOLE else f"{name}.{part}"
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, bytes] = {}
        for file in contents.components[name].parts[part]:
            path, record = self.folder / file, contents.files[file]
            if file.endswith(".safetensors"):
                tensors.update(safetensors_file.read(path, record))
            else:
                texts[file] = read_file(path, MAX_JSON_BYTES, record)
        try:
            return unflatten(json.loads(texts[f"{stem}.json"]), tensors)
        except (CheckpointError, ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / stem}.json cannot be used: {error}") from None


def inspect(folder: Path) -> Manifest:
    """A checkpoint's manifest, once it and the folder's entries are as they should be; contents are not read."""
    manifest = _read_manifest(folder)
    if problems := _entry_problems(folder, manifest):
        raise CheckpointError("; ".join(problems.values()))
    return manifest


def verify(folder: Path) -> list[str]:
    """Read everything again and return all that is wrong with a checkpoint; nothing if it is intact."""
    try:
        manifest = _read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = _entry_problems(folder, manifest)
    for name, record in manifest.contents.files.items():
        if name not in problems:
            try:
                check_file(folder / name, record)
            except CheckpointError as error:
                problems[name] = str(error)
    return list(problems.values())


def newest_intact(root: Path, below: int | None = None) -> Path | None:
    """The checkpoint with the highest step (under `below`) in which `verify` finds nothing wrong."""
    steps = [step for step in complete_steps(root) if below is None or step < below]
    folders = (step_folder(root, step) for step in reversed(steps))
    return next((folder for folder in folders if not verify(folder)), None)


def _read_manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there, or not a folder")
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    try:
        manifest = Manifest.parse(read_file(path, MAX_JSON_BYTES))
    except CheckpointError as error:
        raise CheckpointError(str(error) if str(path) in str(error) else f"{path} {error}") from None
    if (named := step_of(folder)) is not None and named != manifest.step:
        raise CheckpointError(
            f"{folder} is named for step {named}, but its manifest says step {manifest.step}: rename it to "
            f"{step_folder(folder.parent, manifest.step).name}"
        )
    return manifest


def _entry_problems(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What the folder's entries tell without reading them: the listed files, regular, of their size, no others."""
    files = manifest.contents.files
    found = {path.name: path.lstat() for path in folder.iterdir() if path.name != MANIFEST_NAME}
    problems = {
        name: f"{folder / name} is missing, the manifest lists it with {files[name].size} bytes"
        for name in sorted(files.keys() - found.keys())
    }
    for name, status in sorted(found.items()):
        path = folder / name
        if name not in files:
            problems[name] = f"{path} is not in the manifest: a checkpoint holds only what was saved; remove it"
        elif not stat.S_ISREG(status.st_mode):
            problems[name] = f"{path} is not a regular file but a {_kind(status.st_mode)}: copy what it leads to here"
        elif status.st_nlink > 1:
            problems[name] = f"{path} is a hard link, so it can be changed from outside: put a copy in its place"
        elif status.st_size != files[name].size:
            problems[name] = f"{path} has {status.st_size} bytes, the manifest says {files[name].size}"
    return problems


def _kind(mode: int) -> str:
    return "symbolic link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "device or pipe"


@contextmanager
def _pointing_to_an_older_one(folder: Path) -> Iterator[None]:
    """Add to an error about a checkpoint which older one beside it can be used instead."""
    try:
        yield
    except CheckpointError as error:
        step = step_of(folder)
        older = newest_intact(folder.parent, below=step) if step is not None else None
        if older is None:
            raise
        raise CheckpointError(f"{error}. The newest intact older checkpoint is {older}") from error
