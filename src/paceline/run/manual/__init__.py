"""Replicas and steps in the user's hands, without the loop."""
