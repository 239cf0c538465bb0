"""Saves a run, stops it on request, and resumes it."""
