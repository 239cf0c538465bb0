"""Saving a run's state so that it survives anything, and reading it back without running code."""
