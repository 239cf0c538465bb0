"""The same stories as Arrow files, and three ways to read them. They are written when first asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from batches import collate
from corpus import Corpus, Part, in_memory

from paceline.data.sources.arrow import ArrowSource

NUM_FILES = 8


def arrow_source(corpus: Corpus, part: Part) -> ArrowSource:
    """Read by Paceline: memory-mapped, any sample at once, no Python object for each."""
    return ArrowSource(arrow_files(corpus, part), columns=["tokens"], collate_fn=collate)


def hf_dataset(corpus: Corpus, part: Part) -> Any:
    """A `datasets.Dataset`: samples have numbers."""
    import datasets

    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in arrow_files(corpus, part)])


def hf_stream(corpus: Corpus, part: Part) -> Any:
    """A `datasets.IterableDataset`: samples come one after another, from as many shards as there are files."""
    return hf_dataset(corpus, part).to_iterable_dataset(num_shards=NUM_FILES)


def cache_folder() -> Path:
    """$PACELINE_CACHE or ~/.cache/paceline, as for everything that can be made again."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / "tiny_stories"


def arrow_files(corpus: Corpus, part: Part) -> list[Path]:
    """The files of a part of the corpus. Their folder is named after what they hold, so it is never out of date."""
    stories = in_memory(corpus, part)
    folder = cache_folder() / sha256(repr(stories).encode()).hexdigest()[:16]
    if not folder.is_dir():
        _write(stories, folder)
    return sorted(folder.glob("*.arrow"))


def _write(stories: list[list[int]], folder: Path) -> None:
    """Written beside and renamed: nobody sees half a folder, and of several writers the first wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        size = -(-len(stories) // NUM_FILES)
        for number in range(NUM_FILES):
            _write_file(stories[number * size : (number + 1) * size], beside / f"part-{number}.arrow")
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_file(stories: list[list[int]], path: Path) -> None:
    import pyarrow

    tokens = pyarrow.array(stories, type=pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table({"tokens": tokens})
    with pyarrow.ipc.new_stream(path, table.schema) as file:  # the format that HF datasets map into memory
        file.write_table(table)
