"""`Trainer.setup(run="runs")`: a loop of one's own is shown, recorded and controlled as `paceline train` does."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from paceline.comm.messages import decided_by_rank_0
from paceline.core.processes import LAUNCHED_VARIABLE
from paceline.core.settings import check, setting
from paceline.observe import run_files
from paceline.observe.best_effort import attempt
from paceline.observe.environment import describe_environment
from paceline.observe.loggers import LOGGER_NAMES, make_logger
from paceline.observe.run_files import RUNS_FOLDER, RunFiles
from paceline.observe.worker_status import WorkerStatus
from paceline.run.config import RunConfig
from paceline.run.monitor import MainMonitor, Monitor, MonitorSettings
from paceline.run.run import Run
from paceline.run.settings import GROUPS

_PLOT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Recording:
    """Where and how a run is recorded. Each start makes a new folder, named after the script and the time.

    name: the folder's name instead, which a later start continues.
    """

    folder: str | PathLike[str] = setting("folder of the runs", RUNS_FOLDER)
    name: str | None = setting("name of the run's folder; by default, the script's name and the time", None)
    log_every: int = setting("steps between lines of metrics", 10, least=1)
    tokens: bool = setting("show what weight_fn counts as tokens/s", False)
    quiet: bool = setting("show no progress", False)
    loggers: Sequence[str] = setting("further loggers, such as tensorboard or wandb", ())

    def __post_init__(self) -> None:
        if isinstance(self.loggers, str):
            raise ValueError(f"loggers={self.loggers!r}: give a list of names")
        check(self)
        for name in self.loggers:
            if name not in LOGGER_NAMES:
                raise ValueError(f"loggers: {name!r} is unknown: choose from {', '.join(LOGGER_NAMES)}")


class RecordedRun:
    """The outputs of a run, from the first epoch until the trainer is closed.

    Rank 0 has them, and each worker writes its own status. All workers construct it together.
    """

    def __init__(self, recording: Recording, run: Run, total_steps: int | None) -> None:
        self._recording = recording
        self._run = run
        self._outputs = ExitStack()
        self._config = config = _settings_of(run.config)
        settings = MonitorSettings(
            total_steps=total_steps,
            log_every=recording.log_every,
            has_tokens=recording.tokens,
            make_loggers=lambda files, step: [make_logger(name, files, step, config) for name in recording.loggers],
            plot=_plot,
            quiet=recording.quiet,
        )
        self._files = _files_of(recording, run)
        self._monitor = MainMonitor(run, settings, lambda: self._open(settings))
        self._outputs.enter_context(WorkerStatus(self._files, lambda: run.world, lambda: run.loop.position.step))

    def _open(self, settings: MonitorSettings) -> Monitor:
        """On rank 0: at the start, or since the one before was lost."""
        files = self._files
        with attempt(files.config):
            files.config.write_text(json.dumps(self._config, indent=2) + "\n")  # JSON is YAML too
        with attempt(files.environment):
            run_files.write_json(files.environment, describe_environment())
        with self._outputs as outputs:
            outputs.enter_context(run_files.running(files))
            monitor = Monitor(self._run, settings, files, outputs)
            self._outputs = outputs.pop_all()
        monitor.note(f"run {files.root}")
        return monitor

    def log_evaluation(self, values: Mapping[str, float]) -> None:
        self._monitor.after_evaluation(self._run.loop.position.step, {name: float(values[name]) for name in values})

    def close(self, error: BaseException | None) -> None:
        """The run is over: write the remaining records, and how it ended."""
        try:
            if error is None:
                self._monitor.finish()
        finally:
            self._outputs.__exit__(type(error), error, error.__traceback__) if error else self._outputs.close()


def _refuse_running(files: RunFiles) -> None:
    """Another process of this host that writes here would mix its lines with ours. Of other hosts nothing is known."""
    status = run_files.read_status(files)
    if status is None or status.host != socket.gethostname() or status.pid == os.getpid():
        return
    if run_files.state_of(files, status) == "live":
        raise ValueError(
            f"the run {files.root} is running, in process {status.pid}: wait for it, or choose another name"
        )


def _files_of(recording: Recording, run: Run) -> RunFiles:
    """The files of the run. Each host has them: its workers write there."""
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "run"
    folder, name = Path(recording.folder), recording.name

    def decide() -> str:
        if name is None:
            return str(run_files.create_run_folder(folder, script).root)
        _refuse_running(RunFiles(folder / name))
        return str(folder / name)

    if run.rejoining is None:
        return run_files.prepare_run_folder(Path(decided_by_rank_0(decide, run.communicator)))
    # Any worker may become rank 0, and then continues in the same folder. One that joins later cannot ask for its name.
    if name is None:
        launched = datetime.fromtimestamp(float(os.environ[LAUNCHED_VARIABLE]))
        # Another launch may begin in the same second.
        name = f"{script}_{launched:%Y-%m-%d_%H-%M-%S-%f}"[:-3]
    elif run.world.is_main:
        _refuse_running(RunFiles(folder / name))
    return run_files.prepare_run_folder(folder / name)


def _settings_of(config: RunConfig) -> dict[str, Any]:
    """The run's settings as a project file has them."""
    values = {name: value for name, value in vars(config).items() if name not in GROUPS}
    strategy = config.strategy
    values["strategy"] = strategy if isinstance(strategy, str) else {"kind": type(strategy).__name__.lower()}
    for group in GROUPS:
        values |= vars(getattr(config, group))
    plain = (str, int, float, list, tuple, dict)
    return {"trainer": {name: value for name, value in values.items() if isinstance(value, plain)}}


def _plot(files: RunFiles, path: Path) -> str | None:
    """By the command line, whose charts are above this layer."""
    command = [sys.executable, "-m", "paceline", "logs", "plot", str(files.root), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PLOT_TIMEOUT_S)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["unknown"])[-1]
