"""The data that a project file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli.config.factories import Factory
from paceline.cli.config.schema import Arrow, Hf, Images, Tokens
from paceline.core.optional import optional
from paceline.data.sources.arrow import ArrowSource
from paceline.data.sources.images import IMAGENET_MEAN, IMAGENET_STD, ImageFolder
from paceline.data.sources.tokens import TokenFile


def build_data(data: Factory | Tokens | Arrow | Images | Hf, folder: Path) -> Any:
    """The data set, opened; what `Trainer.setup` takes as data. Paths are relative to the folder."""
    match data:
        case Factory():
            return data.build()
        case Tokens():
            return TokenFile(
                _in(folder, data.paths),
                data.length,
                data.dtype,
                data.stride,
                targets=data.targets,
                vocab_size=data.vocab_size,
            )
        case Arrow():
            return ArrowSource(
                _in(folder, data.paths),
                data.columns,
                None if data.transform is None else data.transform.build(),
                max_decoded_bytes=data.max_decoded_bytes,
            )
        case Images():
            mean, std = data.mean or IMAGENET_MEAN, data.std or IMAGENET_STD
            return ImageFolder(folder / data.root, data.size, data.augment, data.classes, mean, std)
        case Hf():
            return _hf(data, folder)


def _hf(data: Hf, folder: Path) -> Any:
    datasets = optional("datasets", package="datasets", extra="hf")
    saved = folder / data.path
    if not (saved / "state.json").is_file() and not (saved / "dataset_dict.json").is_file():
        if data.path.startswith((".", "/")) and not saved.exists():
            raise FileNotFoundError(f"there is no data set at {saved}")
        files = None if data.data_files is None else _in(folder, data.data_files)
        path = str(saved) if saved.exists() else data.path
        return datasets.load_dataset(path, data.name, split=data.split, data_files=files, streaming=data.streaming)
    found = datasets.load_from_disk(str(saved))
    if isinstance(found, dict):
        if data.split not in found:
            raise ValueError(f"{saved} has the splits {', '.join(found)}: choose one with split, not {data.split}")
        found = found[data.split]
    return found.to_iterable_dataset() if data.streaming else found


def _in(folder: Path, paths: str | tuple[str, ...]) -> str | list[str]:
    return str(folder / paths) if isinstance(paths, str) else [str(folder / path) for path in paths]
