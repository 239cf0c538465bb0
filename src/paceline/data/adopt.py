"""Taking what users already have: what they pass as `data`, and what it already says about how to read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_convert

from paceline.data.array_loader import ArrayLoader
from paceline.data.epochs import NumberedData, Sampled, Visited, source_of
from paceline.data.feeds.make_feed import Way, as_data
from paceline.data.feeds.resident import columns
from paceline.data.sources.base import Columns, Source, as_source
from paceline.data.sources.batches import Batches, BatchStream, PerWorker, WholeBatches
from paceline.data.sources.skip_bad import SkipBad, Skipped
from paceline.data.sources.streams import IterableStream
from paceline.data.torch_loader import LoaderSays, what_it_says


@dataclass(frozen=True)
class Wishes:
    """What the user said about reading, beside the data; None: nothing. See `Trainer.setup`."""

    global_batch: int | None = None
    micro_batch: int | None = None
    physical_batch: int | Sequence[int] | None = None
    batches_per_step: int | None = None
    has_steps_of_its_own: bool = False  # the strategy decides how large a step is
    shuffle: bool | None = None
    shuffle_buffer: int = 0
    num_shards: int | None = None
    feed: Way | None = None
    readers: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    skip_bad_samples: bool | Callable[[Skipped], None] = False
    resident: bool = False


@dataclass(frozen=True)
class Adopted:
    """Data and how to read it, settled between what it says and what the user said.

    Where the data comes as whole batches, `global_batch` counts them and `micro_batch` is 1.
    """

    data: NumberedData | IterableStream
    global_batch: int | None
    micro_batch: int | None
    shuffle: bool
    feed: Way
    readers: int
    collate_fn: Callable[[list[Any]], Any] | None


def adopt(data: Any, wishes: Wishes, seed: int) -> Adopted:
    """The data for a run. What contradicts itself is an error that names both sides."""
    if isinstance(data, Batches | PerWorker):
        return _adopt_batches(data, wishes, seed)
    if isinstance(data, DataLoader):
        adopted = _adopt_loader(data, wishes, seed)
    elif isinstance(data, ArrayLoader):
        adopted = _adopt_array_loader(data, wishes)
    else:
        adopted = _settled(as_data(data, collate_fn=wishes.collate_fn, seed=seed), wishes)
    if wishes.resident:
        _check_resident(adopted, type(getattr(data, "dataset", data)).__name__, wishes)
    return replace(adopted, data=_without_bad(adopted.data, wishes))


def adopt_for_evaluation(
    data: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int
) -> tuple[Source, int | None]:
    """Data of which every sample is visited once, and its batch size if it has one."""
    if not isinstance(data, DataLoader):
        return as_source(data, collate_fn=collate_fn, seed=seed), None
    says = what_it_says(data)
    if isinstance(says.dataset, IterableDataset) or says.batch_size is None or says.shuffle is None or says.drop_last:
        raise ValueError(
            "evaluate() and predict() visit every sample of a data set once, so its DataLoader must have a map-style "
            "data set, a batch_size, no sampler of its own and drop_last=False: pass the data set itself"
        )
    collate_fn = _agreed("collate_fn", collate_fn, "collate_fn", says.collate_fn)
    return says.source(collate_fn, seed), says.batch_size


def _settled(data: NumberedData | IterableStream, wishes: Wishes) -> Adopted:
    """As the user wishes, and else as usual."""
    if wishes.batches_per_step is not None:
        raise ValueError(
            f"batches_per_step={wishes.batches_per_step} is for data that comes as whole batches: give global_batch, "
            "in samples"
        )
    if isinstance(data, IterableStream):
        if wishes.shuffle and not wishes.shuffle_buffer:
            raise ValueError(
                "shuffle=True cannot be had of a stream, whose samples have no numbers: give it a shuffle_buffer"
            )
    elif wishes.shuffle_buffer or wishes.num_shards is not None:
        raise ValueError("shuffle_buffer and num_shards are for streams: data with numbered samples needs neither")
    return Adopted(
        data,
        wishes.global_batch,
        wishes.micro_batch,
        shuffle=wishes.shuffle is not False,
        feed=wishes.feed or "sharded",
        readers=wishes.readers or 0,
        collate_fn=wishes.collate_fn,
    )


def _without_bad(data: NumberedData | IterableStream, wishes: Wishes) -> NumberedData | IterableStream:
    """The data with its bad samples left out, if wished."""
    if not wishes.skip_bad_samples:
        return data
    source = None if isinstance(data, IterableStream) else source_of(data)
    if source is None or isinstance(source, WholeBatches):
        raise ValueError(
            "skip_bad_samples needs data with numbered samples: a stream that failed cannot be gone on with"
        )
    skipping = SkipBad(source, wishes.skip_bad_samples if callable(wishes.skip_bad_samples) else None)
    return replace(data, source=skipping) if isinstance(data, Visited | Sampled) else skipping


def _check_resident(adopted: Adopted, name: str, wishes: Wishes) -> None:
    columns(adopted.data if isinstance(adopted.data, IterableStream) else source_of(adopted.data), name)
    for setting, value in (("readers", adopted.readers), ("skip_bad_samples", wishes.skip_bad_samples)):
        if value:
            raise ValueError(f"{setting} would be ignored, since resident=True keeps the data on the device: drop one")
    if adopted.feed == "dispatched":
        raise ValueError("feed='dispatched' contradicts resident=True, where every worker has all the data: drop one")


def _adopt_loader(loader: DataLoader[Any], wishes: Wishes, seed: int) -> Adopted:
    says, wished_readers = what_it_says(loader), wishes.readers
    wishes = replace(
        wishes,
        readers=_agreed("readers", wishes.readers, "num_workers", says.num_workers or None),
        collate_fn=_agreed("collate_fn", wishes.collate_fn, "collate_fn", says.collate_fn),
    )
    if isinstance(says.dataset, IterableDataset):
        return _adopt_stream(says, wishes, seed)
    if says.shuffle is not None:
        _agreed("shuffle", wishes.shuffle, "shuffle", says.shuffle)
    elif wishes.shuffle is not None:
        sampler = says.batch_sampler if says.sampler is None else says.sampler
        raise ValueError(
            f"shuffle={wishes.shuffle} contradicts the DataLoader's {type(sampler).__name__}, which decides the order: "
            "leave shuffle out"
        )
    if says.batch_size is None:
        return _without_batch_size(says, wishes, seed)
    wishes = _with_batch_size(wishes, says.batch_size)
    source = says.source(wishes.collate_fn, seed)
    # Processes that index tensors would only cost time.
    readers = wished_readers or 0 if isinstance(source, Columns) else wishes.readers
    wishes = replace(wishes, shuffle=says.shuffle, readers=readers)
    return _settled(_ordered(says, source, seed), wishes)


def _with_batch_size(wishes: Wishes, batch_size: int) -> Wishes:
    """A loader's batch is what a step takes, as in a loop without us; a micro-batch where the step's size is given."""
    if wishes.batches_per_step is not None:
        if wishes.global_batch is not None:
            raise ValueError(
                f"global_batch={wishes.global_batch} and batches_per_step={wishes.batches_per_step} both say how large "
                "a step is: leave one of them out"
            )
        if type(wishes.batches_per_step) is not int or wishes.batches_per_step < 1:
            raise ValueError(f"batches_per_step={wishes.batches_per_step!r}: choose at least 1 batch per step")
        wishes = replace(wishes, global_batch=wishes.batches_per_step * batch_size, batches_per_step=None)
    if wishes.global_batch is None and not wishes.has_steps_of_its_own:
        return replace(wishes, global_batch=batch_size, micro_batch=wishes.micro_batch or batch_size)
    micro_batch = _agreed("micro_batch", wishes.micro_batch, "batch_size", batch_size)
    return replace(wishes, micro_batch=micro_batch)


def _ordered(says: LoaderSays, source: Source, seed: int) -> NumberedData:
    """The source in the order of the DataLoader's sampler, without an incomplete last batch if it wants none."""
    whole = says.batch_size if says.drop_last and says.batch_size else 1
    data: NumberedData = source if says.sampler is None else Sampled(source, says.sampler, seed, whole=whole)
    if whole == 1:
        return data
    num_samples = len(data) // whole * whole
    if not num_samples:
        raise ValueError(
            f"the DataLoader's drop_last=True leaves nothing of {len(source)} samples with batch_size={whole}: choose "
            "a smaller batch_size or drop_last=False"
        )
    return Visited(source, num_samples) if says.sampler is None else data


