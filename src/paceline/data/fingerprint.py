"""What data holds, in a few lines that are cheap to find: stored in checkpoints, and compared when a run is resumed.

Small data is read as a whole. Of large data some samples are, spread from the first to the last: the same ones every
time, so that a change of order or of many samples is found, and one of a single sample may not be. Contents count,
not when files were changed or which folder they lie in: a copy on another machine is the same data.
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

# Up to here tensors and files are read as a whole.
WHOLE_BYTES = 1 << 20
# How many rows of columns, samples of a list, rows of a table, blocks of files are read of larger ones.
NUM_ROWS, NUM_SAMPLES, NUM_TABLE_ROWS, NUM_BLOCKS = 256, 256, 64, 64
BLOCK_BYTES = 4096
# Of one sample: numbers of a tensor, so many in a run, bytes of a text, items of a list.
NUM_NUMBERS, RUN, NUM_BYTES, NUM_ITEMS = 256, 64, 4096, 64
# More files than these are not listed one by one.
MAX_LISTED = 64
_MAX_DEPTH = 8
_PLAIN = (bool, int, float, complex, Decimal, date, time, timedelta, PurePath, np.generic)


@runtime_checkable
class HasFingerprint(Protocol):
    """Data that says itself what it holds: sources of Paceline, and data sets, sources and streams of yours.

    `fingerprint`: a text or number, or a method that returns one, which is another when the samples or their order are.
    Paceline's own sources return facts by name.
    """

    @property
    def fingerprint(self) -> Any: ...


def facts_of(data: object) -> Facts:
    """What is known about data: facts by name, of which only `type` may be known."""
    if isinstance(data, HasFingerprint):
        found = data.fingerprint
        found = found() if callable(found) else found
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else {"fingerprint": str(found)}
    if isinstance(data, torch.Tensor | np.ndarray):
        return tensor_facts({"rows": data})
    if type(data) is TensorDataset:
        return tensor_facts({str(number): tensor for number, tensor in enumerate(data.tensors)})
    if type(data) in (list, tuple):
        return _list_facts(data)  # type: ignore[arg-type]
    if isinstance(data, Subset):
        indices = value_facts(data.indices) if isinstance(data.indices, list | tuple | range) else {}
        return {"type": type(data).__name__} | within("indices", indices) | within("of", facts_of(data.dataset))
    if isinstance(data, ConcatDataset | StackDataset):
        parts = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
        return {"type": type(data).__name__} | facts_of_several(parts)
    from paceline.data.sources.hf import is_hf_dataset  # not above: what it makes of one is a source

    return _hf_facts(data) if is_hf_dataset(data) else {"type": type(data).__name__}


def facts_of_several(parts: Iterable[Any]) -> Facts:
    """What is known of several parts; of one, without a number."""
    found = [facts_of(part) for part in parts]
    return found[0] if len(found) == 1 else {k: v for i, facts in enumerate(found) for k, v in within(i, facts).items()}


def within(name: object, facts: Facts) -> Facts:
    """The facts of a part, under its name."""
    return {f"{name}.{key}": value for key, value in facts.items()}


def tensor_facts(columns: Mapping[str, torch.Tensor | np.ndarray[Any, Any]]) -> Facts:
    """Of tensors or arrays with one row per sample."""
    total = blake2b(digest_size=8)
    for column in columns.values():
        _feed_array(total, column if column.nbytes <= WHOLE_BYTES else _some_rows(column), num_numbers=WHOLE_BYTES)
    described = [f"{name}: {_described(column)}" for name, column in columns.items()]
    return {"columns": ", ".join(described), "content": total.hexdigest()}


def _some_rows(column: Any) -> Any:
    """Some numbers of some rows, however they lie in memory, without touching the rest."""
    row_size = int(np.prod(column.shape[1:]))
    rows = np.array(positions(len(column), NUM_ROWS))
    places = np.unravel_index((rows[:, None] * row_size + _some_numbers(row_size)).reshape(-1), column.shape)
    return column[tuple(map(torch.from_numpy, places)) if isinstance(column, torch.Tensor) else places]


def _some_numbers(count: int) -> Any:
    """Runs of neighbours, which lie in few pages of memory."""
    if count <= NUM_NUMBERS:
        return np.arange(count)
    starts = np.array(positions(count - RUN + 1, NUM_NUMBERS // RUN))
    return (starts[:, None] + np.arange(RUN)).reshape(-1)


def value_facts(values: Sequence[Any]) -> Facts:
    """Of samples in memory; those of types that nobody can read are named."""
    total, unknown = blake2b(digest_size=8), set[str]()
    for place in positions(len(values), NUM_SAMPLES):
        _feed(total, values[place], unknown)
    facts: Facts = {"content": total.hexdigest()}
    return facts | {"unread": ", ".join(sorted(unknown))} if unknown else facts


def file_facts(paths: Sequence[str], known: Sequence[str] | None = None) -> Facts:
    """Of files in their order: names from the folder they share on, sizes, and some of their contents.

    `known`: what is known of each file already, beginning with its size; else the sizes are looked up.
    """
    # Strings: of a million paths, objects would take seconds.
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
    """At most `count` of them, spread from the first to the last."""
    if length <= count:
        return list(range(length))
    return [i * (length - 1) // (count - 1) for i in range(count)]


def _list_facts(samples: Sequence[Any]) -> Facts:
    return {"type": type(samples).__name__} | value_facts(samples)


def _hf_facts(dataset: Any) -> Facts:
    """Its own fingerprint is none of the contents: it may hold times of files, or be drawn at random."""
    rows = dataset.with_format("arrow")[positions(len(dataset), NUM_TABLE_ROWS)].to_pylist() if len(dataset) else []
    facts = {"type": "Dataset", "features": _text_digest([str(dataset.features)])} | value_facts(rows)
    own = getattr(dataset, "_fingerprint", None)
    return facts if own is None else facts | {"hint": f"fingerprint {own} of datasets"}


def _file_digest(path: str, num_blocks: int | None) -> str:
    """Of so many blocks of a file; None: of all of it."""
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
    """Add a value; the types of what nobody can read go into `unknown`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if not _feed_array(total, value):
            unknown.add(type(value).__name__)
    elif isinstance(value, str | bytes | bytearray):
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else bytes(value)
        half = NUM_BYTES // 2
        shown = content if len(content) <= NUM_BYTES else content[:half] + content[-half:]
        total.update(f"{type(value).__name__}{len(content)}:".encode() + shown)
    elif value is None or isinstance(value, _PLAIN):
        total.update(f"{type(value).__name__}:{value!s};".encode())
    elif depth == _MAX_DEPTH:
        unknown.add(type(value).__name__)
    elif isinstance(value, Mapping):
        total.update(f"mapping{len(value)}:".encode())
        for key, item in value.items():
            _feed(total, key, unknown, depth + 1)
            _feed(total, item, unknown, depth + 1)
    elif isinstance(value, list | tuple | range):
        total.update(f"sequence{len(value)}:".encode())
        for place in positions(len(value), NUM_ITEMS):
            _feed(total, value[place], unknown, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        total.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            _feed(total, getattr(value, field.name), unknown, depth + 1)
    else:
        unknown.add(type(value).__name__)


def _feed_array(total: Any, array: Any, num_numbers: int = NUM_NUMBERS) -> bool:
    """Add a tensor or array, of a large one some of its numbers; whether it could be read."""
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
