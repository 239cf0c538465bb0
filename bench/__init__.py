"""Benchmarks: what Paceline costs and gains, measured beside its peers in the same run."""
