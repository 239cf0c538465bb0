"""Optimizer state divided among the workers: each updates its pieces, then all get all weights."""
