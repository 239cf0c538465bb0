"""A run: one worker's replica and its loop, and around them how workers are launched, saved and evaluated."""
