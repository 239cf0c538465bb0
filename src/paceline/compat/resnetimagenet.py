"""ResNetImageNet.jl: training step by step with replicas of one process, and the loader that feeds them."""

from paceline.run.manual.functional import (
    TrainingHistory,
    Validation,
    sync_buffer,
    syncgrads,
    train,
    train_step,
    update,
)
from paceline.run.manual.step_loader import DataParallelDataLoader
from paceline.run.manual.training_state import TrainingState, prepare_training

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
