"""Loggers by name, for project files. `metrics.jsonl` is not among them: every run writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from paceline.observe.loggers.base import Logger
from paceline.observe.loggers.csv_table import CsvLogger
from paceline.observe.loggers.services import MlflowLogger, TensorBoardLogger, WandbLogger
from paceline.observe.run_files import RunFiles

_MAKERS: dict[str, Callable[..., Logger]] = {
    "csv": lambda files, step, _, **settings: CsvLogger(files.root / "metrics.csv", step, **settings),
    "tensorboard": lambda files, step, _, **settings: TensorBoardLogger(files.root / "tensorboard", step, **settings),
    "wandb": lambda files, _, config, **settings: WandbLogger(files.root.name, config, **settings),
    "mlflow": lambda files, _, config, **settings: MlflowLogger(files.root.name, config, **settings),
}
LOGGER_NAMES = tuple(_MAKERS)


def make_logger(
    name: str, files: RunFiles, start_step: int = 0, config: Mapping[str, Any] | None = None, **settings: Any
) -> Logger:
    """A logger for the run in this folder.

    start_step: completed steps when the run starts or is resumed. config: the run's settings, for services that show
    them. settings: the logger's own, such as project="stories" for "wandb".
    """
    if name not in _MAKERS:
        nearest = get_close_matches(name, LOGGER_NAMES, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"logger {name!r} is unknown{hint}: choose one of {', '.join(LOGGER_NAMES)}")
    try:
        return _MAKERS[name](files, start_step, config, **settings)
    except TypeError as error:
        raise ValueError(f"logger {name!r} does not take {settings}: {error}") from error
