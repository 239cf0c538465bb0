"""Who does what: arithmetic only, no torch, no I/O."""
