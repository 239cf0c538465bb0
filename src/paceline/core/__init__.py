"""Shared by all layers: world, seeds, errors, events."""
