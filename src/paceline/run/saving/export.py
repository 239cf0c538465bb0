"""Weights for use elsewhere: one safetensors file, or whatever the model's own `save_pretrained` writes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import safetensors_file
from paceline.checkpoint.folders import new_token
from paceline.checkpoint.hashed_file import flush_folder
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0
from paceline.core.errors import MisuseError
from paceline.run.saving.state import model_state, plain_model

SUFFIX = ".safetensors"


def export_weights(model: Any, path: Path, communicator: Communicator) -> None:
    """One file of all parameters and buffers, written by rank 0; every worker returns when it is there."""
    if path.suffix != SUFFIX or path.is_dir():
        raise ValueError(f"{path} cannot be the file: give a path that ends in {SUFFIX}, and is no folder")
    decided_by_rank_0(lambda: _write(path, _storable(model_state(model))), communicator)


def save_pretrained(model: Any, folder: Path, communicator: Communicator) -> None:
    """What the model's `save_pretrained` writes, and its tokenizer's; every worker returns when it is there.

    A new folder appears when it is complete; in one that exists, files are written over.
    """
    model = plain_model(model)
    if not callable(getattr(model, "save_pretrained", None)):
        raise MisuseError(
            f"the model is a {type(model).__name__} without save_pretrained: use trainer.export(path), which writes a "
            "safetensors file"
        )
    tokenizer = getattr(model, "tokenizer", None)
    parts = [model] if tokenizer is None else [model, tokenizer]
    decided_by_rank_0(lambda: _save_into(folder, parts), communicator)


def _storable(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors on the host. Tied ones appear under each of their names, so that any reader finds all it expects."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in safetensors_file.DTYPE_NAMES:
            shown = f"of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{name!r} in the model's state is {shown}, which a {SUFFIX} file cannot hold")
    return {name: value.detach().cpu() for name, value in state.items()}


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(path)
    try:
        safetensors_file.write(unfinished, tensors)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    flush_folder(path.parent)


def _save_into(folder: Path, parts: list[Any]) -> None:
    if folder.exists():
        _save_all(folder, parts)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(folder)
    try:
        _save_all(unfinished, parts)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _save_all(folder: Path, parts: list[Any]) -> None:
    for part in parts:
        part.save_pretrained(str(folder))


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{new_token()}")