def _without_batch_size(says: LoaderSays, wishes: Wishes, seed: int) -> Adopted:
    """Batches that a batch sampler draws, or that the data set's items already are."""
    collate_fn, wishes = wishes.collate_fn, replace(wishes, collate_fn=None)
    if says.batch_sampler is not None:
        data: NumberedData = Sampled(says.source(collate_fn, seed), says.batch_sampler, seed, in_batches=True)
        return _whole_batches(data, f"a DataLoader with a {type(says.batch_sampler).__name__}", wishes, "sharded")
    data = _ordered(says, WholeBatches(says.dataset, collate_fn or default_convert, seed), seed)
    adopted = _whole_batches(data, "a DataLoader with batch_size=None", wishes, "sharded")
    return replace(adopted, shuffle=bool(says.shuffle))


def _adopt_stream(says: LoaderSays, wishes: Wishes, seed: int) -> Adopted:
    if says.drop_last:
        raise ValueError(
            "the DataLoader has drop_last=True over an IterableDataset, but every sample of a stream is trained: make "
            "it with drop_last=False"
        )
    if says.batch_size is None:
        stream = BatchStream([says.dataset], seed, wishes.collate_fn or default_convert)
        return _whole_batches(
            stream, "a DataLoader with batch_size=None", replace(wishes, collate_fn=None), "dispatched"
        )
    return _settled(IterableStream(says.dataset, seed), _with_batch_size(wishes, says.batch_size))


