"""Step 1: a plain PyTorch loop."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(count, seed):
    """Points on two intertwined spirals, and which of the two."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    radius = torch.rand(count, generator=generator)
    angle = math.pi * (3 * radius + label)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2, generator=generator), label


torch.manual_seed(0)
train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
loader = DataLoader(TensorDataset(*train_data), batch_size=64, shuffle=True)

for _ in range(10):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    x, y = test_data
    test_loss = F.cross_entropy(model(x), y).item()
print(f"test loss {test_loss:.3f}")
assert test_loss < 0.2
