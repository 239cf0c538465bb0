"""ggmlR: `dp_train` and the functions around it."""

from paceline.api.dp_train import DpResult, dp_train
from paceline.core.world import device_count, devices
from paceline.data.array_loader import ArrayLoader

__all__ = ["ArrayLoader", "DpResult", "device_count", "devices", "dp_train"]
