"""Folders of images."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from worker_pool import WorkerPool

from paceline.data.errors import SampleError
from paceline.data.sources.base import Pair
from paceline.data.sources.images import IMAGENET_MEAN, IMAGENET_STD, ImageFolder, _random_box


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def save(path: Path, pixels: Any, **settings: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three cats, one of them a folder further down, and two dogs; noise of many sizes."""
    rng = np.random.default_rng(0)
    names = ["cat/a.png", "cat/more/b.jpg", "cat/c.PNG", "dog/a.jpeg", "dog/b.png"]
    for name, (height, width) in zip(names, [(20, 30), (40, 20), (9, 9), (64, 48), (16, 200)], strict=True):
        save(tmp_path / name, rng.integers(0, 256, (height, width, 3)))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "README").write_text("not a class")
    return tmp_path


def test_a_class_for_each_sub_folder(folder: Path) -> None:
    source = ImageFolder(folder, size=16)
    assert len(source) == 5
    assert source.classes == ["cat", "dog"]
    batch = source.read(indices(4, 0, 2, 3), 0, 0)
    assert type(batch) is Pair
    assert batch.x.shape == (4, 3, 16, 16)
    assert batch.x.dtype == torch.float32
    assert batch.x.is_contiguous()
    assert batch.y.tolist() == [1, 0, 0, 1]
    assert batch.y.dtype == torch.int64


def test_images_are_numbered_by_class_and_name(tmp_path: Path) -> None:
    for shade, name in enumerate(["b/2.png", "b/10.png", "a/x.png", "a/deep/y.png"]):
        save(tmp_path / name, np.full((4, 4, 3), shade))
    x = ImageFolder(tmp_path, 2, train=False, mean=(0, 0, 0), std=(1, 1, 1)).read(np.arange(4), 0, 0).x
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [3, 2, 1, 0]


def test_chosen_classes_are_labelled_in_the_order_chosen(folder: Path) -> None:
    source = ImageFolder(folder, 8, classes=["dog", "cat"])
    assert source.read(np.arange(5), 0, 0).y.tolist() == [0, 0, 1, 1, 1]
    assert ImageFolder(folder, 8, classes=["dog"]).read(indices(0), 0, 0).y.tolist() == [0]


def test_evaluation_scales_then_cuts_the_centre_then_normalises(tmp_path: Path) -> None:
    save(tmp_path / "c" / "i.png", np.random.default_rng(0).integers(0, 256, (64, 96, 3)))
    with Image.open(tmp_path / "c" / "i.png") as image:
        scaled = np.asarray(image.resize((48, 32), Image.Resampling.BILINEAR))
    centre = torch.tensor(scaled[2:30, 10:38]).permute(2, 0, 1) / 255
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
    batch = ImageFolder(tmp_path, size=28, train=False).read(indices(0), 3, 0)
    torch.testing.assert_close(batch.x[0], (centre - mean) / std)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_kind_of_image_comes_in_three_colours(tmp_path: Path, mode: str) -> None:
    (tmp_path / "c").mkdir()
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    image.save(tmp_path / "c" / ("i.tif" if mode == "CMYK" else "i.png"))
    x = ImageFolder(tmp_path, 4, train=False, mean=(0, 0, 0), std=(1, 1, 1)).read(indices(0), 0, 0).x
    torch.testing.assert_close(x, torch.ones(1, 3, 4, 4))


def test_crops_belong_to_seed_epoch_and_sample(folder: Path) -> None:
    source = ImageFolder(folder, size=16)
    together = source.read(np.arange(5), 1, 0).x
    assert torch.equal(source.read(indices(4, 2), 1, 64).x, together[[4, 2]])
    assert not torch.equal(source.read(np.arange(5), 2, 0).x, together)
    seeded = source.with_seed(7).read(np.arange(5), 1, 0).x
    assert not torch.equal(seeded, together)
    assert torch.equal(ImageFolder(folder, 16, seed=7).with_seed(8).read(np.arange(5), 1, 0).x, seeded)
    evaluated = ImageFolder(folder, 16, train=False)
    assert torch.equal(evaluated.read(np.arange(5), 1, 0).x, evaluated.read(np.arange(5), 2, 0).x)


