"""Metrics for TensorBoard, Weights & Biases and MLflow. Their packages are imported only when one is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core.optional import optional


class TensorBoardLogger:
    """Event files in `folder`, which `tensorboard --logdir` shows. Steps behind `start_step` are purged."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        optional("tensorboard", package="tensorboard", extra="tensorboard", user="its logger")
        module = import_module("torch.utils.tensorboard")
        # purge_step is the first step that does not count any more.
        self._writer = module.SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, begun with the first numbers; one that is resumed goes on in the same.

    settings: for `wandb.init`, such as project, entity or mode="offline".
    """

    def __init__(self, name: str, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._module = optional("wandb", package="wandb", extra="wandb", user="its logger")
        self._settings = {"name": name, "config": dict(config or {}), **settings}
        self._run: Any = None
        self._id: str | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            resumed = {} if self._id is None else {"id": self._id, "resume": "allow"}
            self._run = self._module.init(**self._settings, **resumed)
            self._id = self._run.id
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


class MlflowLogger:
    """A run of MLflow, begun with the first numbers; one that is resumed goes on in the same.

    config: logged as the run's parameters. tracking_uri, experiment: as MLflow takes them (default: its own).
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
        self._name, self._config, self._experiment = name, dict(config or {}), experiment
        self._id: str | None = None
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

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]

    def _open(self) -> None:
        if self._id is None:
            self._id = self._client.create_run(self._experiment_id(), run_name=self._name).info.run_id
            for key, value in self._config.items():
                self._client.log_param(self._id, key, value)
        else:
            self._client.update_run(self._id, status="RUNNING")
        self._is_open = True

    def _experiment_id(self) -> str:
        name = self._experiment or "Default"
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)
