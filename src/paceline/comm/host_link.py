"""Messages between the workers of one host over Unix sockets: rank 0 is connected to each of the others.

The sockets have abstract names: no file and no port. Any process of the host can connect to rank 0's, so each end asks
the kernel for the user of the other end, and accepts only its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any

import torch

from paceline.comm.rendezvous import Rendezvous, RendezvousPoint
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World

# How often a worker that waits for connections checks whether a peer was lost.
CHECK_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


class HostLink:
    """A `Link` between rank 0 and the other workers of one host. All workers construct it together.

    A transfer that takes longer than `timeout_s` raises `CommunicationTimeout`; None means no limit. `join_timeout_s`
    limits the construction.
    """

    is_trusted = True  # the kernel has confirmed that the peers are processes of this user

    def __init__(
        self, world: World, timeout_s: float | None, join_timeout_s: float, at: RendezvousPoint | None = None
    ) -> None:
        self.world = world
        self._at = at
        self._timeout_s = timeout_s
        self._peers: dict[int, socket.socket] = {}
        try:
            if world.is_main:
                self._accept_all(join_timeout_s)
            else:
                self._connect(join_timeout_s)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            kind = CommunicationTimeout if isinstance(error, TimeoutError) else CommunicationError
            raise kind(f"rank {world.rank} cannot connect to the workers of this host: {error}") from None
        for peer in self._peers.values():
            peer.settimeout(timeout_s)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._transfer(to, f"send to rank {to}", tensor.contiguous(), is_sending=True)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._transfer(source, f"receive from rank {source}", tensor, is_sending=False)

    def abort(self) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()

    def _transfer(self, rank: int, operation: str, tensor: torch.Tensor, *, is_sending: bool) -> None:
        own = self.world.rank
        data: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        try:
            if is_sending:
                self._peers[rank].sendall(data)
            else:
                _receive_into(self._peers[rank], memoryview(data))
        except TimeoutError:
            raise CommunicationTimeout(
                f"rank {own} waited timeout_s={self._timeout_s:g} s in {operation}: rank {rank} hangs, or needs more "
                "time than timeout_s"
            ) from None
        except (OSError, EOFError) as error:
            reason = str(error) or "it closed the connection"
            raise CommunicationError(f"rank {own} lost contact with rank {rank} in {operation}: {reason}") from None

    def _accept_all(self, limit_s: float) -> None:
        """Accept one connection from each worker, each at its own address."""
        deadline_s, name = monotonic() + limit_s, f"paceline-{secrets.token_hex(16)}"
        with ExitStack() as stack:
            listeners = {}
            for rank in range(1, self.world.size):
                listeners[rank] = stack.enter_context(socket.socket(socket.AF_UNIX))
                listeners[rank].bind(f"\0{name}-{rank}")
                listeners[rank].listen()
            Rendezvous(self.world, limit_s, name, self._at)
            for rank, listener in listeners.items():
                while rank not in self._peers:
                    if (connection := self._accept(listener, deadline_s)) is None:
                        continue
                    if _is_own_user(connection):
                        self._peers[rank] = connection
                    else:
                        connection.close()

    def _accept(self, listener: socket.socket, deadline_s: float) -> socket.socket | None:
        """The next connection, or None for now. A worker may have been lost since the rendezvous."""
        left_s = deadline_s - monotonic()
        if self._at is not None:
            self._at.check()
            if left_s > CHECK_S:
                listener.settimeout(CHECK_S)
                with suppress(TimeoutError):
                    return listener.accept()[0]
                return None
        listener.settimeout(max(0.001, left_s))
        return listener.accept()[0]

    def _connect(self, limit_s: float) -> None:
        name = Rendezvous(self.world, limit_s, at=self._at).offers[0]
        connection = self._peers[0] = socket.socket(socket.AF_UNIX)
        connection.settimeout(limit_s)
        connection.connect(f"\0{name}-{self.world.rank}")
        if not _is_own_user(connection):
            raise OSError("the process that answers for rank 0 belongs to another user")


def _is_own_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]
