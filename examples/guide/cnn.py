"""A small convolutional network learns to read digits, drawn here with shifts and noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

# One octal number per row of squares.
DIGITS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717"]


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of 12 x 12 with a digit of 5 x 3 squares somewhere in them, and which digit it is."""
    shapes = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in digit] for digit in DIGITS]).float()
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 12, 12, generator=generator)
    for image, label in zip(images, labels, strict=True):
        y, x = torch.randint(0, 3, (2,), generator=generator).tolist()
        image[0, y : y + 10, x + 2 : x + 8] += shapes[label].repeat_interleave(2, 0).repeat_interleave(2, 1)
    return images, labels


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set = TensorDataset(*draw(2000, torch.Generator().manual_seed(1)))
test_set = TensorDataset(*draw(500, torch.Generator().manual_seed(2)))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(32 * 3 * 3, 10),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
trainer = pl.Trainer.setup(model, optimizer, data=train_set, global_batch=64, micro_batch=16)

model.train()
for epoch in trainer.epochs(4):
    for images, labels in epoch:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        trainer.step()

model.eval()
test_loss = 0.0
with torch.no_grad():
    for images, labels in DataLoader(test_set, batch_size=100):
        scores = model(images.to(device))
        test_loss += F.cross_entropy(scores, labels.to(device), reduction="sum").item() / len(test_set)
print(f"test loss {test_loss:.3f}")
assert test_loss < 0.2
