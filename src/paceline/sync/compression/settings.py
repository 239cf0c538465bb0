"""Settings of compressed gradients, apart from their code: project files are checked without torch."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.settings import check, setting

# Encodings by name. fp32 leaves values as they are.
Compression = Literal["fp32", "bf16", "fp16", "int8", "int4", "sparse"]
COMPRESSIONS: tuple[str, ...] = get_args(Compression)


@dataclass(frozen=True)
class Gradients:
    """Exchange gradients in every step, in fewer bytes.

    compress: how a worker's sums of gradients are sent; see `Averaging`. "fp32" is the same as strategy="gradients".
        "sparse" keeps what it does not send for the following steps.
    """

    compress: Compression = setting("encoding of what is sent", "fp32")

    def __post_init__(self) -> None:
        check(self)
