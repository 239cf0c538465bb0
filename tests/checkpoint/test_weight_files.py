"""Weights to begin with: what is no file of weights is refused by name, whatever it is, and no code in it is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reader import read_weights


class Touching:
    """Pickled, an order to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._path,))


def saved(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)  # type: ignore[arg-type]
    return file.getvalue()


def archive(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as opened:
            opened.writestr("notes.txt", "nothing")
    else:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("notes.txt"))
    return file.getvalue()


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.savez(file, weight=np.zeros(3))
    return file.getvalue()


STATE = {"weight": torch.zeros(3), "bias": torch.ones(1)}
FILES: dict[str, bytes] = {
    "empty": b"",
    "text": b"learning_rate: 0.1\n",
    "json": json.dumps({"weight": [1.0]}).encode(),
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "zip": archive("zip"),
    "tar": archive("tar"),
    "npz": numpy_file(),
    "pickle": pickle.dumps({"weight": 3}),
    "pickle of a list": pickle.dumps([1, 2]),
    "a whole model": saved(torch.nn.Linear(2, 2)),
    "a list": saved([torch.zeros(2)]),
    "a number": saved(7),
    "a tensor": saved(torch.zeros(2)),
    "names that are numbers": saved({0: torch.zeros(2)}),
    "values that are no tensors": saved({"weight": "heavy", "bias": 3}),
    "nothing in it": saved({}),
    "truncated": saved(STATE)[:-100],
    "truncated old format": saved(STATE, _use_new_zipfile_serialization=False)[:-10],
    "ELF": b"\x7fELF" + bytes(range(200)),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_weights_is_refused_by_name(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(FILES[kind])
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert "give a checkpoint, a .safetensors file, or a state_dict written by torch.save" in message
    assert len(message) < 500
    assert "\n" not in message
    assert "weights_only" not in message


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_random_bytes_are_refused(tmp_path: Path, suffix: str) -> None:
    generator = random.Random(3)
    path = tmp_path / f"file{suffix}"
    good = [saved(STATE), saved(STATE, _use_new_zipfile_serialization=False), pickle.dumps({"a": 1})]
    for number in range(300):
        content = bytearray(generator.choice(good) if number % 2 else generator.randbytes(generator.randrange(300)))
        for _ in range(generator.randrange(1, 30) if content else 0):
            content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
        weights = read_or_refuse(path)
        # Where it is read, what was changed was in the padding, or in a number.
        assert weights is None or any(isinstance(value, torch.Tensor) for value in weights.values())


def read_or_refuse(path: Path) -> Mapping[str, object] | None:
    try:
        return read_weights(path)
    except CheckpointError:
        return None


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dead_link(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: None, "cannot be read: No such file or directory"),
        (dead_link, "cannot be read: No such file or directory"),
        (make_pipe, "is not a regular file"),
        (link_to_a_device, "is not a regular file"),
        (Path.mkdir, "is neither a checkpoint nor a folder with checkpoints"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], reason: str, suffix: str
) -> None:
    path = tmp_path / f"file{suffix}"
    make(path)
    with pytest.raises(CheckpointError, match=f"^{path} {reason}"):
        read_weights(path)


@pytest.mark.parametrize("new", [True, False])
def test_no_code_is_run(tmp_path: Path, new: bool) -> None:
    path = tmp_path / "file.pt"
    content = {"weight": torch.zeros(2), "more": Touching(tmp_path / "harm")}
    path.write_bytes(saved(content) if new else pickle.dumps(content))
    with pytest.raises(CheckpointError, match="give a checkpoint"):
        read_weights(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("new", [True, False])
def test_weights_are_read_also_from_inside_of_a_training_scripts_dict(tmp_path: Path, new: bool) -> None:
    path = tmp_path / "file.pt"
    for content in (STATE, {"state_dict": STATE, "epoch": 3}, {"model": STATE}):
        path.write_bytes(saved(content, _use_new_zipfile_serialization=new))
        assert read_weights(path).keys() == STATE.keys()
    (tmp_path / "link.pt").symlink_to(path)
    assert read_weights(tmp_path / "link.pt").keys() == STATE.keys()


def test_a_link_to_a_safetensors_file_is_followed(tmp_path: Path) -> None:
    """As in the cache of Hugging Face's hub."""
    save_file(STATE, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert read_weights(tmp_path / "model.safetensors").keys() == STATE.keys()
