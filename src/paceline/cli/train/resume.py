"""`paceline train --resume`: finds the run and its settings, and reports settings that differ now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.folders import MANIFEST_NAME
from paceline.cli.commands import CommandError, choose_run, find_runs
from paceline.cli.config import Project, load_project
from paceline.cli.config.schema import Trainer
from paceline.cli.config.show import one_line, plain
from paceline.cli.train import NEWEST
from paceline.observe import run_files
from paceline.observe.run_files import RunFiles, flat_settings

# In environment.json.
PROJECT_KEY = "project"
MAX_LISTED = 5
# Settings that may differ from one start to the next: they do not change the course of a run.
_FREE = (
    *("workers", "devices", "output", "max_restarts", "min_workers", "stall_s", "loggers"),
    *("checkpoints.resume", "checkpoints.allow", "checkpoints.skip"),
)


def find_run(named: str, output: Path, config_name: str | None) -> tuple[RunFiles, Path | None]:
    """The run to resume, and its checkpoint if one was named.

    named: as `paceline logs list` prints it, a prefix, a folder, a checkpoint, or NEWEST: the newest run of the config.
    """
    checkpoint = None
    if (Path(named) / MANIFEST_NAME).is_file():
        checkpoint = Path(named).absolute()
        files = RunFiles(checkpoint.parent.parent)
        if not files.is_run and not files.config.is_file():
            way = f"start a run from it with checkpoints.resume={checkpoint}"
            raise CommandError(f"--resume {named}: this checkpoint is not in a run's folder: {way}", 2)
    elif named != NEWEST:
        if not output.is_dir() and not Path(named).is_dir():
            raise CommandError(f"--resume {named}: not a run, and not a checkpoint; see `paceline logs list`", 2)
        files = choose_run(named, output)
    else:
        found = find_runs(output) if output.is_dir() else []
        runs = [run for run in found if config_name in (None, run.config_name)]
        if not runs:
            whose = "" if config_name is None else f" of {config_name}"
            raise CommandError(f"--resume: {output} has no run{whose}: start one without --resume", 2)
        files = runs[-1]
    if run_files.state_of(files, run_files.read_status(files)) == "live":
        raise CommandError(f"--resume: {files.root} is running: wait for it, or end it with `paceline runs stop`", 2)
    return run_files.prepare_run_folder(files.root), checkpoint


def own_project(files: RunFiles, overrides: Sequence[str], given: Path | None) -> Project:
    """The project with the settings of the run, except for `overrides`.

    given: the project file of the command line, if any. Python modules and paths are relative to its folder, or to the
    folder of the file that started the run.
    """
    environment = run_files.read_json(files.environment)
    recorded = environment.get(PROJECT_KEY) if isinstance(environment, Mapping) else None
    path = Path(recorded) if given is None and isinstance(recorded, str) else given
    if path is None:
        raise CommandError(f"{files.root.name} does not name its project: give its CONFIG too", 2)
    path, is_given = path.absolute(), given is not None  # then its file has the variables, and the run's has none
    return replace(load_project(files.config, overrides, folder=path.parent, allow_unused=is_given), path=path)


def differences(before: Project, now: Project, given: Project | None) -> Iterator[str]:
    """Sentences about settings of this start, `now`, that differ from the run's, `before`.

    given: the project file of the command line, whose other settings have no effect.
    """
    own, new = flat_settings(plain(before.settings)), flat_settings(plain(now.settings))
    changed = [key for key in new if own.get(key) != new[key] and key not in _FREE]
    if changed:
        yield f"changed for this run: {_listed([f'{key} {_value(own, key)} -> {_value(new, key)}' for key in changed])}"
    ended, ends = (_horizon(project.settings.trainer) for project in (before, now))
    if ended is not None and ends is not None and ended != ends:
        keep = f"trainer.schedule_steps={ended.split()[0] if ended.endswith('steps') else 'N'}"
        yield f"the schedule ends after {ends}, not {ended}: the learning rate differs from here on; {keep} keeps it"
    if given is None:
        return
    theirs = flat_settings(plain(given.settings))
    unused = [key for key in theirs if theirs[key] != new.get(key) and key not in _FREE]
    if unused:
        texts = [f"{key}={_value(theirs, key)} (the run: {_value(new, key)})" for key in unused]
        yield (
            f"the run's own settings are used, which differ from {given.path.name}: {_listed(texts)}; to change one, "
            "give it on the command line"
        )


def _horizon(trainer: Trainer) -> str | None:
    """Where the schedule ends; None if it does not."""
    if trainer.schedule not in ("linear", "cosine"):
        return None
    steps = trainer.schedule_steps or trainer.max_steps
    return f"{trainer.epochs} epochs" if steps is None else f"{steps} steps"


def _value(settings: Mapping[str, Any], key: str) -> str:
    return one_line(settings[key]) if key in settings else "unset"


def _listed(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return ", ".join([*texts[:MAX_LISTED], *more])
