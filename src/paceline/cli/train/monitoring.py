"""The monitor of a run that a project file describes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.trainer import Trainer
from paceline.cli.commands import CommandError
from paceline.cli.config.parts import Part
from paceline.cli.config.schema import Logger, ProjectSettings
from paceline.cli.config.show import plain
from paceline.cli.logs.panels import make_panels
from paceline.cli.logs.picture import check_output, draw, write
from paceline.observe.best_effort import describe, warn
from paceline.observe.loggers import make_logger
from paceline.observe.run_files import RunFiles
from paceline.run.monitor import MainMonitor, Monitor, MonitorSettings

if TYPE_CHECKING:
    from paceline.cli.train.worker import RunRequest


def make_monitor(trainer: Trainer, request: RunRequest, outputs: ExitStack) -> MainMonitor:
    settings, files = request.project.settings, request.files

    def make_loggers(step: int) -> list[Any]:
        made = [_logger(each, settings, files, step) for each in settings.loggers]
        return [logger for logger in made if logger is not None]

    own = MonitorSettings(
        total_steps=total_steps(trainer, settings),
        log_every=settings.trainer.log_every,
        has_tokens=settings.data.weight is not None,
        make_loggers=make_loggers,
        plot=_plot,
    )
    return MainMonitor(trainer, own, lambda: Monitor(trainer, request, outputs, own))


def _plot(files: RunFiles, path: Path) -> str | None:
    try:
        check_output(path)
        write(draw(make_panels([files]), files.root.name), path)
    except CommandError as error:
        return str(error)
    return None


def total_steps(trainer: Trainer, settings: ProjectSettings) -> int | None:
    """Steps of the whole run; None if unknown."""
    epochs, max_steps = settings.trainer.epochs, settings.trainer.max_steps
    limits = [] if max_steps is None else [max_steps]
    if epochs is not None and trainer.steps_per_epoch is not None:
        limits.append(epochs * trainer.steps_per_epoch)
    return min(limits, default=None)


def _logger(setting: Any, settings: ProjectSettings, files: RunFiles, step: int) -> Any:
    """None, after a warning, if its files or its service cannot be reached. Wrong arguments are errors."""
    name = setting if isinstance(setting, str) else setting.name if isinstance(setting, Logger) else setting.target
    try:
        if isinstance(setting, Part):
            return setting.build()
        arguments = (setting.arguments or {}) if isinstance(setting, Logger) else {}
        return make_logger(name, files, step, plain(settings), **arguments)
    except OSError as error:
        warn(f"cannot create the logger {name}, training continues without it: {describe(error)}")
        return None
