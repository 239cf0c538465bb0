"""Files of token ids, cut into windows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.errors import SampleError, check_range
from paceline.data.fingerprint import Facts, file_facts
from paceline.data.sources.base import Indices, Pair

StrPath = str | os.PathLike[str]
_Tokens = npt.NDArray[Any]


class TokenFile:
    """Windows of token ids from memory-mapped files: NumPy files (.npy) or raw arrays (any other name).

    A micro-batch is a `Pair` of int64 tensors (samples, length): x, and y one token further. Windows do not cross file
    ends; tokens after the last whole window of a file are not used. Pickling stores the paths, not the data.

    Args:
        paths: one file, or several that are read as one source, in this order.
        length: number of tokens of a sample.
        dtype: the type of raw files, by default uint16. For NumPy files it must match the file.
        stride: distance between the starts of two windows; by default `length`, so that every token is a target once.
        targets: whether to read y. If False, a micro-batch is the tensor x alone.
        vocab_size: if given, check while reading that every id is below it.
    """

    may_read_in_thread = True

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        length: int,
        dtype: npt.DTypeLike | None = None,
        stride: int | None = None,
        *,
        targets: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        for name, value in (("length", length), ("stride", stride), ("vocab_size", vocab_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small: choose {name} >= 1")
        self._paths = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        if not self._paths:
            raise ValueError("paths is empty: give at least one token file")
        self._length = length
        self._width = length + 1 if targets else length
        self._dtype = None if dtype is None else np.dtype(dtype)
        self._stride = length if stride is None else stride
        self._targets = targets
        self._vocab_size = vocab_size
        self._num_tokens = [len(_open(path, self._dtype)) for path in self._paths]
        for path, num_tokens in zip(self._paths, self._num_tokens, strict=True):
            if num_tokens < self._width:
                raise ValueError(
                    f"{path} has {num_tokens} tokens, fewer than one window of {self._width}: choose a smaller length "
                    f"than {length}, or leave the file out"
                )
        counts = [(n - self._width) // self._stride + 1 for n in self._num_tokens]
        self._starts = np.cumsum([0, *counts])
        self._windows: dict[int, _Tokens] = {}

    def fingerprint(self) -> Facts:
        windows = f"{self._width} tokens ({self._dtype or 'default dtype'}) every {self._stride}"
        return {"windows": windows} | file_facts(self._paths)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_windows": {}}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        check_range(indices, len(self))
        x = torch.empty((len(indices), self._length), dtype=torch.int64)
        y = torch.empty_like(x) if self._targets else None
        files = np.searchsorted(self._starts, indices, side="right") - 1
        for file in np.unique(files).tolist():
            rows = slice(None) if len(self._paths) == 1 else np.flatnonzero(files == file)
            offsets = (indices[rows] - self._starts[file]) * self._stride
            tokens = self._windows_of(file)[offsets]
            if self._vocab_size is not None:
                self._check_ids(tokens, file, offsets, indices[rows])
            x.numpy()[rows] = tokens[:, : self._length]
            if y is not None:
                y.numpy()[rows] = tokens[:, 1:]
        return x if y is None else Pair(x, y)

    def _windows_of(self, file: int) -> _Tokens:
        """All windows of a file, one per start token: a view of (tokens - width + 1, width)."""
        windows = self._windows.get(file)
        if windows is None:
            tokens = _open(self._paths[file], self._dtype)
            if len(tokens) != self._num_tokens[file]:
                raise SampleError(
                    f"{self._paths[file]} has {len(tokens)} tokens, but had {self._num_tokens[file]} when the run "
                    "started: restore the file, or start a new run",
                    file=self._paths[file],
                )
            windows = self._windows[file] = np.lib.stride_tricks.sliding_window_view(tokens, self._width)
        return windows

    def _check_ids(self, tokens: _Tokens, file: int, offsets: Indices, indices: Indices) -> None:
        wrong = tokens >= self._vocab_size
        if tokens.dtype.kind == "i":
            wrong |= tokens < 0
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            path, index = self._paths[file], int(indices[row])
            raise SampleError(
                f"sample {index} of {path} has the token id {tokens[row, column]} at token {offsets[row] + column} of "
                f"the file: ids must be >= 0 and below vocab_size={self._vocab_size}; check dtype and tokenizer",
                index=index,
                file=path,
            )


def _open(path: str, dtype: np.dtype[Any] | None) -> _Tokens:
    """A file's tokens, memory-mapped."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist: check the path of the token file")
    tokens: _Tokens
    if path.endswith(".npy"):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a NumPy file of token ids, or it is truncated: {error}") from error
        if tokens.ndim != 1:
            raise ValueError(f"{path} holds an array of shape {tokens.shape}: token ids must be in one flat array")
        if dtype is not None and tokens.dtype != dtype:
            raise ValueError(f"{path} holds {tokens.dtype}, but dtype={dtype}: leave dtype out for .npy files")
    else:
        dtype, size = dtype or np.dtype(np.uint16), Path(path).stat().st_size
        if size % dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, which is not a multiple of the {dtype.itemsize} bytes of {dtype}: "
                "set dtype to the type it was written with"
            )
        # An empty file cannot be mapped.
        tokens = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    if tokens.dtype.kind not in "iu" or not np.can_cast(tokens.dtype, np.int64):
        raise ValueError(f"{path} holds {tokens.dtype}: token ids must be integers that fit int64")
    return np.asarray(tokens)
