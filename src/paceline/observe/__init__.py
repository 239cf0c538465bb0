"""Outputs of a run: metrics, events, progress, loggers, timelines. Best effort: their failures do not end a run."""
