"""Writes and reads checkpoints: folders of safetensors and JSON files that become visible when they are complete."""
