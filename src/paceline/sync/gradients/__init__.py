"""The gradients strategy: in every step, the weighted mean of the gradients of all micro-batches, on every worker."""
