"""Who takes part in a run, and how a run goes on when that changes.

`generation` is the value that all agree on, `roster` the agent's decision, `member` a worker's view of it,
`communicator` the exchange that a change interrupts, and `rejoining` what a worker does then.
"""
