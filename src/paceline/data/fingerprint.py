"""Fingerprints of data: stored in checkpoints, and compared when a run is resumed.

Small tensors and files are read completely. Of other data some samples are read, spread from the first to the last and
always the same ones: a change of the order or of many samples is detected, a change of a single sample may not be. Only
contents count, not modification times or folders: a copy on another machine is the same data.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

Facts: TypeAlias = dict[str, Any]

# Tensors and files up to this size are read completely.
WHOLE_BYTES = 1 << 20
# Of larger ones: rows of columns, samples of a list, rows of a table, blocks of files.
NUM_ROWS, NUM_SAMPLES, NUM_TABLE_ROWS, NUM_BLOCKS = 256, 256, 64, 64
BLOCK_BYTES = 4096
# Of one sample: numbers of a tensor, in runs of this length, bytes of a text, items of a list.
NUM_NUMBERS, RUN, NUM_BYTES, NUM_ITEMS = 256, 64, 4096, 64
# More files than this are not listed one by one.
MAX_LISTED = 64
_MAX_DEPTH = 8
_PLAIN = (bool, int, float, complex, Decimal, date, time, timedelta, PurePath, np.generic)


@runtime_checkable
class HasFingerprint(Protocol):
    """Data that identifies its contents: Paceline's sources, and users' data sets, sources and streams.

    `fingerprint`: a text or number that changes with the samples or their order, or a method that returns one.
    Paceline's own sources return facts by name.
    """

    @property
    def fingerprint(self) -> Any: ...


def is_hf_dataset(data: Any) -> bool:
    """Whether it is a `datasets.Dataset`, found without importing the package."""
    return any((c.__module__, c.__name__) == ("datasets.arrow_dataset", "Dataset") for c in type(data).__mro__)


def facts_of(data: object) -> Facts:
    """The fingerprint of data as facts by name; at least its `type`."""
    if isinstance(data, HasFingerprint):
        found = data.fingerprint
        found = found() if callable(found) else found
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else {"fingerprint": str(found)}
    if isinstance(data, torch.Tensor | np.ndarray):
        return tensor_facts({"rows": data})
    if type(data) is TensorDataset:
        return tensor_facts({str(number): tensor for number, tensor in enumerate(data.tensors)})
    kind: Facts = {"type": type(data).__name__}
    if isinstance(data, list | tuple) and type(data) in (list, tuple):
        return kind | value_facts(data)
    if isinstance(data, Subset):
        indices = value_facts(data.indices) if isinstance(data.indices, list | tuple | range) else {}
        return kind | _prefixed("indices", indices) | _prefixed("of", facts_of(data.dataset))
    if isinstance(data, ConcatDataset | StackDataset):
        return kind | facts_of_several(data.datasets.values() if isinstance(data.datasets, dict) else data.datasets)
    return _hf_facts(data) if is_hf_dataset(data) else kind


def facts_of_several(parts: Iterable[Any]) -> Facts:
    """The facts of several parts, prefixed by their numbers; of a single part without a prefix."""
    found = [facts_of(part) for part in parts]
    if len(found) == 1:
        return found[0]
    return {key: value for i, facts in enumerate(found) for key, value in _prefixed(i, facts).items()}


def _prefixed(name: object, facts: Facts) -> Facts:
    return {f"{name}.{key}": value for key, value in facts.items()}


def tensor_facts(columns: Mapping[str, torch.Tensor | np.ndarray[Any, Any]]) -> Facts:
    """The facts of tensors or arrays with one row per sample."""
    total = blake2b(digest_size=8)
    for column in columns.values():
        _feed_array(total, column if column.nbytes <= WHOLE_BYTES else _some_rows(column), num_numbers=WHOLE_BYTES)
    described = ", ".join(f"{name}: {_described(column)}" for name, column in columns.items())
    return {"columns": described, "content": total.hexdigest()}


def _some_rows(column: Any) -> Any:
    """Some numbers of some rows, in any memory layout, without reading the others."""
    row_size = int(np.prod(column.shape[1:]))
    rows = np.array(positions(len(column), NUM_ROWS))
    places = np.unravel_index((rows[:, None] * row_size + _some_numbers(row_size)).reshape(-1), column.shape)
    return column[tuple(map(torch.from_numpy, places)) if isinstance(column, torch.Tensor) else places]


def _some_numbers(count: int) -> Any:
    """Positions in runs of neighbours, which are on few pages of memory."""
    if count <= NUM_NUMBERS:
        return np.arange(count)
    starts = np.array(positions(count - RUN + 1, NUM_NUMBERS // RUN))
    return (starts[:, None] + np.arange(RUN)).reshape(-1)


def value_facts(values: Sequence[Any]) -> Facts:
    """The facts of samples in memory. Types that cannot be read are named."""
    total, unknown = blake2b(digest_size=8), set[str]()
    for place in positions(len(values), NUM_SAMPLES):
        _feed(total, values[place], unknown)
    facts: Facts = {"content": total.hexdigest()}
    return facts | {"unread": ", ".join(sorted(unknown))} if unknown else facts


def file_facts(paths: Sequence[str], known: Sequence[str] | None = None) -> Facts:
    """The facts of files in order: names relative to their common folder, sizes, and some of their contents.

    `known`: text that identifies each file, starting with its size; by default the size is looked up.
    """
    # Strings: for a million paths, Path objects would take seconds.
    paths = [os.path.abspath(path) for path in paths]  # noqa: PTH100
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
    names = [path[len(folder) :].lstrip(os.sep) for path in paths]
    sizes = [str(os.stat(path).st_size) for path in paths] if known is None else list(known)  # noqa: PTH116
    is_whole = len(paths) <= MAX_LISTED and sum(int(size.split("-")[0]) for size in sizes) <= WHOLE_BYTES
    read = positions(len(paths), NUM_BLOCKS)
    contents = {i: _file_digest(paths[i], None if is_whole else max(2, NUM_BLOCKS // len(paths))) for i in read}
    if len(paths) <= MAX_LISTED:
        rows = zip(names, sizes, contents.values(), strict=True)
        return {"files": [f"{name} ({size} bytes, content {content})" for name, size, content in rows]}
    return {
        "num_files": len(paths),
        "file_names": _text_digest(names),
        "file_sizes": _text_digest(sizes),
        "file_contents": _text_digest(contents.values()),
    }


def positions(length: int, count: int) -> list[int]:
    """At most `count` positions, spread from the first to the last."""
    if length <= count:
        return list(range(length))
    return [i * (length - 1) // (count - 1) for i in range(count)]


def _hf_facts(dataset: Any) -> Facts:
    """The data set's own fingerprint is only a hint: it may depend on file times, or be random."""
    rows = dataset.with_format("arrow")[positions(len(dataset), NUM_TABLE_ROWS)].to_pylist() if len(dataset) else []
    facts = {"type": "Dataset", "features": _text_digest([str(dataset.features)])} | value_facts(rows)
    own = getattr(dataset, "_fingerprint", None)
    return facts if own is None else facts | {"hint": f"fingerprint {own} of datasets"}


