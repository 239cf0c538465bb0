"""The monitor of a run that a project file describes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from paceline.run.run import Run

if TYPE_CHECKING:
    from paceline.cli.train.worker import RunRequest


def make_monitor(run: Run, request: RunRequest, outputs: ExitStack) -> MainMonitor:
    settings = request.project.settings

    def make_loggers(files: RunFiles, step: int) -> list[Any]:
        made = [_logger(each, settings, files, step) for each in settings.loggers]
        return [logger for logger in made if logger is not None]

    own = MonitorSettings(
        total_steps=run.total_steps(settings.trainer.epochs, settings.trainer.max_steps),
        log_every=settings.trainer.log_every,
        has_tokens=settings.data.weight is not None,
        make_loggers=make_loggers,
        plot=_plot,
        quiet=request.quiet,
        is_resumed=request.is_resumed,
        live_file=request.live_file,
    )
    return MainMonitor(run, own, lambda: Monitor(run, own, request.files, outputs))


def _plot(files: RunFiles, path: Path) -> str | None:
    try:
        check_output(path)
        write(draw(make_panels([files]), files.root.name), path)
    except CommandError as error:
        return str(error)
    return None


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
