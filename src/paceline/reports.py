"""What a run tells about itself: events, positions, metrics, and where the time went."""

from paceline.core.events import Event
from paceline.observe.timeline.timeline import Timeline
from paceline.plan.epoch import Position
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.report import Report

__all__ = ["EpochMetrics", "Event", "Position", "Report", "Timeline"]
