"""Exchanges between CPU workers through shared memory.

`segment` is the memory itself, `peers` the other workers of the host, `buffers` how a buffer is summed, `bridge` the
connection to other hosts, and `communicator` puts them together.
"""
