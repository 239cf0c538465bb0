"""A run on disk: saving it, stopping it, and going on from where it was."""
