"""Paceline: one training run, any hardware.

A name is imported from its module when it is first used, so that `paceline run` can start the workers' process before
it imports torch itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOMES = {
    "ArrayLoader": "paceline.data.array_loader",
    "Averaging": "paceline.sync.averaging.strategy",
    "Batches": "paceline.data.sources.batches",
    "Builder": "paceline.api.builder",
    "Cadence": "paceline.plan.cadence",
    "CheckpointError": "paceline.checkpoint.errors",
    "Checkpoints": "paceline.run.saving.options",
    "CommunicationError": "paceline.core.errors",
    "CommunicationTimeout": "paceline.core.errors",
    "DataParallelDataLoader": "paceline.api.loaders",
    "Ddp": "paceline.api.ddp",
    "DdpConfig": "paceline.api.ddp_config",
    "DpResult": "paceline.api.dp_train",
    "EarlyStopping": "paceline.api.early_stopping",
    "ElChe": "paceline.plan.cadence",
    "EpochMetrics": "paceline.run.epoch_metrics",
    "Event": "paceline.core.events",
    "GradientError": "paceline.core.errors",
    "Handle": "paceline.api.handle",
    "MisuseError": "paceline.core.errors",
    "NoProgressError": "paceline.run.saving.resuming",
    "NonFiniteError": "paceline.core.errors",
    "PacelineError": "paceline.core.errors",
    "PerWorker": "paceline.data.sources.batches",
    "Position": "paceline.plan.steps",
    "Report": "paceline.run.report",
    "StepRecord": "paceline.run.step.loop",
    "Stopped": "paceline.run.saving.stopping",
    "Timeline": "paceline.observe.timeline.timeline",
    "TrainedState": "paceline.api.builder_worker",
    "Trainer": "paceline.api.trainer",
    "TrainingHistory": "paceline.api.functional",
    "TrainingState": "paceline.run.manual.training_state",
    "Validation": "paceline.run.evaluation.validation",
    "WorkerError": "paceline.core.errors",
    "World": "paceline.core.world",
    "device_count": "paceline.core.world",
    "devices": "paceline.core.world",
    "dp_train": "paceline.api.dp_train",
    "launch": "paceline.run.launching.launch",
    "prepare_training": "paceline.api.functional",
    "sync_buffer": "paceline.api.functional",
    "syncgrads": "paceline.api.functional",
    "train": "paceline.api.functional",
    "train_step": "paceline.api.functional",
    "update": "paceline.api.functional",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    # The table once more, for type checkers and editors: they do not run the function below.
    from paceline.api.builder import Builder as Builder
    from paceline.api.builder_worker import TrainedState as TrainedState
    from paceline.api.ddp import Ddp as Ddp
    from paceline.api.ddp_config import DdpConfig as DdpConfig
    from paceline.api.dp_train import DpResult as DpResult
    from paceline.api.dp_train import dp_train as dp_train
    from paceline.api.early_stopping import EarlyStopping as EarlyStopping
    from paceline.api.functional import TrainingHistory as TrainingHistory
    from paceline.api.functional import prepare_training as prepare_training
    from paceline.api.functional import sync_buffer as sync_buffer
    from paceline.api.functional import syncgrads as syncgrads
    from paceline.api.functional import train as train
    from paceline.api.functional import train_step as train_step
    from paceline.api.functional import update as update
    from paceline.api.handle import Handle as Handle
    from paceline.api.loaders import DataParallelDataLoader as DataParallelDataLoader
    from paceline.api.trainer import Trainer as Trainer
    from paceline.checkpoint.errors import CheckpointError as CheckpointError
    from paceline.core.errors import CommunicationError as CommunicationError
    from paceline.core.errors import CommunicationTimeout as CommunicationTimeout
    from paceline.core.errors import GradientError as GradientError
    from paceline.core.errors import MisuseError as MisuseError
    from paceline.core.errors import NonFiniteError as NonFiniteError
    from paceline.core.errors import PacelineError as PacelineError
    from paceline.core.errors import WorkerError as WorkerError
    from paceline.core.events import Event as Event
    from paceline.core.world import World as World
    from paceline.core.world import device_count as device_count
    from paceline.core.world import devices as devices
    from paceline.data.array_loader import ArrayLoader as ArrayLoader
    from paceline.data.sources.batches import Batches as Batches
    from paceline.data.sources.batches import PerWorker as PerWorker
    from paceline.observe.timeline.timeline import Timeline as Timeline
    from paceline.plan.cadence import Cadence as Cadence
    from paceline.plan.cadence import ElChe as ElChe
    from paceline.plan.steps import Position as Position
    from paceline.run.epoch_metrics import EpochMetrics as EpochMetrics
    from paceline.run.evaluation.validation import Validation as Validation
    from paceline.run.launching.launch import launch as launch
    from paceline.run.manual.training_state import TrainingState as TrainingState
    from paceline.run.report import Report as Report
    from paceline.run.saving.options import Checkpoints as Checkpoints
    from paceline.run.saving.resuming import NoProgressError as NoProgressError
    from paceline.run.saving.stopping import Stopped as Stopped
    from paceline.run.step.loop import StepRecord as StepRecord
    from paceline.sync.averaging.strategy import Averaging as Averaging
else:

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
