"""Who takes part in a run, and how a run goes on when that changes.

`generation` is the value that all agree on, `roster` decides on the next one (both are arithmetic), `board` is the
memory through which an agent and its workers tell each other what happens, `member` a worker's view of it all,
`communicator` the exchange that a change interrupts, and `rejoining` what a worker does then.
"""
