"""A small BERT from `transformers`, built from a configuration, learns to tell praise from blame."""

from __future__ import annotations

import random

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

PAD, CLS, GOOD, BAD, OTHER = 0, 1, 2, 3, 4
LENGTH = 12


def reviews(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of made-up words, three of them 'good' or 'bad': what most of them say is the label."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        opinions = draw.choices([GOOD, BAD], k=3)
        words = opinions + [draw.randrange(OTHER, 40) for _ in range(draw.randrange(1, LENGTH - 3))]
        draw.shuffle(words)
        padding = LENGTH - 1 - len(words)
        samples.append(
            {
                "input_ids": torch.tensor([CLS, *words] + [PAD] * padding),
                "attention_mask": torch.tensor([1] * (1 + len(words)) + [0] * padding),
                "labels": torch.tensor(int(opinions.count(GOOD) > 1)),
            }
        )
    return samples


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, test_set = reviews(1200, seed=1), reviews(400, seed=2)

config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    num_labels=2,
)
model = BertForSequenceClassification(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(train_set, batch_size=32, shuffle=True)

model.train()
for _ in range(4):
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
test_loss = 0.0
with torch.no_grad():
    for batch in DataLoader(test_set, batch_size=100):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        test_loss += model(**batch).loss.item() * len(batch["labels"]) / len(test_set)
print(f"test loss {test_loss:.3f}")
assert test_loss < 0.1
