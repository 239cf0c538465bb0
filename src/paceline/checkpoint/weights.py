"""Weights to start from: of a checkpoint, a safetensors file, or a file that torch.save wrote a state_dict to."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import safetensors_file
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import latest, unusable
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.reading import Checkpoint

# Under these names training scripts put the weights when they save more than weights.
_WRAPPERS = ("state_dict", "model_state_dict", "model")

_REMEDY = "give a checkpoint, a .safetensors file, or a state_dict that torch.save wrote"


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint that `path` is, or the newest of the run folder that it is."""
    folder = path if (path / MANIFEST_NAME).exists() or not path.is_dir() else latest(path)
    if folder is None:
        if flaws := unusable(path):
            raise CheckpointError(f"{path} has no checkpoint that can be used: {'; '.join(flaws.values())}")
        raise CheckpointError(f"{path} is neither a checkpoint nor a folder with checkpoints in it")
    return Checkpoint(folder)


def read_weights(path: Path) -> Mapping[str, Any]:
    """A state_dict, on the CPU. No code in a file is ever run."""
    if path.is_dir():
        weights = checkpoint_at(path).load("model")
    else:
        _check_regular(path)
        weights = _read_safetensors(path) if path.suffix == ".safetensors" else _read_with_torch(path)
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path} holds a {type(weights).__name__}, not tensors by name: {_REMEDY}")
    if not any(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no tensors: {_REMEDY}")
    return weights


def _check_regular(path: Path) -> None:
    """To open a pipe would wait for its other end, and a device may never end."""
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    if not is_regular:
        raise CheckpointError(f"{path} is not a regular file: {_REMEDY}")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors_file.read(path.resolve())  # a link, as in the cache of Hugging Face's hub
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {_REMEDY}") from None


def _read_with_torch(path: Path) -> Any:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    except Exception as error:  # of any kind: what the file's bytes happen to mean
        # torch's own text says how to run the code in a file.
        has_code = isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower()
        reason = (
            "holds more than tensors, and code in it would have to run" if has_code else "cannot be read by torch.load"
        )
        raise CheckpointError(f"{path} {reason}: {_REMEDY}") from None
    if isinstance(found, Mapping):
        for name in _WRAPPERS:
            if isinstance(found.get(name), Mapping):
                return found[name]
    return found