def _agreed(name: str, wished: Any, loader_name: str, said: Any, loader: str = "DataLoader") -> Any:
    """What the user or the loader says, or both."""
    if wished is not None and said is not None and wished != said:
        raise ValueError(
            f"{name}={wished!r} contradicts the {loader}'s {loader_name}={said!r}: leave one of them out, or make them "
            "equal"
        )
    return said if wished is None else wished


def _adopt_array_loader(loader: ArrayLoader, wishes: Wishes) -> Adopted:
    name, columns = "ArrayLoader", loader.columns
    micro_batch = _agreed("micro_batch", wishes.micro_batch, "batch_size", loader.batch_size, name)
    shuffle = _agreed("shuffle", wishes.shuffle, "shuffle", loader.shuffle, name)
    whole = len(columns) // micro_batch * micro_batch if loader.drop_last else len(columns)
    return _settled(Visited(columns, whole), replace(wishes, micro_batch=micro_batch, shuffle=shuffle))


def _adopt_batches(data: Batches | PerWorker, wishes: Wishes, seed: int) -> Adopted:
    feed: Way = "dispatched" if isinstance(data, Batches) else "sharded"
    return _whole_batches(BatchStream(data.iterables, seed), type(data).__name__, wishes, feed)


def _whole_batches(data: NumberedData | IterableStream, name: str, wishes: Wishes, feed: Way) -> Adopted:
    """Data each item of which is one micro-batch."""
    for setting in ("global_batch", "micro_batch", "physical_batch", "collate_fn", "num_shards"):
        if getattr(wishes, setting) is not None:
            raise ValueError(
                f"{setting} has no meaning for {name}, whose batches have sizes of their own: leave it out, and give "
                "batches_per_step"
            )
    if wishes.batches_per_step is None and not wishes.has_steps_of_its_own:
        raise ValueError(f"batches_per_step is missing: give the number of batches of {name} per optimizer step")
    if isinstance(data, BatchStream):
        _check_stream_of_batches(data, name, wishes)
    return Adopted(
        data,
        wishes.batches_per_step,
        1,
        shuffle=False,
        feed=wishes.feed or feed,
        readers=wishes.readers or 0,
        collate_fn=None,
    )


def _check_stream_of_batches(stream: BatchStream, name: str, wishes: Wishes) -> None:
    if wishes.shuffle or wishes.shuffle_buffer:
        raise ValueError(f"{name} gives batches in an order of its own, which cannot be shuffled: shuffle in it")
    for setting in ("resident", "skip_bad_samples"):
        if getattr(wishes, setting):
            raise ValueError(f"{setting} needs data with numbered samples, which {name} has not: leave it out")
    per_step, count = wishes.batches_per_step or 0, stream.num_shards
    if per_step % count:
        raise ValueError(
            f"batches_per_step={per_step} is not a multiple of the {count} iterables of {name}: choose "
            f"{max(per_step // count, 1) * count} or {(per_step // count + 1) * count}"
        )
