"""The gradients strategy: every step, the weighted mean of all micro-batches' gradients, on every worker."""
