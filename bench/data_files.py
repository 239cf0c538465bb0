"""Arrow files of random tokens, written once for a benchmark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

COLUMN = "ids"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for files, and an index of them that this benchmark alone fills."""
    before = os.environ.get("PACELINE_CACHE")
    with TemporaryDirectory(prefix="bench-data-") as folder:
        os.environ["PACELINE_CACHE"] = str(Path(folder, "cache"))
        try:
            yield Path(folder)
        finally:
            del os.environ["PACELINE_CACHE"]
            if before is not None:
                os.environ["PACELINE_CACHE"] = before


def write_files(
    folder: Path, *, num_files: int, rows: int, length: int, vocabulary: int, rows_per_batch: int
) -> list[str]:
    """Files as HF datasets writes them: a stream of record batches, a list of int64 in each row."""
    import pyarrow as pa  # type: ignore[import-untyped]

    random = np.random.default_rng(0)
    offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
    paths = []
    for number in range(num_files):
        values = random.integers(vocabulary, size=rows * length, dtype=np.int64)
        table = pa.table({COLUMN: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})
        paths.append(str(folder / f"{number:03}.arrow"))
        with pa.ipc.new_stream(paths[-1], table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_batch)
    return paths
