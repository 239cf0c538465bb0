"""A run: a worker's replica and loop, and around them launching, saving, evaluation and changes of the workers."""
