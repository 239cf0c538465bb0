"""Additional outputs for metrics: CSV tables, TensorBoard, Weights & Biases, MLflow, Trackio.

`metrics.jsonl` is not among them: every run writes it. The loggers of services import their package when created.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TextIO

from paceline.core.imports import optional
from paceline.observe.best_effort import attempt, describe, warn
from paceline.observe.json_lines import replace_file
from paceline.observe.metrics import flat_items
from paceline.observe.run_files import RunFiles


class Logger(Protocol):
    """Receives a run's metrics on rank 0: `log` repeatedly, then `close` once, also after an error.

    Steps increase; a resumed run continues after the step of its checkpoint. A logger with state that outlives a
    process also has `state_dict`, whose result must be representable as JSON, and `load_state_dict`, which is called
    before the first `log`, if at all.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """Several loggers as one. A logger that raises is disabled with a warning; with `strict` the error is raised.

    Values may be nested (`{"eval": {"loss": 2.0}, "shares": [6, 2]}`): loggers receive numbers under flat names,
    "eval/loss" and "shares/0".
    """

    def __init__(self, loggers: Sequence[Logger], *, strict: bool = False) -> None:
        kinds = [type(logger).__name__ for logger in loggers]
        self._active: dict[str, Any] = {}
        for i, (kind, logger) in enumerate(zip(kinds, loggers, strict=True)):
            self._active[kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}"] = logger
        self._strict = strict

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = dict(flat_items(values))
        for name, logger in list(self._active.items()):
            self._call(name, f"at step {step}", logger.log, step, numbers)

    def close(self) -> None:
        """Safe to call twice."""
        for name, logger in list(self._active.items()):
            self._call(name, "in close()", logger.close)
        self._active.clear()

    def state_dict(self) -> dict[str, Any]:
        stateful = {name: logger for name, logger in self._active.items() if hasattr(logger, "state_dict")}
        states = {name: self._call(name, "in state_dict()", logger.state_dict) for name, logger in stateful.items()}
        return {name: state for name, state in states.items() if name in self._active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loggers without an entry in `state` start from scratch."""
        for name, logger in list(self._active.items()):
            if name in state and hasattr(logger, "load_state_dict"):
                self._call(name, "in load_state_dict()", logger.load_state_dict, state[name])

    def _call(self, name: str, when: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            if self._strict:
                raise
            del self._active[name]
            warn(f"the logger {name} failed {when} and is disabled, training continues: {describe(error)}")


class CsvLogger:
    """One row per logged step, one column per name. A new name adds a column: the file is rewritten and replaced
    atomically.

    start_step: completed steps when the run starts or is resumed; rows of later steps are removed.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        path.touch()
        self._path = path
        self._file = self._rewrite(start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._file.close()
            self._file = self._rewrite(step, new)
        csv.DictWriter(self._file, self._columns, restval="").writerow({**values, "step": step})
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, last_step: int, new: Sequence[str] = ()) -> TextIO:
        """Add columns and remove later rows, and the partial one of a killed process; returns the file to append to.

        Row by row: the table of a long run may be larger than memory.
        """
        with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            old = csv.DictReader(line for line in file if line.endswith("\n"))
            self._columns = [*(old.fieldnames or ["step"]), *new]
            if "step" not in self._columns:
                raise ValueError(
                    f"{self._path} has no column 'step', so CsvLogger did not write it: choose another file"
                )
            as_text: Any = SimpleNamespace(write=str)
            table = csv.DictWriter(as_text, self._columns, restval="", extrasaction="ignore")
            complete = (row for row in old if (row["step"] or "").isdecimal() and None not in row.values())
            rows = (table.writerow(row) for row in complete if int(row["step"]) <= last_step)
            replace_file(self._path, (text.encode() for text in chain([table.writeheader()], rows)))
        return self._path.open("a", newline="", encoding="utf-8")


class TensorBoardLogger:
    """Writes event files for `tensorboard --logdir`. Steps after `start_step` are purged."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        optional("tensorboard", package="tensorboard", extra="tensorboard", user="its logger")
        module = import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=start_step + 1)  # the first purged step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ServiceLogger:
    """Remembers the service's run id, so that another process continues the same service run.

    A resumed run finds it in its checkpoint. A worker that becomes rank 0 has none, but finds a file in the run folder.
    """

    _id: str | None = None
    _id_file: Path | None = None

    def keep_id(self, path: Path, start_step: int) -> None:
        """Keep the id in a file, too. A run that starts at step 0 is a new one and ignores it."""
        self._id_file = path
        if start_step > 0 and path.is_file():
            self._id = path.read_text(errors="replace").strip() or None

    def _set_id(self, run_id: str) -> None:
        self._id = run_id
        if self._id_file is not None:
            with attempt(self._id_file):
                replace_file(self._id_file, f"{run_id}\n".encode())

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"] or self._id


class WandbLogger(_ServiceLogger):
    """Logs to Weights & Biases. The run is created by the first `log`.

    settings: for `wandb.init`, such as project, entity or mode="offline".
    """

    _package = "wandb"
    _resumed_by = "id"  # the service's argument that identifies a run
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._module = optional(self._package, package=self._package, extra=self._package, user="its logger")
        self._settings = {"name": name, "config": dict(config or {}), **self._defaults, **settings}
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            resumed = {} if self._id is None else {self._resumed_by: self._id, "resume": "allow"}
            self._run = self._module.init(**{**self._settings, **resumed})
            self._set_id(getattr(self._run, self._resumed_by))
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is stored. Safe to call twice."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class TrackioLogger(WandbLogger):
    """Logs to Trackio, which has the interface of wandb; its dashboard `trackio show` is local.

    settings: of trackio.init, such as project="stories" (default: "paceline") or space_id.
    """

    _package = "trackio"
    _resumed_by = "name"
    _defaults: ClassVar[dict[str, Any]] = {"project": "paceline"}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with redirect_stdout(sys.stderr):  # it prints, and stdout may show progress
            super().log(step, values)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            super().close()


class MlflowLogger(_ServiceLogger):
    """Logs to MLflow. The run is created by the first `log`.

    config: logged as the run's parameters. tracking_uri, experiment: MLflow's settings of these names.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
    ) -> None:
        module = optional("mlflow", package="mlflow", extra="mlflow", user="its logger")
        self._client = module.MlflowClient(tracking_uri=tracking_uri)
        self._name, self._config, self._experiment = name, dict(config or {}), experiment or "Default"
        self._is_open = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self._is_open:
            self._open()
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._client.set_terminated(self._id)

    def _open(self) -> None:
        if self._id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
            self._set_id(self._client.create_run(str(experiment), run_name=self._name).info.run_id)
            for key, value in self._config.items():
                self._client.log_param(self._id, key, value)
        else:
            self._client.update_run(self._id, status="RUNNING")
        self._is_open = True


_KINDS: dict[str, Any] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}
LOGGER_NAMES = tuple(_KINDS)


def make_logger(
    name: str, files: RunFiles, start_step: int = 0, config: Mapping[str, Any] | None = None, **settings: Any
) -> Logger:
    """A logger for the run in this folder.

    start_step: completed steps when the run starts or is resumed. config: the run's settings, for services that show
    them. settings: the logger's own, such as project="stories" for "wandb".
    """
    if name not in _KINDS:
        nearest = get_close_matches(name, LOGGER_NAMES, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"logger {name!r} is unknown{hint}: choose one of {', '.join(LOGGER_NAMES)}")
    kind, path = _KINDS[name], files.root / ("metrics.csv" if name == "csv" else name)
    is_service = issubclass(kind, _ServiceLogger)
    try:
        made: Logger = kind(files.root.name, config, **settings) if is_service else kind(path, start_step, **settings)
    except TypeError as error:
        raise ValueError(f"logger {name!r} does not take {settings}: {error}") from error
    if isinstance(made, _ServiceLogger):
        made.keep_id(files.root / f"{name}-run-id", start_step)
    return made
