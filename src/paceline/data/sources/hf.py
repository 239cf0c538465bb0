"""HF `datasets`, map-style: read from their Arrow tables if no format or decoding is in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.data.fingerprint import Facts, facts_of
from paceline.data.sources.arrow_rows import RecordBatches
from paceline.data.sources.base import Indices, Samples, Source


def hf_source(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source:
    """The source for a `datasets.Dataset`.

    Micro-batches are read from its table, as in `ArrowSource`, if the data set has no format or a plain
    `with_format("torch")` (numbers become int64 and float32) and there is no collate function. Otherwise samples are
    read through the data set.
    """
    return HfTable(dataset) if collate_fn is None and _is_plain(dataset) else Samples(dataset, collate_fn, seed)


class HfTable:
    """A data set's rows as micro-batches of columns. It is pickled as the data set is: by path if it is in files."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_torch = dataset.format["type"] == "torch"
        batches = dataset.data.table.select(dataset.format["columns"]).to_batches()
        self._batches = RecordBatches([batch.num_rows for batch in batches], batches)
        # Made by shuffle, filter and select: the table row of each sample.
        mapping = dataset._indices
        self._rows = None if mapping is None else mapping.table.column(0).to_numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTable, (self._dataset,)

    def __len__(self) -> int:
        return len(self._dataset)

    def fingerprint(self) -> Facts:
        return facts_of(self._dataset)

    def read(self, indices: Indices, epoch: int, position: int) -> dict[str, Any]:
        rows = indices if self._rows is None else self._rows[indices].astype(np.int64)
        columns = self._batches.read_columns(rows, indices)
        return {name: _as_hf_torch(column) for name, column in columns.items()} if self._is_torch else columns


def _as_hf_torch(column: Any) -> Any:
    if not isinstance(column, torch.Tensor) or column.dtype == torch.bool:
        return column
    return column.to(torch.float32 if column.is_floating_point() else torch.int64)


def _is_plain(dataset: Any) -> bool:
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
