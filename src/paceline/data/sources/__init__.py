"""One small interface over what users keep their samples in."""
