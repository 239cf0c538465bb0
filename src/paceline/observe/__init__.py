"""What a run shows: files and lines out, never in the way."""
