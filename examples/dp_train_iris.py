"""Classify flowers with `dp_train`: three classes, four measurements, one hidden layer of 32.

Shows the one-call form: a model factory, a list of samples, and functions that say what to do with a sample. With
`n_gpu=2` every step takes the next two samples, one per replica, and applies the mean of their gradients.

    python examples/dp_train_iris.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from iris import load_iris
from torch import nn

import paceline as pl


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def main() -> int:
    measurements, labels = (torch.from_numpy(array) for array in load_iris())
    # dp_train takes the samples in the order given, so they should be mixed already (load_iris does that).
    samples = [{"x": x, "y": y} for x, y in zip(measurements, labels, strict=True)]

    result = pl.dp_train(
        make_model,
        samples,
        loss_fn=F.cross_entropy,
        forward_fn=lambda model, sample: model(sample["x"]),
        target_fn=lambda sample: sample["y"],
        n_gpu=2,
        n_iter=1000,
        lr=1e-3,
        max_norm=5.0,
        verbose=200,
    )

    with torch.no_grad():
        predicted = result.model.cpu()(measurements).argmax(dim=1)
    accuracy = (predicted == labels).float().mean().item()
    first, last = (sum(part) / len(part) for part in (result.loss_history[:75], result.loss_history[-75:]))
    print(f"mean loss over the first 75 steps {first:.3f}, over the last 75 {last:.3f}, accuracy {accuracy:.1%}")
    return 0 if last < 0.5 * first and accuracy > 0.93 else 1


if __name__ == "__main__":
    sys.exit(main())
