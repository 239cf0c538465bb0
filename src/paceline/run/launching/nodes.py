"""On which machines a launch runs, and the store through which their launchers communicate."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.core.secret import Secret, read_secret, run_secret

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

DEFAULT_JOIN_TIMEOUT_S = 300.0
RETRY_S = 0.2


class NodesError(PacelineError):
    """The nodes of a launch could not connect to each other."""


@dataclass(frozen=True)
class Nodes:
    """The number of machines, and the address `HOST:PORT` of their rendezvous; HOST is one of them. Default: this one.

    `secret_file` holds a secret that all nodes share; see `core.secret` for the variables that can replace it.
    """

    num: int = 1
    address: str | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    secret_file: str | None = None

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"nodes={self.num}: choose an integer >= 1")
        if self.num > 1 and self.address is None:
            raise ValueError(f"nodes={self.num} requires an address: set address HOST:PORT, the same on every node")
        if self.num == 1 and self.address is not None:
            raise ValueError(f"address={self.address!r} requires several nodes: choose nodes >= 2, or omit it")
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise ValueError(
                    f"address={self.address!r}: choose HOST:PORT, where HOST is one of the nodes and PORT is free there"
                )
        if not self.join_timeout_s > 0:
            raise ValueError(f"join_timeout={self.join_timeout_s:g}: choose seconds > 0")
        if self.num == 1 and self.secret_file is not None:
            raise ValueError(
                f"secret_file={self.secret_file!r} requires several nodes: omit it, the workers of one node get a "
                "secret automatically"
            )
        self.secret()

    def secret(self) -> Secret | None:
        """The secret with which the launchers of several nodes sign their messages."""
        if self.num == 1:
            return None
        return run_secret() if self.secret_file is None else read_secret(Path(self.secret_file))

    @property
    def host_and_port(self) -> tuple[str, int]:
        assert self.address is not None
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


SINGLE_NODE = Nodes()


def open_store(nodes: Nodes) -> tuple[TCPStore, bool, str]:
    """Open the store on the node that has the address, and connect to it from the others, as soon as it is up.

    Returns the store, whether this node hosts it, and this node's own address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = nodes.host_and_port
    timeout = timedelta(seconds=nodes.join_timeout_s)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while True:
        try:
            if (listener := _listen(host, port)) is not None:
                own_address = listener.getsockname()[0]
                store = TCPStore(
                    own_address, port, is_master=True, timeout=timeout, wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )  # fmt: skip
                return store, True, own_address
            with socket.create_connection((host, port), timeout=1.0) as connection:
                own_address = connection.getsockname()[0]
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise NodesError(
                    f"no answer from {nodes.address} within join_timeout={nodes.join_timeout_s:g} s ({error}): "
                    "start the same command on that node, and check that its port can be reached"
                ) from None
            time.sleep(RETRY_S)
    connected: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError):
            connected.append(TCPStore(host, port, timeout=timeout))

    # In a thread: torch waits for the reply of any listener, without a timeout or interruption.
    thread = threading.Thread(target=connect, name="paceline-connect", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline_s - time.monotonic()))
    if not connected:
        raise NodesError(
            f"the server at {nodes.address} is not a launcher: choose another port, the same on every node"
        )
    return connected[0], False, own_address


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen at this address alone (torch would listen at all addresses); None if it is not ours, or is in use."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with suppress(OSError):
            return socket.create_server(address[:2], family=family)
    return None


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, or None."""
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket.fileno(), siocgifaddr, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
