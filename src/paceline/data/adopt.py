"""From what users pass as `data` to a source or stream, with the settings that the data implies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from paceline.data.array_loader import ArrayLoader
from paceline.data.epochs import NumberedData, Ordered, source_of
from paceline.data.feeds.make_feed import FeedKind, as_data, is_stream
from paceline.data.sources.base import Columns, Samples, Source, as_source
from paceline.data.sources.batches import Batches, PerWorker, WholeBatches
from paceline.data.sources.skip_bad import SkipBad, Skipped
from paceline.data.sources.streams import BatchStream, IterableStream


@dataclass(frozen=True)
class LoadingOptions:
    """The user's settings for reading, besides the data; None if not given. See `Trainer.setup`."""

    global_batch: int | None = None
    micro_batch: int | None = None
    physical_batch: int | Sequence[int] | None = None
    batches_per_step: int | None = None
    strategy_sets_step: bool = False  # the strategy decides the size of a step
    shuffle: bool | None = None
    shuffle_buffer: int = 0
    num_shards: int | None = None
    feed: FeedKind | None = None
    readers: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    skip_bad_samples: bool | Callable[[Skipped], None] = False
    resident: bool = False

    @classmethod
    def of(cls, *groups: object, **given: Any) -> LoadingOptions:
        """From a run's groups of settings and single settings, of which some have nothing to do with reading."""
        values = given | {name: value for group in groups for name, value in vars(group).items()}
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


@dataclass(frozen=True)
class Adopted:
    """Data and how to read it, from the data itself and the user's settings.

    For data that comes as whole batches, `global_batch` counts batches and `micro_batch` is 1.
    """

    data: NumberedData | IterableStream
    global_batch: int | None
    micro_batch: int | None
    shuffle: bool
    feed: FeedKind
    readers: int
    collate_fn: Callable[[list[Any]], Any] | None


def adopt(data: Any, options: LoadingOptions, seed: int) -> Adopted:
    """The data for a run. A contradiction between data and options is an error that names both."""
    if isinstance(data, Batches | PerWorker):
        feed: FeedKind = "dispatched" if isinstance(data, Batches) else "sharded"
        return _whole_batches(BatchStream(data.iterables, seed), type(data).__name__, options, feed)
    if isinstance(data, DataLoader):
        adopted = _adopt_loader(data, options, seed)
    elif isinstance(data, ArrayLoader):
        adopted = _adopt_array_loader(data, options)
    else:
        adopted = _adopted(as_data(data, collate_fn=options.collate_fn, seed=seed), options)
    if options.resident:
        _check_resident(adopted, type(getattr(data, "dataset", data)).__name__, options)
    return replace(adopted, data=_without_bad(adopted.data, options)) if options.skip_bad_samples else adopted


class VisitedData(NamedTuple):
    """Data of which every sample is visited once. `batch_size`, `readers`: of a DataLoader; None if not given."""

    source: Source
    batch_size: int | None = None
    readers: int | None = None


