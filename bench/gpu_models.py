"""The models of `bench gpu`: called with a batch, each returns its loss."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional

from bench.models import LanguageModel, mlp


def gpt2(vocabulary: int, length: int, *, quick: bool) -> nn.Module:
    """GPT-2's smallest, 124 million parameters, or with `quick` one of its shape that takes no time."""
    width, num_layers, num_heads = (32, 2, 2) if quick else (768, 12, 12)
    model = LanguageModel(vocabulary=vocabulary, length=length, width=width, num_layers=num_layers, num_heads=num_heads)
    nn.init.normal_(model.tokens.weight, std=0.02)
    model.head.weight = model.tokens.weight
    return model


class Classifier(nn.Module):
    """A network of logits, and the loss of its classes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(x), labels)


def tiny_mlp() -> nn.Module:
    return Classifier(mlp(32, 64, 64, 10))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside the identity, or beside a 1 x 1 convolution where the shape changes."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.beside = (
            nn.Identity()
            if narrow == wide
            else nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.beside(x))


def resnet18(width: int = 64, num_classes: int = 10) -> nn.Module:
    """ResNet-18 with the stem for images of 32 x 32; 11.2 million parameters at the usual width."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        nn.Sequential(Residual(before, after, stride=1 if before == after else 2), Residual(after, after, stride=1))
        for before, after in itertools.pairwise(widths)
    ]
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], num_classes),
        )
    )
