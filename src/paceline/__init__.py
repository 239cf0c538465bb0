"""Paceline: one training run, any hardware."""
