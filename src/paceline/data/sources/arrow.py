"""Arrow and Parquet files, memory-mapped, as one source."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from paceline.core.seeding import Purpose, derive_seed, host_randomness
from paceline.data.errors import naming_sample, suggestion
from paceline.data.fingerprint import Facts, file_facts
from paceline.data.sources.arrow_batches import FileBatches
from paceline.data.sources.arrow_index import DataFile, index_files
from paceline.data.sources.arrow_rows import as_rows, gather, read_columns
from paceline.data.sources.base import Indices, Read, collate, counted
from paceline.data.sources.collate import join
from paceline.data.sources.seeded import Seeded

StrPath = str | os.PathLike[str]
_SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet", ".pq")


class ArrowSource(Seeded):
    """Rows of Arrow files (file or stream format, such as those HF datasets writes) and Parquet files.

    A micro-batch is a dict of columns: a tensor (samples, ...) for numbers and for lists of them that are equally
    long, else a list of Python values. uint16 and uint32 come as int64; other types of numbers stay what they are.

    Uncompressed Arrow files are memory-mapped: any order is fast. Parquet and compressed Arrow are decoded by whole row
    groups, up to `max_decoded_bytes` of which are kept. That is fast in the order of the files (`shuffle=False`); in
    random order nearly every sample costs a row group unless all of them fit, so write such data as Arrow first. A
    compressed stream can only be decoded from its start: write it in the file format, or uncompressed.

    Numbers of rows and types of columns are remembered in ~/.cache/paceline ($PACELINE_CACHE), so that a second start
    need not scan the files. Pickling takes paths and index, never the data.

    Args:
        paths: a file, a folder (its Arrow and Parquet files, sorted), a pattern such as "data/*.arrow" (sorted), or
            several of these in order. All files need the same columns.
        columns: which to read, in this order; all unless given.
        transform: called with each row, a dict; its results are joined by `collate_fn`, or as torch does by default.
            Numbers and lists of numbers arrive as tensors, everything else as Python values, null as None. Python's,
            NumPy's and torch's generators are seeded by (seed, epoch, sample) before.
        collate_fn: called with the list of a micro-batch's rows, or of what `transform` made of them.
        seed: what random transforms draw by; the run's unless given.
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
        super().__init__(seed)
        files = index_files(_find_files([paths] if isinstance(paths, str | os.PathLike) else paths))
        self.columns = _choose_columns(files, columns)
        self._batches = FileBatches(files, self.columns, max_decoded_bytes)
        if not len(self):
            raise ValueError(f"{paths} holds no rows: there is nothing to train on")
        self._transform = transform
        self._collate = collate_fn

    @property
    def may_read_in_thread(self) -> bool:
        """Whether reading only waits for the disk, and runs nobody's code."""
        return self._transform is None and self._collate is None

    def __len__(self) -> int:
        return int(self._batches.starts[-1])

    def fingerprint(self) -> Facts:
        """The files, in their order, and some of what they hold; see `paceline.data.fingerprint`."""
        files = self._batches.files
        return file_facts([file.path for file in files], [file.content for file in files])

    @property
    def batch_starts(self) -> Indices:
        """The first row of each record batch or row group, and the number of rows: what an order that is kind to
        Parquet would keep together."""
        return self._batches.starts

    @property
    def counts_samples(self) -> bool:
        """Whether a micro-batch may hold fewer samples than it was made of, or more: as collate_fn decides."""
        return self._collate is not None

    def read(self, indices: Indices, epoch: int, position: int) -> Any:
        if self._transform is None and self._collate is None:
            return read_columns(self._batches, indices, indices)
        return self._joined(indices, epoch, position)[0]

    def read_counted(self, indices: Indices, epoch: int, position: int, *, is_weighed: bool = False) -> Read:
        batch, samples = self._joined(indices, epoch, position)
        return counted(batch, samples, is_weighed=is_weighed)

    def _joined(self, indices: Indices, epoch: int, position: int) -> tuple[Any, list[Any]]:
        """The micro-batch, and the samples that it was made of."""
        samples, wanted = as_rows(gather(self._batches, indices)), indices.tolist()
        with host_randomness() as randomness:
            if self._transform is not None:
                for place, index in enumerate(wanted):
                    randomness.seed(derive_seed(self._seed, Purpose.SAMPLE, epoch, index))
                    samples[place] = self._transformed(samples[place], index)
            randomness.seed(derive_seed(self._seed, Purpose.SAMPLE_BLOCK, epoch, position))
            return join(self._collate or collate, samples, wanted), samples

    def _transformed(self, row: dict[str, Any], index: int) -> Any:
        assert self._transform is not None
        with naming_sample(index, self._batches.file_of(index)):
            return self._transform(row)


def _find_files(paths: Sequence[StrPath]) -> list[str]:
    found: list[str] = []
    for path in [os.fspath(path) for path in paths]:
        if Path(path).is_dir():
            matches = sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(_SUFFIXES))
            missing = f"folder {path} has no file that ends with {', '.join(_SUFFIXES)}"
        elif has_magic(path) and not Path(path).exists():
            matches = sorted(glob(path, recursive=True))  # noqa: PTH207 - the pattern may be absolute
            missing = f"no file matches {path}"
        else:
            matches = [path]
            missing = ""
        if not matches:
            raise FileNotFoundError(f"{missing}: check the path")
        found += map(os.path.abspath, matches)
    if not found:
        raise ValueError("paths is empty: name at least one Arrow or Parquet file")
    return found


def _choose_columns(files: Sequence[DataFile], wanted: Sequence[str] | None) -> list[str]:
    """The columns to read, once it is sure that every file has them, of the same types."""
    first = files[0]
    names = list(first.columns) if wanted is None else list(wanted)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns={names}: name at least one column, and each once")
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
