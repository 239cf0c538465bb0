"""A small transformer learns to write sums, one character after another."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

CONTEXT = 24


def sums(count: int, seed: int) -> str:
    """A text such as '3+4=7 9+8=17 '."""
    draw = random.Random(seed).randrange
    return "".join(f"{a}+{b}={a + b} " for a, b in ((draw(10), draw(10)) for _ in range(count)))


def windows(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text as character numbers, and the same one character further."""
    tokens = torch.tensor([ALPHABET.index(character) for character in text])
    pieces = tokens.unfold(0, CONTEXT + 1, CONTEXT // 2)
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, num_characters: int, width: int = 64, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_characters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]]))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
ALPHABET = sorted(set(sums(500, seed=1)))
train_set = TensorDataset(*windows(sums(2000, seed=1)))
test_set = TensorDataset(*windows(sums(300, seed=2)))

model = CharGPT(len(ALPHABET)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
trainer = pl.Trainer.setup(model, optimizer, data=train_set, global_batch=64, micro_batch=16)

for epoch in trainer.epochs(4):
    for x, y in epoch:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        trainer.step()

test_loss = 0.0
with torch.no_grad():
    for x, y in DataLoader(test_set, batch_size=64):
        loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        test_loss += loss.item() * len(x) / len(test_set)
print(f"test loss {test_loss:.3f}")
assert test_loss < 1.4
