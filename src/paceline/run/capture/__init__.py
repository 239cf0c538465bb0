"""CUDA graphs: what a step launches is recorded once and replayed, so that the host has hardly anything to do."""
