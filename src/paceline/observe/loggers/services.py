"""Loggers for TensorBoard, Weights & Biases and MLflow. Each imports its package when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core.optional import optional


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
    """Remembers the service's run id in checkpoints, so that a resumed run continues the same service run."""

    _id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


class WandbLogger(_ServiceLogger):
    """Logs to Weights & Biases. The run is created by the first `log`.

    settings: for `wandb.init`, such as project, entity or mode="offline".
    """

    def __init__(self, name: str, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._module = optional("wandb", package="wandb", extra="wandb", user="its logger")
        self._settings = {"name": name, "config": dict(config or {}), **settings}
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            resumed = {} if self._id is None else {"id": self._id, "resume": "allow"}
            self._run = self._module.init(**self._settings, **resumed)
            self._id = self._run.id
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


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
            self._id = self._client.create_run(str(experiment), run_name=self._name).info.run_id
            for key, value in self._config.items():
                self._client.log_param(self._id, key, value)
        else:
            self._client.update_run(self._id, status="RUNNING")
        self._is_open = True
