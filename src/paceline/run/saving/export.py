"""Exports weights: to one safetensors file, or through the model's own `save_pretrained`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.files import remove_unfinished, replacing, write_tensors
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0
from paceline.core.errors import MisuseError
from paceline.run.saving.state import model_state, plain_model

SUFFIX = ".safetensors"


def export_weights(model: Any, path: Path, communicator: Communicator) -> None:
    """Write all parameters and buffers to one file. Rank 0 writes; all workers return when the file exists.

    Tied tensors are stored under each of their names.
    """
    if path.suffix != SUFFIX or path.is_dir():
        raise ValueError(f"{path} cannot be written: give the path of a file that ends in {SUFFIX}")

    def write() -> None:
        tensors = {
            name: v.detach().cpu() if isinstance(v, torch.Tensor) else v for name, v in model_state(model).items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path)  # of a previous rank 0 that was lost
        with replacing(path) as unfinished:
            write_tensors(unfinished, tensors)

    decided_by_rank_0(write, communicator)


def save_pretrained(model: Any, folder: Path, communicator: Communicator) -> None:
    """Call `save_pretrained` of the model and its tokenizer on rank 0; all workers return when it is done.

    A new folder appears when it is complete. In an existing one files are overwritten.
    """
    model = plain_model(model)
    if not callable(getattr(model, "save_pretrained", None)):
        raise MisuseError(
            f"the model is a {type(model).__name__} without save_pretrained: use trainer.export(path), which writes a "
            "safetensors file"
        )

    def save() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        with nullcontext(folder) if folder.exists() else replacing(folder) as target:
            for part in (model, getattr(model, "tokenizer", None)):
                if part is not None:
                    part.save_pretrained(str(target))

    decided_by_rank_0(save, communicator)
