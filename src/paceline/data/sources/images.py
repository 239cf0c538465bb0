"""Folders of images, one sub-folder per class."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.imports import optional
from paceline.core.seeding import Purpose, derive_seed
from paceline.data.errors import check_range, naming_sample, suggestion
from paceline.data.fingerprint import Facts, file_facts, value_facts
from paceline.data.sources.base import Indices, Pair, Seeded

# Statistics of ImageNet's training images, which pretrained models expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
# A random crop's fraction of the image area, its aspect ratio, and the attempts before a central crop is used.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_TRIES = 10
# In evaluation: the side of the central square as a fraction of the shorter side (224 of 256).
_CENTRE = 0.875

_Box = tuple[float, float, float, float]


class ImageFolder(Seeded):
    """Images under root/CLASS/..., as micro-batches `Pair(x, y)`: x float32 (samples, 3, size, size), y int64 labels.

    In training an image is cropped at random (8 to 100% of its area) and flipped with probability 0.5, seeded by (seed,
    epoch, sample); else the centre is used. Then it is scaled to `size` and normalised by `mean` and `std`.

    Args:
        root: the folder. Images are numbered class by class, sorted by name.
        size: side of the model's input, in pixels.
        train: whether to crop and flip at random.
        classes: names of the sub-folders to use; a label is an index into this list. By default all, sorted.
        mean, std: per channel, of values between 0 and 1; by default ImageNet's.
        seed: of the random crops; by default the run's.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: int = 224,
        train: bool = True,
        classes: Sequence[str] | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        _pillow()  # fails here if it is not installed, before workers start
        if size < 1:
            raise ValueError(f"size={size} is too small: choose size >= 1")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(
                f"mean={tuple(mean)}, std={tuple(std)}: give three numbers each, for red, green and blue, with std > 0"
            )
        self._root = Path(root)
        self._size = size
        self._train = train
        self._mean, self._std = tuple(mean), tuple(std)
        self.classes = _class_names(self._root, classes)
        by_class = [_image_files(self._root / name) for name in self.classes]
        self._files = [file for files in by_class for file in files]
        self._labels = np.repeat(np.arange(len(by_class)), [len(files) for files in by_class])

    def __len__(self) -> int:
        return len(self._files)

    def fingerprint(self) -> Facts:
        shown = (
            f"{self._size} pixels, {'random crops' if self._train else 'centres'}, mean {self._mean}, std {self._std}"
        )
        return {"images": shown, "classes": value_facts(self.classes)["content"]} | file_facts(self._files)

    def read(self, indices: Indices, epoch: int, position: int) -> Pair:
        check_range(indices, len(self))
        pixels = np.empty((len(indices), self._size, self._size, 3), np.uint8)
        for place, index in enumerate(indices.tolist()):
            with naming_sample(index, self._files[index]):
                pixels[place] = self._decode(index, epoch)
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (self._mean, self._std))
        return Pair(x.sub_(mean).div_(std), torch.from_numpy(self._labels[indices]))

    def _decode(self, index: int, epoch: int) -> npt.NDArray[np.uint8]:
        """The image cropped, scaled and possibly flipped: (size, size, 3)."""
        pil = _pillow()
        with pil.open(self._files[index]) as image:
            rgb = _in_8_bits(image).convert("RGB")
        width, height = rgb.size
        # A separate generator, which no other thread draws from.
        draw = random.Random(derive_seed(self._seed, Purpose.SAMPLE, epoch, index)) if self._train else None
        side = _CENTRE * min(width, height)
        box = _centred(side, side, width, height) if draw is None else _random_box(draw, width, height)
        array: npt.NDArray[np.uint8]
        array = np.asarray(rgb.resize((self._size, self._size), pil.Resampling.BILINEAR, box=box))
        return array[:, ::-1] if draw is not None and draw.random() < 0.5 else array


def _in_8_bits(image: Any) -> Any:
    """Pillow would clip larger values at 255."""
    if image.mode.startswith("I;16"):
        return _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F") and image.getextrema()[1] > 255:
        raise ValueError(f"its values reach {image.getextrema()[1]:g}, of no known range: save it with 8 or 16 bits")
    return image


def _pillow() -> Any:
    return optional("PIL.Image", package="pillow", extra="images")


def _random_box(draw: random.Random, width: int, height: int) -> _Box:
    """Left, upper, right and lower edge, with random area, aspect ratio and place."""
    low, high = map(math.log, _RATIO)
    for _ in range(_TRIES):
        area = draw.uniform(*_AREA) * width * height
        ratio = math.exp(draw.uniform(low, high))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, upper = draw.random() * (width - w), draw.random() * (height - h)
            # Sums may exceed the image by a rounding error.
            return left, upper, min(left + w, width), min(upper + h, height)
    return _centred(min(width, height * _RATIO[1]), min(height, width / _RATIO[0]), width, height)


def _centred(w: float, h: float, width: int, height: int) -> _Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def _class_names(root: Path, wanted: Sequence[str] | None) -> list[str]:
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder: check the path of the image folder")
    found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise FileNotFoundError(
            f"{root} has no sub-folders: put the images of each class into one, named after the class"
        )
    if wanted is None:
        return found
    for name in wanted:
        if name not in found:
            raise ValueError(f"class {name!r} has no sub-folder in {root}: {suggestion(name, found)}")
    if not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"classes={list(wanted)}: name at least one class, and each once")
    return list(wanted)


def _image_files(folder: Path) -> list[str]:
    paths = [
        os.path.join(parent, name)  # noqa: PTH118 - a million Path objects take seconds
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(_SUFFIXES)
    ]
    if not paths:
        raise FileNotFoundError(f"class folder {folder} has no images ({' '.join(_SUFFIXES)}): add some, or remove it")
    return sorted(paths)
