"""CUDA graphs: the kernels of a step are recorded once and replayed, which takes almost no time on the host."""
