"""Timelines: recorded during a run, read and exported at any time."""
