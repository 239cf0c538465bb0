"""Paceline: one training run, any hardware."""

from __future__ import annotations

from paceline.api.builder import Builder
from paceline.api.ddp import Ddp
from paceline.api.ddp_config import DdpConfig
from paceline.api.dp_train import DpResult, dp_train
from paceline.api.early_stopping import EarlyStopping
from paceline.api.functional import (
    TrainingHistory,
    prepare_training,
    sync_buffer,
    syncgrads,
    train,
    train_step,
    update,
)
from paceline.api.handle import Handle
from paceline.api.loaders import DataParallelDataLoader
from paceline.api.recipe import TrainedState
from paceline.api.trainer import Trainer
from paceline.checkpoint.errors import CheckpointError
from paceline.core.errors import (
    CommunicationError,
    CommunicationTimeout,
    GradientError,
    MisuseError,
    NonFiniteError,
    PacelineError,
    WorkerError,
)
from paceline.core.events import Event
from paceline.core.world import World, device_count, devices
from paceline.data.array_loader import ArrayLoader
from paceline.data.batches import Batches, PerWorker
from paceline.observe.timeline.timeline import Timeline
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.steps import Position
from paceline.run.by_hand.training_state import TrainingState
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.evaluation.validation import Validation
from paceline.run.launching.launch import launch
from paceline.run.loop import StepRecord
from paceline.run.report import Report
from paceline.run.saving.checkpoints import Checkpoints
from paceline.run.saving.recovery import NoProgressError
from paceline.run.saving.stopping import Stopped
from paceline.sync.averaging import Averaging

__version__ = "0.1.0"

__all__ = [
    "ArrayLoader",
    "Averaging",
    "Batches",
    "Builder",
    "Cadence",
    "CheckpointError",
    "Checkpoints",
    "CommunicationError",
    "CommunicationTimeout",
    "DataParallelDataLoader",
    "Ddp",
    "DdpConfig",
    "DpResult",
    "EarlyStopping",
    "ElChe",
    "EpochMetrics",
    "Event",
    "GradientError",
    "Handle",
    "MisuseError",
    "NoProgressError",
    "NonFiniteError",
    "PacelineError",
    "PerWorker",
    "Position",
    "Report",
    "StepRecord",
    "Stopped",
    "Timeline",
    "TrainedState",
    "Trainer",
    "TrainingHistory",
    "TrainingState",
    "Validation",
    "WorkerError",
    "World",
    "device_count",
    "devices",
    "dp_train",
    "launch",
    "prepare_training",
    "sync_buffer",
    "syncgrads",
    "train",
    "train_step",
    "update",
]
