"""Small models over images of 3 x 8 x 8, with 5 classes."""

from __future__ import annotations

from torch import nn


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(216, 5))


def pooling() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(6, 5))
