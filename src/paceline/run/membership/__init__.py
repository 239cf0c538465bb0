"""The members of a run, and how a run continues when they change.

`generation` is the value that all agree on, and `roster` decides on the next one; both are arithmetic. `board` is the
memory that an agent shares with its workers, and `member` a worker's view of the generations. `communicator` is the
exchange that a change interrupts, and `rejoining` brings a worker into the next generation.
"""