def _file_digest(path: str, num_blocks: int | None) -> str:
    """The digest of some blocks of a file, or of all of it if `num_blocks` is None."""
    total = blake2b(digest_size=8)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - one of many
        size = os.fstat(file.fileno()).st_size
        if num_blocks is None or size <= num_blocks * BLOCK_BYTES:
            total.update(file.read())
        else:
            for start in positions(size - BLOCK_BYTES + 1, num_blocks):
                total.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return total.hexdigest()


def _text_digest(texts: Iterable[str]) -> str:
    return blake2b("\n".join(texts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _feed(total: Any, value: Any, unknown: set[str], depth: int = 0) -> None:
    """Add a value. Types that cannot be read are added to `unknown`."""
    name, items = type(value).__name__, list[Any]()
    if isinstance(value, str | bytes | bytearray):
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)
        half = NUM_BYTES // 2
        shown = content if len(content) <= NUM_BYTES else content[:half] + content[-half:]
        total.update(f"{name}{len(content)}:".encode() + shown)
    elif value is None or isinstance(value, _PLAIN):
        total.update(f"{name}:{value!s};".encode())
    elif isinstance(value, torch.Tensor | np.ndarray):
        if not _feed_array(total, value):
            unknown.add(name)
    elif depth == _MAX_DEPTH:
        unknown.add(name)
    elif isinstance(value, Mapping):
        total.update(f"mapping{len(value)}:".encode())
        items = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple | range):
        total.update(f"sequence{len(value)}:".encode())
        items = [value[place] for place in positions(len(value), NUM_ITEMS)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        total.update(name.encode())
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        unknown.add(name)
    for item in items:
        _feed(total, item, unknown, depth + 1)


def _feed_array(total: Any, array: Any, num_numbers: int = NUM_NUMBERS) -> bool:
    """Add a tensor or array, or some numbers of a large one. Returns whether it could be read."""
    total.update(_described(array).encode())
    try:
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        flat = tensor.detach().reshape(-1)
        if flat.numel() > num_numbers:
            flat = flat[torch.from_numpy(_some_numbers(flat.numel())).to(flat.device)]
        total.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # texts in an array, a sparse tensor
        return False
    return True


def _described(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"
