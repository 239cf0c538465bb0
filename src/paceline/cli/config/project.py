"""A project file: read, merged, validated and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.cli.config.aliases import translate_aliases
from paceline.cli.config.checks import contradictions, resolved
from paceline.cli.config.errors import DEFAULT, ConfigError, Origin, fail
from paceline.cli.config.layers import VARIABLES, read_layers, substitute, with_overrides
from paceline.cli.config.parts import check_parts
from paceline.cli.config.schema import ProjectSettings, top_sections
from paceline.cli.config.trainer_setup import build_data


@dataclass(frozen=True)
class Project:
    """A run's settings. origins: the place of every given value by dotted key; other values are defaults.

    Paths and modules in the file are relative to `folder`.
    """

    path: Path
    settings: ProjectSettings
    origins: Mapping[str, Origin]

    @property
    def folder(self) -> Path:
        return self.path.parent

    def origin(self, key: str) -> Origin:
        if key not in self.origins and key.endswith(".kind"):  # `strategy: cadence` is `strategy: {kind: cadence}`
            key = key.removesuffix(".kind")
        return self.origins.get(key, DEFAULT)

    def data(self, part: Literal["train", "evaluation"]) -> Any:
        """The opened data, as `Trainer.setup` and `Trainer.evaluate` take it."""
        key = f"data.{part}"
        try:
            return build_data(getattr(self.settings.data, part), self.folder)
        except ConfigError:
            raise
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise fail(self.origin(key), f"{key}: {error}") from error

    def check_parts(self) -> None:
        """Raise `ConfigError` if a named Python object does not exist or cannot be used. Imports; calls nothing."""
        check_parts(self.settings)

    def resolve(self, num_workers: int, global_batch: int | None = None) -> Project:
        """The project for this number of workers: a batch per worker becomes a global batch.

        global_batch: of the run's first start, which a resumed run keeps on any number of workers.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be >= 1")
        key = "trainer.micro_batches_per_worker"
        if self.settings.trainer.micro_batches_per_worker is None:
            return self
        trainer = resolved(self.settings.trainer, num_workers, global_batch)
        origins = {name: origin for name, origin in self.origins.items() if name != key}
        origins["trainer.global_batch"] = self.origin(key)
        project = Project(self.path, replace(self.settings, trainer=trainer), origins)
        project.check()
        return project

    def check(self) -> None:
        """Raise `ConfigError` for settings that contradict one another."""
        problems = []
        for key, message in contradictions(self.settings):
            place = key
            while place not in self.origins:  # then the section's
                place = place.rpartition(".")[0]
            origin = self.origins[place]
            problems.append((origin, f"{origin.alias or key} {message}"))
        if problems:
            raise ConfigError(problems)


def load_project(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    *,
    allow_unused: bool = False,
) -> Project:
    """Read a project file and the files it extends. Raises `ConfigError` with all problems; imports no parts.

    overrides: settings such as "trainer.seed=3", with YAML values. They override all files.
    environment: the variables that `${env:NAME}` refers to.
    folder: what paths are relative to; default: the file's own.
    allow_unused: variables among the overrides that nothing refers to are no error.
    """
    from paceline.cli.config.validate import Validation  # imports pydantic

    path = Path(path)
    folder = folder or path.absolute().parent  # the current folder may change before a part is built
    tree = with_overrides(read_layers(path, [*top_sections(), VARIABLES]), overrides)
    tree, problems = translate_aliases(substitute(tree, environment, allow_unused=allow_unused))
    validation = Validation(folder, problems)
    settings = validation.validate(tree)
    if settings is None:
        raise ConfigError(problems)
    project = Project(folder / path.name, settings, validation.origins)
    project.check()
    return project
