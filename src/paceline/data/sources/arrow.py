"""Tables as sources: Arrow and Parquet files, and map-style HF `datasets`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.generators import host_randomness
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import naming_sample, suggestion
from paceline.data.fingerprint import Facts, file_facts
from paceline.data.sources.arrow_files import DataFile, FileBatches, index_files
from paceline.data.sources.arrow_rows import RecordBatches
from paceline.data.sources.base import CollatingSource, Indices, WrappedData

StrPath = str | os.PathLike[str]
_SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet", ".pq")


class ArrowSource(CollatingSource):
    """Rows of Arrow files (file or stream format, such as HF datasets') and Parquet files.

    A micro-batch is a dict of columns: a tensor (samples, ...) for numbers and for lists of numbers of equal length,
    else a list of Python values. uint16 and uint32 become int64; other number types are kept.

    Uncompressed Arrow files are memory-mapped and fast in any order. Parquet and compressed Arrow are decoded by whole
    row groups, of which up to `max_decoded_bytes` are kept. That is fast in file order (`shuffle=False`); in random
    order nearly every sample decodes a row group unless all of them fit, so convert such data to Arrow first. A
    compressed stream can only be decoded from its start: write it in the file format, or uncompressed.

    Row counts and column types are cached in ~/.cache/paceline ($PACELINE_CACHE), so that a second start does not scan
    the files. Pickling stores paths and index, not the data.

    Args:
        paths: a file, a folder (its Arrow and Parquet files, sorted), a pattern such as "data/*.arrow" (sorted), or
            several of these in order. All files need the same columns.
        columns: which columns to read, in this order; by default all.
        transform: called with each row, a dict; its results are joined by `collate_fn`, by default torch's collation.
            Numbers and lists of numbers are tensors, other values Python values, null is None. Python's, NumPy's and
            torch's generators are seeded by (seed, epoch, sample) before each call.
        collate_fn: called with the list of a micro-batch's rows, or of their `transform` results.
        seed: the seed of random transforms; by default the run's.
        max_decoded_bytes: memory for decoded row groups, in each process that reads.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        seed: int | None = None,
        max_decoded_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(collate_fn, seed)
        files = index_files(_find_files([paths] if isinstance(paths, str | os.PathLike) else paths))
        self.columns = _choose_columns(files, columns)
        self._batches = FileBatches(files, self.columns, max_decoded_bytes)
        if not len(self):
            raise ValueError(f"{paths} has no rows: give files with at least one row")
        self._transform = transform

    @property
    def may_read_in_thread(self) -> bool:
        return self._transform is None and self._collate_fn is None

    def __len__(self) -> int:
        return int(self._batches.starts[-1])

    def fingerprint(self) -> Facts:
        files = self._batches.files
        return file_facts([file.path for file in files], [file.content for file in files])

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        if self.may_read_in_thread:
            return self._batches.read_columns(indices, indices)
        return super().read(indices, epoch, position)

    def _fetch_and_join(self, indices: Indices, epoch: int, position: int) -> tuple[Any, list[Any]]:
        samples: list[Any] = self._batches.read_rows(indices)
        wanted = indices.tolist()
        with host_randomness() as randomness:
            if self._transform is not None:
                for place, index in enumerate(wanted):
                    randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, index))
                    with naming_sample(index, self._batches.file_of(index)):
                        samples[place] = self._transform(samples[place])
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE_BLOCK, epoch, position))
            return self._join(samples, wanted)


def _find_files(paths: Sequence[StrPath]) -> list[str]:
    found: list[str] = []
    for path in [os.fspath(path) for path in paths]:
        matches, missing = [path], f"no file matches {path}"
        if Path(path).is_dir():
            matches = sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(_SUFFIXES))
            missing = f"folder {path} has no file that ends with {', '.join(_SUFFIXES)}"
        elif has_magic(path) and not Path(path).exists():
            matches = sorted(glob(path, recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise FileNotFoundError(f"{missing}: check the path")
        found += map(os.path.abspath, matches)
    if not found:
        raise ValueError("paths is empty: give at least one Arrow or Parquet file")
    return found


def _choose_columns(files: Sequence[DataFile], wanted: Sequence[str] | None) -> list[str]:
    """The columns to read. Every file must have them, with the same types."""
    first = files[0]
    names = list(first.columns) if wanted is None else list(wanted)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns={names}: give at least one column, and each only once")
    for name in names:
        if name not in first.columns:
            raise ValueError(f"there is no column {name!r} in {first.path}: {suggestion(name, first.columns)}")
    for file in files:
        differing = [name for name in names if file.columns.get(name) != first.columns[name]]
        if wanted is None:
            differing += [name for name in file.columns if name not in first.columns]
        if differing:
            details = ", ".join(f"{n!r} ({first.columns.get(n)} and {file.columns.get(n)})" for n in differing)
            raise ValueError(
                f"{first.path} and {file.path} differ in column {details}: all files need the same columns; "
                "choose those they share with columns=[...], or read the files as separate sources"
            )
    return names


class HfTable(WrappedData):
    """The rows of a `datasets.Dataset` as micro-batches of columns, as in `ArrowSource`.

    The data set has no format or a plain `with_format("torch")`: numbers become int64 and float32. It is pickled as the
    data set is: by path if it is in files.
    """

    def __init__(self, dataset: Any) -> None:
        self._data = dataset
        self._is_torch = dataset.format["type"] == "torch"
        batches = dataset.data.table.select(dataset.format["columns"]).to_batches()
        self._batches = RecordBatches([batch.num_rows for batch in batches], batches)
        # Made by shuffle, filter and select: the table row of each sample.
        mapping = dataset._indices
        self._rows = None if mapping is None else mapping.table.column(0).to_numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTable, (self._data,)

    def read(self, indices: Indices, epoch: int, position: int) -> dict[str, Any]:
        rows = indices if self._rows is None else self._rows[indices].astype(np.int64)
        columns = self._batches.read_columns(rows, indices)
        return {name: _as_hf_torch(column) for name, column in columns.items()} if self._is_torch else columns


def _as_hf_torch(column: Any) -> Any:
    if not isinstance(column, torch.Tensor) or column.dtype == torch.bool:
        return column
    return column.to(torch.float32 if column.is_floating_point() else torch.int64)


def is_plain_table(dataset: Any) -> bool:
    """Whether `HfTable` gives the same as the data set itself."""
    format = dataset.format
    has_settings = format["format_kwargs"] or format["output_all_columns"]
    is_decoded = any(_is_decoded(dataset.features[name]) for name in format["columns"])
    return format["type"] in (None, "torch") and not has_settings and not is_decoded


def _is_decoded(feature: Any) -> bool:
    """Whether a feature, such as an image, is stored in another form than it is used in."""
    if isinstance(feature, dict | list | tuple):
        return any(map(_is_decoded, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _is_decoded(inner))
