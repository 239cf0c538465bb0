"""Reads checkpoints and weight files. Every file is checked before it is used, and no code in it is executed."""

from __future__ import annotations

import json
import pickle
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.files import check_file, open_regular, read_file, read_tensors
from paceline.checkpoint.folders import complete_steps, latest, step_folder, step_of, unusable
from paceline.checkpoint.manifest import MANIFEST_NAME, WHOLE, Manifest, Pattern, stem_of

if TYPE_CHECKING:
    import torch

    from paceline.core.world import World

MAX_JSON_BYTES = 1 << 30

# Keys under which training scripts store the weights when they save other values too.
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_REMEDY = "give a checkpoint, a .safetensors file, or a state_dict written by torch.save"


class Checkpoint:
    """A checkpoint whose manifest is intact and whose files exist with the right sizes.

    `load` reads a component and checks the checksums of its files. Errors name the file, the expected and the actual
    value, and the newest older checkpoint that is intact.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _naming_older_checkpoint(folder):
            self.manifest = inspect(folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    def parts(self, name: str) -> tuple[str, ...]:
        """The parts of a component in this folder: `whole`, or `rank-0`, `rank-1`, or `node-0`."""
        components = self.manifest.contents.components
        if name not in components:
            raise CheckpointError(f"{self.folder} has no component {name!r}: it has {', '.join(components)}")
        return tuple(components[name].parts)

    def load(self, name: str, part: str = WHOLE) -> Any:
        """A component's state. Tensors are on the CPU."""
        from paceline.core.tree import unflatten

        if part not in self.parts(name):
            raise CheckpointError(
                f"component {name!r} of {self.folder} has no part {part!r}: it has {', '.join(self.parts(name))}"
            )
        contents = self.manifest.contents
        stem = stem_of(name, part)
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, bytes] = {}
        with _naming_older_checkpoint(self.folder):
            for file in contents.components[name].parts[part]:
                path, record = self.folder / file, contents.files[file]
                if file.endswith(".safetensors"):
                    tensors.update(read_tensors(path, record))
                else:
                    texts[file] = read_file(path, MAX_JSON_BYTES, record)
            try:
                return unflatten(json.loads(texts[f"{stem}.json"]), tensors)
            except (ValueError, KeyError, RecursionError) as error:
                raise CheckpointError(f"{self.folder / stem}.json cannot be used: {error}") from None

    def load_own(self, name: str, world: World) -> Any:
        """This worker's part of a component. With other workers, the part of rank, or node, modulo number of parts."""
        parts, pattern = self.parts(name), self.manifest.contents.components[name].pattern
        own = pattern.part_of(world)
        index = world.rank // world.local_size if pattern is Pattern.PER_NODE else world.rank
        return self.load(name, own if own in parts else parts[index % len(parts)])


def inspect(folder: Path) -> Manifest:
    """A checkpoint's manifest, after a check of the manifest and the folder's entries. Contents are not read."""
    manifest, problems = _examine(folder)
    if problems:
        raise CheckpointError("; ".join(problems.values()))
    return manifest


def verify(folder: Path) -> list[str]:
    """Read everything and return all problems of a checkpoint; empty if it is intact."""
    try:
        manifest, problems = _examine(folder)
    except CheckpointError as error:
        return [str(error)]
    for name, record in manifest.contents.files.items():
        if name not in problems:
            try:
                check_file(folder / name, record)
            except CheckpointError as error:
                problems[name] = str(error)
    return list(problems.values())


def newest_intact(root: Path, below: int | None = None) -> Path | None:
    """The checkpoint with the highest step (less than `below`) in which `verify` finds no problem."""
    steps = [step for step in complete_steps(root) if below is None or step < below]
    folders = (step_folder(root, step) for step in reversed(steps))
    return next((folder for folder in folders if not verify(folder)), None)


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint in `path`, or the newest one if `path` is a run folder."""
    folder = path if (path / MANIFEST_NAME).exists() or not path.is_dir() else latest(path)
    if folder is None:
        if flaws := unusable(path):
            raise CheckpointError(f"{path} has no usable checkpoint: {'; '.join(flaws.values())}")
        raise CheckpointError(f"{path} is neither a checkpoint nor a folder with checkpoints")
    return Checkpoint(folder)


def read_weights(path: Path) -> Mapping[str, Any]:
    """A state_dict on the CPU: of a checkpoint, a safetensors file, or a file written by torch.save."""
    import torch

    if path.is_dir():
        weights = checkpoint_at(path).load("model")
    else:
        target = path.resolve()  # files in the cache of the Hugging Face hub are links
        try:
            weights = read_tensors(target) if path.suffix == ".safetensors" else _read_with_torch(target)
        except CheckpointError as error:
            raise CheckpointError(f"{str(error).replace(str(target), str(path))}: {_REMEDY}") from None
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path} holds a {type(weights).__name__}, not tensors by name: {_REMEDY}")
    if not any(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no tensors: {_REMEDY}")
    return weights


def _read_with_torch(path: Path) -> Any:
    import torch

    try:
        with open_regular(path) as file:
            found = torch.load(BufferedReader(file), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # any kind, depending on the file's bytes
        # torch's message explains how to run the code in a file, so it is not shown.
        has_code = isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower()
        reason = "holds pickled objects besides tensors" if has_code else "cannot be read by torch.load"
        raise CheckpointError(f"{path} {reason}") from None
    if isinstance(found, Mapping):
        return next((found[name] for name in _WRAPPERS if isinstance(found.get(name), Mapping)), found)
    return found


def _examine(folder: Path) -> tuple[Manifest, dict[str, str]]:
    """A checkpoint's manifest, and the problems of its files by name, without reading their content."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist or is not a folder")
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    content = read_file(path, MAX_JSON_BYTES)
    try:
        manifest = Manifest.parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    if (named := step_of(folder)) is not None and named != manifest.step:
        raise CheckpointError(
            f"{folder} is named for step {named}, but its manifest says step {manifest.step}: rename it to "
            f"{step_folder(folder.parent, manifest.step).name}"
        )
    files = manifest.contents.files
    try:
        found = {path.name: path.lstat() for path in folder.iterdir() if path.name != MANIFEST_NAME}
    except OSError as error:  # the checkpoint is being deleted, for example
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    problems = {
        name: f"{folder / name} is missing, the manifest lists it with {files[name].size} bytes"
        for name in sorted(files.keys() - found.keys())
    }
    for name, status in sorted(found.items()):
        path = folder / name
        if name not in files:
            problems[name] = f"{path} is not in the manifest: remove it"
        elif stat.S_ISLNK(status.st_mode):
            problems[name] = f"{path} is a symbolic link: replace it with the file it points to"
        elif not stat.S_ISREG(status.st_mode):
            problems[name] = f"{path} is not a regular file"
        elif status.st_nlink > 1:
            problems[name] = f"{path} is a hard link, so it can be changed from outside: replace it with a copy"
        elif status.st_size != files[name].size:
            problems[name] = f"{path} has {status.st_size} bytes, the manifest says {files[name].size}"
    return manifest, problems


@contextmanager
def _naming_older_checkpoint(folder: Path) -> Iterator[None]:
    """Add the newest intact older checkpoint to the message of an error."""
    try:
        yield
    except CheckpointError as error:
        step = step_of(folder)
        older = newest_intact(folder.parent, below=step) if step is not None else None
        if older is None:
            raise
        raise CheckpointError(f"{error}. The newest intact older checkpoint is {older}") from error
