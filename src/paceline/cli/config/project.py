"""A project file, read, merged, resolved and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.cli.config.aliases import TAKEN_IN, without_aliases
from paceline.cli.config.checks import contradictions, resolved
from paceline.cli.config.convert import Conversion
from paceline.cli.config.errors import DEFAULT, ConfigError, Origin, Problem, fail, in_order
from paceline.cli.config.factories import check_names
from paceline.cli.config.fields import is_section, settings_of
from paceline.cli.config.layers import Layers, with_overrides
from paceline.cli.config.schema import Settings
from paceline.cli.config.sources import build_data
from paceline.cli.config.variables import VARIABLES, substitute


@dataclass(frozen=True)
class Project:
    """What to run. `origins` says of every value that was given where, by dotted key; the rest are defaults.

    Paths and modules in the file are relative to `folder`, in which it lies.
    """

    path: Path
    settings: Settings
    origins: Mapping[str, Origin]

    @property
    def folder(self) -> Path:
        return self.path.parent

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, DEFAULT)

    def data(self, part: Literal["train", "evaluation"]) -> Any:
        """The data, opened: what `Trainer.setup` and `Trainer.evaluate` take."""
        key = f"data.{part}"
        try:
            return build_data(getattr(self.settings.data, part), self.folder)
        except ConfigError:
            raise
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise fail(self.origin(key), f"{key}: {error}") from error

    def check_names(self) -> None:
        """Raise `ConfigError` if Python that the settings name is not there, or is no such part. Imports it, and
        calls nothing.
        """
        from paceline.cli.config.callables import check_parts  # which imports torch

        check_names(self.settings)
        check_parts(self.settings)

    def resolve(self, num_workers: int, global_batch: int | None = None) -> Project:
        """The project for so many workers: what was given per worker becomes a global batch.

        `global_batch` is that of the run's first start, where it is resumed: it stays, whoever takes part.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: choose at least 1")
        key = "trainer.micro_batches_per_worker"
        if self.settings.trainer.micro_batches_per_worker is None:
            return self
        trainer = resolved(self.settings.trainer, num_workers)
        if global_batch is not None:
            trainer = replace(trainer, global_batch=global_batch)
        origins = {name: origin for name, origin in self.origins.items() if name != key}
        origins["trainer.global_batch"] = self.origin(key)
        project = Project(self.path, replace(self.settings, trainer=trainer), origins)
        project._check()
        return project

    def _check(self) -> None:
        problems = []
        for key, message in contradictions(self.settings):
            origin = self._nearest_origin(key)
            problems.append(Problem(origin, f"{origin.alias or key} {message}"))
        if problems:
            raise ConfigError(in_order(problems))

    def _nearest_origin(self, key: str) -> Origin:
        """Where a key stands, or what it would be a part of."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins[key]


def load_project(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Project:
    """Read a project file and what it extends. Raises `ConfigError`, with all that is wrong; imports nothing.

    overrides: `key=value` of the command line, such as "trainer.seed=3"; values are YAML. They win over all files.
    environment: what `${env:NAME}` refers to.
    """
    path = Path(path)
    folder = path.absolute().parent  # the process may go elsewhere before a part is built
    sections = [name for name, setting in settings_of(Settings).items() if is_section(setting.type)]
    tree = with_overrides(Layers([*sections, VARIABLES]).read(path), overrides)
    tree, problems = without_aliases(substitute(tree, environment))
    conversion = Conversion(Settings, folder, TAKEN_IN)
    settings = conversion.value(tree, Settings)
    if problems or conversion.problems:
        raise ConfigError(in_order(problems + conversion.problems))
    project = Project(folder / path.name, settings, conversion.origins)
    project._check()
    return project
