"""flodl: the builder and its handle, `DdpConfig` for `Trainer.setup_with`, and El Che."""

from paceline.api.builder import Builder
from paceline.api.builder_worker import TrainedState
from paceline.api.ddp import Ddp
from paceline.api.ddp_config import DdpConfig
from paceline.api.handle import Handle
from paceline.api.trainer import Trainer
from paceline.plan.cadence import ElChe
from paceline.run.epoch_metrics import EpochMetrics

__all__ = ["Builder", "Ddp", "DdpConfig", "ElChe", "EpochMetrics", "Handle", "TrainedState", "Trainer"]
