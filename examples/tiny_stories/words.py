"""Words and their numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

PAD, START, END, UNKNOWN = 0, 1, 2, 3
_SPECIAL_WORDS = ["<pad>", "<start>", "<end>", "<unknown>"]

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_STRAIGHT_QUOTES = str.maketrans("“”‘’", "\"\"''")


def words_of(text: str) -> list[str]:
    """Words and punctuation marks."""
    return _WORD.findall(text.translate(_STRAIGHT_QUOTES))


class Vocabulary:
    """Words to numbers and back: the special ones first, then the `max_words` most frequent, alphabetically."""

    def __init__(self, stories: Iterable[list[str]], max_words: int) -> None:
        counts = Counter(word for story in stories for word in story)
        self.words = _SPECIAL_WORDS + sorted(word for word, _ in counts.most_common(max_words))
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, story: list[str]) -> list[int]:
        """The story's tokens between `<start>` and `<end>`."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in story), END]

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as readable text: the special ones left out, sentences capitalised, punctuation attached."""
        text = " ".join(self.words[token] for token in tokens if token > UNKNOWN)
        text = re.sub(r'" ([^"]*) "', r'"\1"', text)
        text = re.sub(r" ([.,!?;:])", r"\1", text)
        text = re.sub(r"\bi\b", "I", text)
        return re.sub(r'(^"?|[.!?] "?|"(?=[a-z]))([a-z])', lambda found: found[1] + found[2].upper(), text)


def unigram_entropy(stories: Iterable[list[int]]) -> float:
    """Nats per predicted token for a model that knows how often each word occurs, and nothing else."""
    counts = Counter(token for story in stories for token in story[1:])  # <start> is never predicted
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())
