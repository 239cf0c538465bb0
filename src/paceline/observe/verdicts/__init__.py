"""Diagnoses what slows a run down, from its logs: pure functions, and one module that reads a run's folder."""
