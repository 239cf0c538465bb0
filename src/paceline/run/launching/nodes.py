"""On which machines a launch runs, and the store where their launchers meet."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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

_LOOPBACK = "127.0.0.1"


class NodesError(PacelineError):
    """The nodes of a launch did not come together."""


@dataclass(frozen=True)
class Nodes:
    """How many machines take part, and where they meet: at `HOST:PORT`, HOST being one of them. Default: this one.

    `secret_file` holds what all of them know and nobody else; see `core.secret` for where else it may be.
    """

    num: int = 1
    address: str | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    secret_file: str | None = None

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"nodes={self.num}: choose an integer >= 1")
        if self.num > 1 and self.address is None:
            raise ValueError(f"nodes={self.num} need a place to meet: give address HOST:PORT, the same on every node")
        if self.num == 1 and self.address is not None:
            raise ValueError(f"address={self.address!r} is for several nodes: choose nodes >= 2, or leave it out")
        if self.address is not None and not _is_place(self.address):
            raise ValueError(
                f"address={self.address!r}: choose HOST:PORT, HOST being one of the nodes, PORT free there"
            )
        if not self.join_timeout_s > 0:
            raise ValueError(f"join_timeout={self.join_timeout_s:g}: choose seconds > 0")
        if self.num == 1 and self.secret_file is not None:
            raise ValueError(
                f"secret_file={self.secret_file!r} is for several nodes: leave it out, the workers of one node get a "
                "secret of their own"
            )
        self.secret()

    def secret(self) -> Secret | None:
        """What the launchers of several nodes know each other by."""
        if self.num == 1:
            return None
        return run_secret() if self.secret_file is None else read_secret(Path(self.secret_file))

    @property
    def place(self) -> tuple[str, int]:
        """Host and port; port 0 stands for any that is free."""
        if self.address is None:
            return _LOOPBACK, 0
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


ALONE = Nodes()


def _is_place(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


@dataclass(frozen=True)
class Opened:
    """The store of the meeting: on this node (`is_here`), or reached from it. `own_address` is how it was reached."""

    store: TCPStore
    is_here: bool
    own_address: str


def open_store(nodes: Nodes) -> Opened:
    """Open the store on the node whose address it is; connect to it on the others, as soon as it is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = nodes.place
    timeout = timedelta(seconds=nodes.join_timeout_s)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while True:
        try:
            if own := _own_address(host):
                with suppress(RuntimeError, _PortTaken):  # by another launcher of this run, or by somebody else
                    return Opened(_listen(own, port, timeout), True, own)
            with socket.create_connection((host, port), timeout=1.0) as connection:
                own = connection.getsockname()[0]
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise NodesError(
                    f"nobody answers at {nodes.address} within join_timeout={nodes.join_timeout_s:g} s ({error}): "
                    "start the same command on that node too, and see that its port can be reached"
                ) from None
            time.sleep(RETRY_S)
    try:
        return Opened(_within(deadline_s, lambda: TCPStore(host, port, timeout=timeout)), False, own)
    except (RuntimeError, TimeoutError):
        raise NodesError(
            f"what listens at {nodes.address} does not answer like a launcher: choose another port, the same on every "
            "node"
        ) from None


class _PortTaken(Exception):
    pass


def _listen(own_address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens at this address, where torch by itself would listen at all that the machine has."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
    try:
        listener = socket.create_server((own_address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _PortTaken from None
    return TCPStore(
        own_address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _within(deadline_s: float, connect: Callable[[], TCPStore]) -> TCPStore:
    """What `connect` returns. It runs in a thread: torch waits for any listener without end or interruption."""
    result: Future[TCPStore] = Future()

    def run() -> None:
        try:
            result.set_result(connect())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="paceline-connect", daemon=True).start()
    return result.result(max(1.0, deadline_s - time.monotonic()))


def _own_address(host: str) -> str:
    """The address behind this name if it is one of this machine's, else nothing: only its own can be bound."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return ""


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if it cannot be told."""
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket.fileno(), siocgifaddr, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
