"""Reports of a run: events, positions, metrics, and the workers' times."""

from paceline.core.events import Event
from paceline.observe.timeline.timeline import Timeline
from paceline.plan.epoch import Position
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.report import Report

__all__ = ["EpochMetrics", "Event", "Position", "Report", "Timeline"]
