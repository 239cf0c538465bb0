"""Stories of unequal length as one batch, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from words import PAD


class Batch(NamedTuple):
    """Stories padded to one length, (stories, length): `y` is one word further than `x`."""

    x: torch.Tensor
    y: torch.Tensor


def collate(stories: Sequence[Any]) -> Batch:
    """Stories are lists of tokens, or rows of a table with a column `tokens`."""
    tokens = [story["tokens"] if isinstance(story, dict) else story for story in stories]
    padded = pad_sequence([torch.as_tensor(each).long() for each in tokens], batch_first=True, padding_value=PAD)
    return Batch(padded[:, :-1].contiguous(), padded[:, 1:].contiguous())


def num_words(batch: Batch) -> int:
    """What the loss is a mean over."""
    return int((batch.y != PAD).sum())
