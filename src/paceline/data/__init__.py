"""Bringing micro-batches to workers."""
