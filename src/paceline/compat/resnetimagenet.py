"""ResNetImageNet.jl: training step by step with replicas of one process, and the loader that feeds them."""

from paceline.api.functional import (
    TrainingHistory,
    prepare_training,
    sync_buffer,
    syncgrads,
    train,
    train_step,
    update,
)
from paceline.api.loaders import DataParallelDataLoader
from paceline.run.evaluation.validation import Validation
from paceline.run.manual.training_state import TrainingState

__all__ = [
    "DataParallelDataLoader",
    "TrainingHistory",
    "TrainingState",
    "Validation",
    "prepare_training",
    "sync_buffer",
    "syncgrads",
    "train",
    "train_step",
    "update",
]
