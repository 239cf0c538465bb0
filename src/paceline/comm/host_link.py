"""Messages between the workers of one host, over Unix sockets: rank 0 has one to each of the others.

The sockets have no place in the file system and no port. Anybody on the host can connect to rank 0's, so each end asks
the kernel who the other is, and talks only to processes of its own user.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from paceline.comm.rendezvous import meet
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World

_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


class HostLink:
    """A `Link` between the workers of one host, which construct it together. Only rank 0 reaches all others.

    A message that does not come, or does not leave, within `timeout_s` is a `CommunicationTimeout`; None: no limit.
    `join_timeout_s` limits the construction.
    """

    # The kernel vouches for it: whatever comes over this link was sent by this user.
    is_trusted = True

    def __init__(self, world: World, timeout_s: float | None, join_timeout_s: float) -> None:
        self.world = world
        self._timeout_s = timeout_s
        self._peers: dict[int, socket.socket] = {}
        try:
            if world.is_main:
                self._accept_all(join_timeout_s)
            else:
                address = meet(world, join_timeout_s).offers[0]
                self._connect(address, join_timeout_s)
        except OSError as error:
            self.close()
            raise CommunicationError(f"rank {world.rank} cannot reach the others on this host: {error}") from None
        for peer in self._peers.values():
            peer.settimeout(timeout_s)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._exchange(to, f"send to rank {to}", tensor, is_sending=True)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._exchange(source, f"receive from rank {source}", tensor, is_sending=False)

    def abort(self) -> None:
        """A message under way is an error, here and there, and so are those to come. Called by another thread."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        while self._peers:
            self._peers.popitem()[1].close()

    def _exchange(self, rank: int, what: str, tensor: torch.Tensor, *, is_sending: bool) -> None:
        own = self.world.rank
        try:
            if is_sending:
                self._peers[rank].sendall(_memory(tensor.contiguous()))
            else:
                _receive_into(self._peers[rank], _memory(tensor))
        except TimeoutError:
            raise CommunicationTimeout(
                f"rank {own} waited timeout_s={self._timeout_s:g} s in {what}: that rank hangs, or its work takes "
                "longer than the time-out"
            ) from None
        except (OSError, EOFError) as error:
            reason = str(error) or "it closed the connection"
            raise CommunicationError(f"rank {own} lost contact with rank {rank} in {what}: {reason}") from None

    def _accept_all(self, limit_s: float) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            name = f"paceline-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(2 * self.world.size)
            meet(self.world, limit_s, name)
            deadline_s = monotonic() + limit_s
            while missing := self._missing():
                listener.settimeout(max(0.001, deadline_s - monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise CommunicationTimeout(
                        f"rank 0 waited {limit_s:g} s for the connections of ranks {missing}: they hang"
                    ) from None
                self._admit(connection, missing)

    def _admit(self, connection: socket.socket, missing: Sequence[int]) -> None:
        """Keep the connection if it is one of the missing workers'."""
        if _is_own_process(connection):
            connection.settimeout(5.0)
            rank = bytearray(_RANK.size)
            with suppress(OSError, EOFError):
                _receive_into(connection, memoryview(rank))
                (number,) = _RANK.unpack(rank)
                if number in missing:
                    self._peers[number] = connection
                    return
        connection.close()

    def _connect(self, name: str, limit_s: float) -> None:
        connection = socket.socket(socket.AF_UNIX)
        self._peers[0] = connection
        connection.settimeout(limit_s)
        connection.connect(f"\0{name}")
        if not _is_own_process(connection):
            raise OSError("what answers for rank 0 is a process of another user")
        connection.sendall(_RANK.pack(self.world.rank))

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self.world.size) if rank not in self._peers]


def _is_own_process(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _memory(tensor: torch.Tensor) -> memoryview:
    data: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(data)


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise EOFError
        memory = memory[count:]
