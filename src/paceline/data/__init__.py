"""Reading data: sources of samples, and feeds that deliver micro-batches to workers."""