def adopt_for_evaluation(data: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> VisitedData:
    if isinstance(data, ArrayLoader):
        if data.drop_last:
            raise ValueError("every sample is visited once here, but the ArrayLoader has drop_last=True: leave it out")
        return VisitedData(as_source(data.columns, collate_fn=collate_fn), data.batch_size)
    stream = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(stream, Batches | PerWorker) or is_stream(stream):
        raise TypeError(
            f"every sample is visited once here, by its number, but a {type(stream).__name__} is a stream, whose "
            "samples have none: pass a map-style data set, or a list of the stream's samples"
        )
    if not isinstance(data, DataLoader):
        return VisitedData(as_source(data, collate_fn=collate_fn, seed=seed))
    batches = _LoaderBatches.of(data)
    if batches.size is None or batches.shuffle is None or batches.drop_last:
        raise ValueError(
            "every sample is visited once here, so a DataLoader must have a batch_size, no custom sampler and "
            "drop_last=False: pass the data set itself"
        )
    source = _loader_source(data, _agreed("collate_fn", collate_fn, "collate_fn", _collate_fn(data)), seed)
    return VisitedData(source, batches.size, data.num_workers)


def _adopted(data: NumberedData | IterableStream, options: LoadingOptions) -> Adopted:
    """The data with the user's options, or defaults."""
    if options.batches_per_step is not None:
        raise ValueError(
            f"batches_per_step={options.batches_per_step} is for data that comes as whole batches: set global_batch, "
            "in samples"
        )
    feed: FeedKind = "sharded"
    if isinstance(data, IterableStream):
        if options.shuffle and not options.shuffle_buffer:
            raise ValueError("shuffle=True: streams cannot be shuffled by index; set shuffle_buffer")
        if options.shuffle is False and options.shuffle_buffer:
            raise ValueError(f"shuffle=False contradicts shuffle_buffer={options.shuffle_buffer}: leave one out")
        if options.feed is None and not _is_divided(data, options):
            feed = "dispatched"  # otherwise every worker would read all of it
    elif options.shuffle_buffer or options.num_shards is not None:
        raise ValueError("shuffle_buffer and num_shards are for streams, but the data has numbered samples: drop them")
    return Adopted(
        data,
        options.global_batch,
        options.micro_batch,
        shuffle=options.shuffle is not False,
        feed=options.feed or feed,
        readers=options.readers or 0,
        collate_fn=options.collate_fn,
    )


def _is_divided(stream: IterableStream, options: LoadingOptions) -> bool:
    """Whether the stream's own `shard` divides it, so that a worker need not read what others train."""
    own, global_batch = stream.num_own_shards, options.global_batch or 1
    num_shards = options.num_shards or math.gcd(global_batch // (options.micro_batch or global_batch), own)
    return num_shards > 1 and own % num_shards == 0


def _whole_batches(data: NumberedData | IterableStream, name: str, options: LoadingOptions, feed: FeedKind) -> Adopted:
    """Data each item of which is one micro-batch."""
    for setting in ("global_batch", "micro_batch", "physical_batch", "collate_fn", "num_shards"):
        if getattr(options, setting) is not None:
            raise ValueError(
                f"{setting} has no effect on {name}, which gives finished batches: leave it out, and set "
                "batches_per_step"
            )
    if options.batches_per_step is None and not options.strategy_sets_step:
        raise ValueError(f"batches_per_step is missing: set the number of batches of {name} per optimizer step")
    if isinstance(data, BatchStream):
        if options.shuffle or options.shuffle_buffer:
            raise ValueError(f"{name} decides the order of its batches, so it cannot be shuffled here: shuffle in it")
        for setting in ("resident", "skip_bad_samples"):
            if getattr(options, setting):
                raise ValueError(f"{setting} needs data with numbered samples, but {name} is a stream: leave it out")
        per_step, count = options.batches_per_step or 0, data.num_shards
        if per_step % count:
            raise ValueError(
                f"batches_per_step={per_step} is not a multiple of the {count} iterables of {name}: choose "
                f"{max(per_step // count, 1) * count} or {(per_step // count + 1) * count}"
            )
    sizes = replace(options, global_batch=options.batches_per_step, micro_batch=1, batches_per_step=None)
    return _adopted(data, replace(sizes, shuffle=False, feed=options.feed or feed))


def _without_bad(data: NumberedData | IterableStream, options: LoadingOptions) -> NumberedData:
    source = None if isinstance(data, IterableStream) else source_of(data)
    if source is None or isinstance(source, WholeBatches):
        raise ValueError("skip_bad_samples needs data with numbered samples: a stream cannot continue after an error")
    skipping = SkipBad(source, options.skip_bad_samples if callable(options.skip_bad_samples) else None)
    return replace(data, source=skipping) if isinstance(data, Ordered) else skipping


def _check_resident(adopted: Adopted, name: str, options: LoadingOptions) -> None:
    if isinstance(adopted.data, IterableStream) or not isinstance(source_of(adopted.data), Columns):
        raise ValueError(
            f"resident=True needs data as whole columns (tensors, arrays, a TensorDataset), not a {name}: leave it "
            "out, or pass the samples as tensors"
        )
    is_dispatched = adopted.feed == "dispatched"
    reading = {"readers": adopted.readers, "skip_bad_samples": options.skip_bad_samples, "feed": is_dispatched}
    for setting, is_set in reading.items():
        if is_set:
            raise ValueError(
                f"{setting} has no effect with resident=True, which keeps all data on every worker's device: drop one"
            )


def _agreed(name: str, given: Any, loader_name: str, implied: Any, loader: str = "DataLoader") -> Any:
    """The user's value or the loader's; if both are given, they must be equal."""
    if given is not None and implied is not None and given != implied:
        raise ValueError(
            f"{name}={given!r} contradicts the {loader}'s {loader_name}={implied!r}: leave one of them out, or make "
            "them equal"
        )
    return implied if given is None else given


def _adopt_array_loader(loader: ArrayLoader, options: LoadingOptions) -> Adopted:
    micro_batch = _agreed("micro_batch", options.micro_batch, "batch_size", loader.batch_size, "ArrayLoader")
    shuffle = _agreed("shuffle", options.shuffle, "shuffle", loader.shuffle, "ArrayLoader")
    source = as_source(loader.columns, collate_fn=options.collate_fn)
    data = Ordered(source, multiple_of=micro_batch if loader.drop_last else 1)
    return _adopted(data, replace(options, micro_batch=micro_batch, shuffle=shuffle))


class _LoaderBatches(NamedTuple):
    """How a DataLoader makes its batches.

    `sampler`: of samples; of whole batches if `in_batches`. `size`: None if batches differ in size. `shuffle`: whether
    all samples come in random order; None if the sampler decides the order.
    """

    sampler: Any
    in_batches: bool
    size: int | None
    drop_last: bool
    shuffle: bool | None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> _LoaderBatches:
        """Raises an error for a DataLoader that Paceline cannot replace.

        Settings of torch's own worker processes (pin_memory, prefetch_factor, persistent_workers, timeout,
        multiprocessing_context) have no effect.
        """
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"data is a {type(loader).__name__}, a DataLoader with a custom __iter__: pass "
                "paceline.Batches(loader) to use its batches as they are, or a plain torch DataLoader"
            )
        if loader.worker_init_fn is not None:
            raise ValueError(
                "the DataLoader has a worker_init_fn, which Paceline's readers do not call: random numbers are seeded "
                "for every sample without it; move other initialization into the data set, and leave it out"
            )
        batches: Any = loader.batch_sampler
        for part in (loader.sampler, batches, getattr(batches, "sampler", None)):
            if hasattr(part, "num_replicas") and hasattr(part, "rank"):
                raise ValueError(
                    f"the DataLoader's {type(part).__name__} gives each worker a part of the data, but Paceline "
                    "divides the data itself: make the DataLoader as for one process, with shuffle or another sampler"
                )
        if batches is not None and type(batches) is not BatchSampler:
            return cls(batches, True, None, False, None)
        sampler: Any = (loader if batches is None else batches).sampler
        dataset: Any = loader.dataset
        is_sequential, is_random = type(sampler) is SequentialSampler, type(sampler) is RandomSampler
        is_complete = (is_sequential or (is_random and not sampler.replacement)) and len(sampler) == len(dataset)
        size, drop_last = (None, False) if batches is None else (batches.batch_size, batches.drop_last)
        return cls(sampler, False, size, drop_last, is_random if is_complete else None)


def _adopt_loader(loader: DataLoader[Any], options: LoadingOptions, seed: int) -> Adopted:
    batches, given_readers = _LoaderBatches.of(loader), options.readers
    readers = _agreed("readers", options.readers, "num_workers", loader.num_workers or None)
    collate_fn = _agreed("collate_fn", options.collate_fn, "collate_fn", _collate_fn(loader))
    options = replace(options, readers=readers, collate_fn=None)
    if isinstance(loader.dataset, IterableDataset):
        if batches.drop_last:
            raise ValueError(
                "the DataLoader has drop_last=True over an IterableDataset, but every sample of a stream is trained: "
                "set drop_last=False"
            )
        if batches.size is not None:
            options = replace(_with_batch_size(options, batches.size), collate_fn=collate_fn)
            return _adopted(IterableStream(loader.dataset, seed), options)
        stream = BatchStream([loader.dataset], seed, collate_fn or default_convert)
        return _whole_batches(stream, "a DataLoader with batch_size=None", options, "dispatched")
    if batches.shuffle is not None:
        _agreed("shuffle", options.shuffle, "shuffle", batches.shuffle)
    elif options.shuffle is not None:
        raise ValueError(
            f"shuffle={options.shuffle} contradicts the DataLoader's {type(batches.sampler).__name__}, which decides "
            "the order: leave shuffle out"
        )
    if batches.in_batches:
        drawn = Ordered(_loader_source(loader, collate_fn, seed), batches.sampler, seed, in_batches=True)
        name = f"a DataLoader with a {type(batches.sampler).__name__}"
        return _whole_batches(drawn, name, options, "sharded")
    if batches.size is None:
        data = _ordered(WholeBatches(loader.dataset, collate_fn or default_convert, seed), batches, seed)
        adopted = _whole_batches(data, "a DataLoader with batch_size=None", options, "sharded")
        return replace(adopted, shuffle=bool(batches.shuffle))
    source = _loader_source(loader, collate_fn, seed)
    if isinstance(source, Columns):
        options = replace(options, readers=given_readers)  # reader processes that only index tensors would cost time
    options = replace(_with_batch_size(options, batches.size), shuffle=batches.shuffle)
    return _adopted(_ordered(source, batches, seed), options)


def _collate_fn(loader: DataLoader[Any]) -> Callable[[Any], Any] | None:
    """None for torch's default, which depends on whether items are samples or batches."""
    return None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn


def _loader_source(loader: DataLoader[Any], collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> Source:
    """The data set's samples. For a DataLoader a tuple or dict is a collection of samples, not of columns."""
    data: Any = loader.dataset
    is_array = isinstance(data, torch.Tensor | np.ndarray)
    if isinstance(data, tuple | Mapping) or (is_array and collate_fn is not None):
        return Samples(data, collate_fn, seed)
    return as_source(data, collate_fn=collate_fn, seed=seed)


def _with_batch_size(options: LoadingOptions, batch_size: int) -> LoadingOptions:
    """A loader's batch is the global batch, as in a plain loop, or the micro-batch if the step's size is given."""
    if options.batches_per_step is not None:
        if options.global_batch is not None:
            raise ValueError(
                f"global_batch={options.global_batch} and batches_per_step={options.batches_per_step} both set the "
                "size of a step: leave one of them out"
            )
        options = replace(options, global_batch=options.batches_per_step * batch_size, batches_per_step=None)
    if options.global_batch is None and not options.strategy_sets_step:
        return replace(options, global_batch=batch_size, micro_batch=options.micro_batch or batch_size)
    return replace(options, micro_batch=_agreed("micro_batch", options.micro_batch, "batch_size", batch_size))


def _ordered(source: Source, batches: _LoaderBatches, seed: int) -> NumberedData:
    """The source in the order of the DataLoader's sampler, without an incomplete last batch if drop_last is set."""
    multiple_of = batches.size if batches.drop_last and batches.size else 1
    if batches.shuffle is not None and multiple_of == 1:
        return source
    data = Ordered(source, batches.sampler if batches.shuffle is None else None, seed, multiple_of=multiple_of)
    if not len(data):
        raise ValueError(
            f"the DataLoader's drop_last=True leaves nothing of {data.num_drawn} samples with "
            f"batch_size={multiple_of}: choose a smaller batch_size or drop_last=False"
        )
    return data
