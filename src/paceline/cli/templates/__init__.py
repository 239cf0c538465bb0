"""The files that `paceline init` writes. They are copied, not imported."""
