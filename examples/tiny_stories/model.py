"""A small causal transformer in plain PyTorch: pre-norm blocks, dropout, output layer tied to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batches import Batch
from corpus import Corpus
from torch import nn
from words import PAD


class Block(nn.Module):
    """Attention to the words before, then a two-layer network, each added to its input."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self._attend(self.norm_attention(x)), self.dropout, self.training)
        return x + F.dropout(self.network(self.norm_network(x)), self.dropout, self.training)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class StoryModel(nn.Module):
    """Scores for the next word, at every position: (batch, length) tokens to (batch, length, num_words)."""

    def __init__(
        self,
        num_words: int,
        *,
        max_length: int,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.words = nn.Embedding(num_words, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.to_words = nn.Linear(width, num_words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.to_words.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.words(tokens) + self.positions(places))
        return self.to_words(self.norm(self.blocks(x)))


def build_model(corpus: Corpus, width: int = 128, num_layers: int = 2, dropout: float = 0.1) -> StoryModel:
    """A model for the corpus's words and its longest story."""
    return StoryModel(
        len(corpus.vocabulary), max_length=corpus.max_length, width=width, num_layers=num_layers, dropout=dropout
    )


def word_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the batch's words, in nats."""
    return F.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten(), ignore_index=PAD)
