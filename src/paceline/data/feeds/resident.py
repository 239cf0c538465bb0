"""Data that lies on the device as a whole, where it fits."""

from __future__ import annotations

import torch

from paceline.data.sources.base import Columns, Source


def resident(source: Source, device: torch.device) -> Columns:
    """The columns on the device. Too little free memory there is an error before anything is copied."""
    source = columns(source, type(source).__name__)
    needed, free = source.num_bytes_missing_on(device), _free_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"resident=True needs {_in_gib(needed)} on {device} for the data, where {_in_gib(free)} are free: leave it "
            "out, or give smaller data"
        )
    return source.on(device)


def columns(source: object, name: str) -> Columns:
    """The source, if it can lie on a device; `name` is what its user would call it."""
    if not isinstance(source, Columns):
        raise ValueError(
            f"resident=True needs data as whole columns (tensors, arrays, a TensorDataset), not a {name}: leave it "
            "out, or give the samples as tensors"
        )
    return source


def _free_bytes(device: torch.device) -> int | None:
    """None where the data need not move, or nobody can tell."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
