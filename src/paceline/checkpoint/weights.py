"""Weights to start from: of a checkpoint, a safetensors file, or a file that torch.save wrote a state_dict to."""

from __future__ import annotations

import pickle
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
    elif path.suffix == ".safetensors":
        weights = safetensors_file.read(path)
    else:
        weights = _read_with_torch(path)
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path} holds a {type(weights).__name__}: it must hold a state_dict, names to tensors")
    return weights


def _read_with_torch(path: Path) -> Any:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as weights alone: {str(error).splitlines()[0]} Save model.state_dict() with "
            "torch.save, or use a safetensors file"
        ) from None
    if isinstance(found, Mapping):
        for name in _WRAPPERS:
            if isinstance(found.get(name), Mapping):
                return found[name]
    return found
