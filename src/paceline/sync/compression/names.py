"""The encodings by name, apart from their code: project files are checked without torch."""

from __future__ import annotations

from typing import Literal, get_args

# fp32 leaves values as they are.
Compression = Literal["fp32", "bf16", "fp16", "int8", "int4", "sparse"]
COMPRESSIONS: tuple[str, ...] = get_args(Compression)
