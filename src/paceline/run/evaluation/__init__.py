"""Collective work besides training: evaluation, prediction, and the exchange of values."""