def test_half_of_the_images_are_flipped(tmp_path: Path) -> None:
    """Brightness grows to the right: its slope tells the direction."""
    save(tmp_path / "c" / "i.png", np.repeat(np.arange(64)[None, :, None] * 4, 64, 0).repeat(3, 2))
    source = ImageFolder(tmp_path, 8)
    crops = torch.cat([source.read(indices(0), epoch, 0).x for epoch in range(400)])
    falls = (crops[:, 0, 4, 0] > crops[:, 0, 4, 7]).sum().item()
    assert 150 < falls < 250


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (1000, 3), (3, 1000)])
def test_random_crops_lie_inside_and_have_the_area_and_shape_asked_for(size: tuple[int, int]) -> None:
    width, height = size
    draw, areas = random.Random(0), []
    for _ in range(500):
        left, upper, right, lower = _random_box(draw, width, height)
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        areas.append((right - left) * (lower - upper) / (width * height))
        assert 0.7499 < (right - left) / (lower - upper) < 1.3334
    if size == (300, 200):
        assert 0.079 < min(areas) < 0.15
        assert 0.85 < max(areas) <= 1.0


def test_another_process_decodes_the_same(folder: Path, pool: WorkerPool) -> None:
    source = ImageFolder(folder, 16, seed=2)
    here = source.read(np.arange(5), 3, 0)
    assert pickle.loads(pickle.dumps(source)).classes == source.classes
    (there,) = pool.run(lambda: tuple(source.read(np.arange(5), 3, 0)), 1)
    assert torch.equal(here.x, there[0])
    assert torch.equal(here.y, there[1])


def test_the_users_random_streams_go_on_undisturbed(folder: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ImageFolder(folder, 8).read(np.arange(5), 0, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


# Errors


@pytest.mark.parametrize("content", [b"", b"not an image", "cut"])
def test_a_bad_image_is_named(folder: Path, content: bytes | str) -> None:
    path = folder / "dog" / "a.jpeg"
    path.write_bytes(path.read_bytes()[:700] if isinstance(content, str) else content)
    with pytest.raises(SampleError, match=r"sample 3 in .*dog/a\.jpeg cannot be read: \w*Error: ") as caught:
        ImageFolder(folder, 8).read(np.arange(5), 0, 0)
    assert (caught.value.index, caught.value.file) == (3, str(path))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"size": 0}, "size=0 is too small: choose size >= 1"),
        ({"classes": ["cat", "dgo"]}, r"class 'dgo' has no sub-folder in .*: did you mean 'dog'\?"),
        ({"classes": ["zebra"]}, r"class 'zebra' has no sub-folder in .*: choose from 'cat', 'dog'"),
        ({"classes": ["cat", "cat"]}, r"classes=\['cat', 'cat'\]: name at least one class, and each once"),
        ({"classes": []}, r"classes=\[\]: name at least one class"),
        ({"mean": (0.5,)}, r"mean=\(0.5,\), std=.*: give three numbers each"),
        ({"std": (1, 0, 1)}, r"std=\(1, 0, 1\): give three numbers each, for red, green and blue, with std > 0"),
    ],
)
def test_settings_that_cannot_be_used(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ImageFolder(folder, **settings)


def test_folders_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder: check the path"):
        ImageFolder(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no sub-folders: put the images of each class into one"):
        ImageFolder(folder / "dog")
    (folder / "fish").mkdir()
    with pytest.raises(FileNotFoundError, match=r"class folder .*fish has no images \(\.jpg .*\): add some"):
        ImageFolder(folder)


def test_without_pillow_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    with pytest.raises(ModuleNotFoundError, match=r"pillow is not installed.*pip install 'paceline\[images\]'"):
        ImageFolder(folder, 8)


@pytest.mark.parametrize("index", [5, -1])
def test_images_outside_of_the_folder_are_refused(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match="are out of range: the source has 5"):
        ImageFolder(folder, 8).read(indices(0, index), 0, 0)


def test_images_with_16_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    ramp = np.tile(np.arange(8, dtype=np.uint16) * 8192, (8, 1))
    Image.fromarray(ramp).save(tmp_path / "c" / "a.png")
    Image.fromarray((ramp >> 8).astype(np.uint8)).save(tmp_path / "c" / "b.png")
    x = ImageFolder(tmp_path, 8, train=False).read(np.array([0, 1]), 0, 0).x
    assert torch.equal(x[0], x[1])
    assert len(x[0].unique()) > 3


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_an_image_of_an_unknown_range_is_an_error(tmp_path: Path, dtype: Any) -> None:
    (tmp_path / "c").mkdir()

    def save(value: int) -> None:
        Image.fromarray(np.full((4, 4), value, dtype)).save(tmp_path / "c" / "a.tif")

    save(255)
    assert ImageFolder(tmp_path, 4, mean=(0, 0, 0), std=(1, 1, 1)).read(np.array([0]), 0, 0).x.unique().tolist() == [1]
    save(70000)
    with pytest.raises(SampleError, match="its values reach 70000, of no known range: save it with 8 or 16 bits"):
        ImageFolder(tmp_path, 4).read(np.array([0]), 0, 0)
