"""Moving tensors between workers."""
