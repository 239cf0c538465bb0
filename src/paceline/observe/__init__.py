"""Outputs of a run: metrics, events, progress, loggers, timelines. Best effort: none of them ends a run."""
