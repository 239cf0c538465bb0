"""Starts workers, on one machine or on several, watches them, and reports the first failure."""
