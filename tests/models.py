"""Small models and data for the tests that compare whole runs, and the digest they are compared by."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


class SmallTransformer(nn.Module):
    """Attention, LayerNorm, dropout, tied embeddings.

    No biases: the gradient of attention's key bias is zero but for rounding, and Adam would blow that up to steps of
    the full learning rate in random directions.
    """

    def __init__(self, vocabulary: int = 50, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, bias=False)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens) + self.place[: tokens.shape[1]]))


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels, momentum=None)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class SmallResNet(nn.Module):
    """BatchNorm with a momentum and BatchNorm as a running average."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(3, 8, 1), _Block(8, 16, 2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def tokens(count: int, length: int = 12, vocabulary: int = 50, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def images(count: int, classes: int = 5, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    return x, (x.flatten(1) @ torch.randn(192, classes, generator=generator)).argmax(1)


def vectors(count: int, classes: int = 4, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    return x, (x @ torch.randn(12, classes, generator=generator)).argmax(1)


def digest(*states: Any) -> str:
    """SHA-256 over every number in nested dicts, lists and tensors, in order."""
    total = hashlib.sha256()
    for state in states:
        _feed(total, state)
    return total.hexdigest()


def _feed(total: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            total.update(repr(key).encode())
            _feed(total, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(total, item)
    else:
        total.update(repr(value).encode())
