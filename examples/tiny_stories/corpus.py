"""The stories of a run: generated, or read from a copy of TinyStories, in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from stories import tell_stories
from words import Vocabulary, words_of

from paceline.data.sources.arrow import ArrowSource

Part = Literal["training", "held_out"]

# What ends a story in TinyStories' text files.
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """Stories as lists of tokens. Those held out are never trained on."""

    vocabulary: Vocabulary
    training: list[list[int]]
    held_out: list[list[int]]

    @property
    def all_stories(self) -> list[list[int]]:
        return self.training + self.held_out

    @property
    def max_length(self) -> int:
        return max(map(len, self.all_stories))


@lru_cache(maxsize=1)
def read_corpus(
    source: str | None = None,
    stories: int = 4000,
    held_out: int = 400,
    max_words: int = 4000,
    max_length: int = 256,
) -> Corpus:
    """The corpus; the same one, not read again, for whoever asks in this process.

    source: None for generated stories; a text file in which `<|endoftext|>` ends each story, or a Parquet or Arrow file
        or a folder of them with a column `text`.
    stories, held_out: how many to train on and how many to keep for evaluation, which are the first.
    max_words, max_length: rarer words become `<unknown>`, longer stories are cut.
    """
    count = stories + held_out
    texts = tell_stories(count, seed=0) if source is None else list(islice(_read(Path(source).expanduser()), count))
    if len(texts) < count:
        raise ValueError(f"{source} has {len(texts)} stories, fewer than stories={stories} and held_out={held_out}")
    split = [words_of(text)[: max_length - 2] for text in texts]
    vocabulary = Vocabulary(split[held_out:], max_words)
    tokens = [vocabulary.encode(words) for words in split]
    return Corpus(vocabulary, tokens[held_out:], tokens[:held_out])


def in_memory(corpus: Corpus, part: Part) -> list[list[int]]:
    """A part of the corpus as plain lists, the simplest data there is."""
    found: list[list[int]] = getattr(corpus, part)
    return found


def _read(source: Path) -> Iterator[str]:
    if not source.exists():
        raise FileNotFoundError(
            f"there is no {source}: name a text file of stories, or a folder of Parquet or Arrow files; leave source "
            "out for generated stories"
        )
    return _from_text(source) if source.suffix == ".txt" else _from_tables(source)


def _from_text(path: Path) -> Iterator[str]:
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:  # line by line: the file may be larger than memory
        for line in file:
            *endings, rest = line.split(SEPARATOR)
            for ending in endings:
                yield "".join([*lines, ending])
                lines = []
            lines.append(rest)
    if "".join(lines).strip():
        yield "".join(lines)


def _from_tables(path: Path) -> Iterator[str]:
    rows = ArrowSource(path, columns=["text"])
    for start in range(0, len(rows), 1000):
        indices = np.arange(start, min(start + 1000, len(rows)))
        yield from rows.read(indices, epoch=0, position=start)["text"]
