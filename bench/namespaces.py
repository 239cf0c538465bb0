"""Hosts on one machine: network namespaces joined by links of limited speed, for as long as a `with` block.

Two hosts have one link. More of them have a link each to a switch, which is one more namespace.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NUM_HOSTS = 2

FOLDER = Path("/run/netns")  # where `ip netns` keeps its names
INTERFACE = "paceline0"
ADDRESSES = tuple(f"10.0.0.{number + 1}" for number in range(16))
BRIDGE = "switch"
PORT = 29500  # nobody else can have it: the namespaces are new
MAX_BURST_BYTES = 128 * 1024  # may pass at once: two of TCP's largest packets
BURST_S = 0.05  # of the link's time, where that is less
UNLIMITED_MBIT = 40_000  # a limit that is never reached
LATENCY_MS = 400  # may wait: more than TCP has on its way, so that nothing is dropped and sent again

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Link:
    """Namespaces and the links between them. A value: whoever knows it may join a host or change the limit."""

    namespaces: tuple[str, ...]
    switch: str | None = None

    def join(self, host: int, local_rank: int = 0, local_size: int = 1) -> None:
        """Move this process to a host, as one of its workers: the environment is what torchrun would give it there.

        Threads stay where they were started, so join before anything that talks to the network.
        """
        _enter(self.namespaces[host])
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a store that was out there; rank 0 opens one in here
        os.environ.update(
            RANK=str(host * local_size + local_rank),
            WORLD_SIZE=str(len(self.namespaces) * local_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            MASTER_ADDR=ADDRESSES[0],
            MASTER_PORT=str(PORT),
            GLOO_SOCKET_IFNAME=INTERFACE,
        )

    def limit(self, mbit_per_s: float | None) -> None:
        """Let so much pass in each direction, from now on, also of what waits already; None: as much as it can."""
        mbit_per_s = mbit_per_s or UNLIMITED_MBIT
        burst = min(MAX_BURST_BYTES, max(16 * 1024, round(1e6 / 8 * mbit_per_s * BURST_S)))
        rate = ("rate", f"{mbit_per_s}mbit", "burst", f"{burst}b", "latency", f"{LATENCY_MS}ms")
        ends = [(name, INTERFACE) for name in self.namespaces]
        if self.switch is not None:
            ends += [(self.switch, f"port{number}") for number in range(len(self.namespaces))]
        for name, interface in ends:
            _run("tc", "-netns", name, "qdisc", "replace", "dev", interface, "root", "tbf", *rate)


@contextmanager
def slow_link(mbit_per_s: float | None, num_hosts: int = NUM_HOSTS) -> Iterator[Link]:
    """New hosts with this limit between them. At the end all are gone, once the last process in them has ended."""
    suffix = f"{os.getpid()}-{secrets.token_hex(4)}"
    hosts = tuple(f"paceline-bench-{suffix}-{rank}" for rank in range(num_hosts))
    switch = f"paceline-bench-{suffix}-switch" if num_hosts > NUM_HOSTS else None
    names = (*hosts, *([] if switch is None else [switch]))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _connect(hosts, switch)
        for name, address in zip(hosts, ADDRESSES, strict=False):
            _run("ip", "-netns", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-netns", name, "link", "set", interface, "up")
        link = Link(hosts, switch)
        link.limit(mbit_per_s)
        yield link
    finally:
        with _signals_deferred():
            for name in names:
                if (FOLDER / name).exists():
                    _run("ip", "netns", "delete", name)


def _connect(hosts: Sequence[str], switch: str | None) -> None:
    if switch is None:
        first, second = hosts
        peer = ("peer", "name", INTERFACE, "netns", second)
        _run("ip", "link", "add", "name", INTERFACE, "netns", first, "type", "veth", *peer)
        return
    _run("ip", "-netns", switch, "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "-netns", switch, "link", "set", BRIDGE, "up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        peer = ("peer", "name", port, "netns", switch)
        _run("ip", "link", "add", "name", INTERFACE, "netns", host, "type", "veth", *peer)
        _run("ip", "-netns", switch, "link", "set", port, "master", BRIDGE, "up")


def missing_slow_link() -> str | None:
    """Why there cannot be a slow link here; None if there can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command `{command}` is missing: install iproute2 (Debian, Ubuntu: apt-get install -y iproute2)"
    try:
        with slow_link(100):
            return None
    except OSError as error:
        return f"network namespaces with a limited link cannot be made; they take root and the kernel's tbf: {error}"


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with (FOLDER / namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(FOLDER / namespace))


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Ctrl-C and termination take effect at the end."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda received, _: arrived.append(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in arrived:
            signal.raise_signal(received)


def _run(*command: str) -> None:
    # In a session of its own, where the terminal's Ctrl-C does not reach it: what it does, it does wholly.
    result = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if result.returncode != 0:
        raise OSError(f"`{' '.join(command)}`: {result.stderr.strip()}")
