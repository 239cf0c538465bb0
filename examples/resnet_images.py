"""A small ResNet on a folder of images, two replicas, step by step.

Shows `prepare_training` and `train`, and `ImageFolder`: reader processes decode, crop, scale and normalise the images
of the next steps while the replicas train. The images are drawn here, into a temporary folder with one sub-folder per
class: filled circles, crosses, rings and squares, at random places, in random colours, over noise.

    python examples/resnet_images.py
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

import paceline as pl
from paceline.data.sources.images import ImageFolder

SIDE = 48
TRAINING_IMAGES, VALIDATION_IMAGES = 96, 24  # per class
MUST_REACH = 0.85

Box = tuple[float, float, float, float]
Shape = Callable[[ImageDraw.ImageDraw, Box, tuple[int, ...]], object]


def cross(draw: ImageDraw.ImageDraw, box: Box, colour: tuple[int, ...]) -> None:
    left, upper, right, lower = box
    draw.line((left, upper, right, lower), colour, width=5)
    draw.line((left, lower, right, upper), colour, width=5)


SHAPES: dict[str, Shape] = {
    "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "cross": cross,
    "ring": lambda draw, box, colour: draw.ellipse(box, outline=colour, width=4),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
}


def draw_images(root: Path, count: int, seed: int) -> Path:
    """`count` images of every class under root/CLASS."""
    draws = random.Random(seed)
    for name, shape in SHAPES.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = Image.frombytes("L", (SIDE, SIDE), bytes(draws.choices(range(60), k=SIDE * SIDE))).convert("RGB")
            size = draws.uniform(0.5, 0.8) * SIDE
            left, upper = draws.uniform(0, SIDE - size), draws.uniform(0, SIDE - size)
            colour = tuple(draws.randint(110, 255) for _ in range(3))
            shape(ImageDraw.Draw(image), (left, upper, left + size, upper + size), colour)
            image.save(root / name / f"{number:03}.png")
    return root


class Block(nn.Module):
    """Two convolutions beside a shortcut, half the size after a stride of 2."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def build_model() -> nn.Module:
    blocks = [Block(3, 16, 2), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SHAPES)))


def one_cycle(step: int, num_steps: int, peak: float = 6e-3) -> float:
    """Up to the peak in the first quarter, then down to zero."""
    place = (step + 1) / num_steps
    return peak * min(place / 0.25, (1 - place) / 0.75)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = ImageFolder(draw_images(Path(folder, "training"), TRAINING_IMAGES, seed=0), size=32)
        validation = ImageFolder(draw_images(Path(folder, "validation"), VALIDATION_IMAGES, seed=1), 32, train=False)
        with pl.compat.resnetimagenet.prepare_training(
            build_model,
            training,
            ["cpu", "cpu"],
            lambda params: torch.optim.AdamW(params, lr=6e-3),
            nsamples=16,
            epochs=6,
            buffersize=2,
        ) as state:
            history = pl.compat.resnetimagenet.train(
                F.cross_entropy,
                state,
                validation=validation,
                topk=(1, 2),
                schedule=lambda step, _: one_cycle(step, len(state.loader)),
                verbose=24,
            )
    accuracy = history.validations[-1].accuracy[1]
    print(f"{accuracy:.1%} of {len(validation)} images it has not seen are told right; {MUST_REACH:.0%} are expected")
    return 0 if accuracy >= MUST_REACH else 1


if __name__ == "__main__":
    sys.exit(main())
