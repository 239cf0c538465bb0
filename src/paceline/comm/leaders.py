"""Groups over Gloo that can be given up: one worker of each host, or all that read together."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World

# Connections opened in a moment, of which the group's are some.
MAX_OTHERS = 16


class Leaders(ProcessGroupCommunicator):
    """The workers `ranks` of a world, which all workers construct. They are counted by their place in `ranks`.

    An exchange that is under way can be given up, for which Gloo has no call: its connections are shut down.
    """

    is_trusted = False  # Gloo asks nobody who he is

    def __init__(
        self, world: World, timeout_s: float, ranks: Sequence[int], join_timeout_s: float | None = None
    ) -> None:
        before = _sockets()
        super().__init__(world, "gloo", timeout_s, ranks, join_timeout_s)
        self._connections: list[socket.socket] = []
        if world.rank in ranks:
            try:
                self._find_connections(_sockets() - before, ranks.index(world.rank), len(ranks))
            except BaseException:
                self.close()
                raise

    def abort(self) -> None:
        """Every exchange under way is an error, here and on the other hosts, and so are those to come."""
        while self._connections:
            # Another thread may be here as well, and the other side have been first.
            with suppress(IndexError, OSError), self._connections.pop() as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Waits for an exchange that is under way, unless it was aborted."""
        while self._connections:
            self._connections.pop().close()
        super().close()

    def _find_connections(self, opened: set[tuple[int, str]], place: int, size: int) -> None:
        """Those sockets that one of the other leaders has the other end of: no other thread's of this process.

        Behind a translation of addresses there are none; then an exchange ends by its time-out.
        """
        candidates = [c for fd, _ in sorted(opened) if (c := _connection(fd)) is not None]
        try:
            ends = torch.zeros(size, size + MAX_OTHERS, 2, dtype=torch.int64)
            for row, candidate in zip(ends[place], candidates, strict=False):
                row[:] = torch.tensor([candidate.getsockname()[1], candidate.getpeername()[1]])
            self.all_reduce(ends).wait()
            theirs = {(there, here) for i in range(size) if i != place for here, there in ends[i].tolist()}
            for candidate in candidates:
                if (candidate.getsockname()[1], candidate.getpeername()[1]) in theirs:
                    self._connections.append(candidate)
        except OSError as error:
            raise CommunicationError(f"rank {self.world.rank} lost a connection to another host: {error}") from None
        finally:
            for candidate in candidates:
                if candidate not in self._connections:
                    candidate.close()


def _sockets() -> set[tuple[int, str]]:
    """The sockets of this process: file and identity."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since
            if (target := str(path.readlink())).startswith("socket:"):
                found.add((int(path.name), target))
    return found


def _connection(fd: int) -> socket.socket | None:
    """Another handle of this socket, if it is one end of a TCP connection."""
    try:
        connection = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with suppress(OSError):
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            connection.getpeername()
            return connection
    connection.close()
    return None
