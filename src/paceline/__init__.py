"""Paceline: one training run, any hardware."""

from __future__ import annotations

from paceline.api.ddp_config import DdpConfig
from paceline.api.dp_train import DpResult, dp_train
from paceline.api.trainer import Trainer
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
from paceline.plan.cadence import Cadence, ElChe
from paceline.plan.steps import Position
from paceline.run.launch import launch
from paceline.run.loop import StepRecord
from paceline.run.report import Report
from paceline.sync.averaging import Averaging

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "Cadence",
    "CommunicationError",
    "CommunicationTimeout",
    "DdpConfig",
    "DpResult",
    "ElChe",
    "Event",
    "GradientError",
    "MisuseError",
    "NonFiniteError",
    "PacelineError",
    "Position",
    "Report",
    "StepRecord",
    "Trainer",
    "WorkerError",
    "World",
    "device_count",
    "devices",
    "dp_train",
    "launch",
]
