"""The nodes of a launch: how their agents find each other, and, if their number is fixed, how they decide together."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.notice import notice
from paceline.core.secret import FILE_VARIABLE, Secret, read_secret, run_secret
from paceline.run.launching.heartbeats import HEARTBEAT_S, Heartbeats, Record
from paceline.run.launching.worker_exit import ExitKind, WorkerExit, first_failure

DEFAULT_JOIN_TIMEOUT_S = 300.0
LOST_S = 10.0  # without a heartbeat: the node is down, or the link to it
POLL_S = 0.02


class NodesError(PacelineError):
    """The nodes of a launch could not connect to each other."""


@dataclass(frozen=True)
class Nodes:
    """The number of nodes, and the address `HOST:PORT` of their rendezvous; HOST is one of them. Default: one node.

    With `max_num`, nodes may come and go: the run starts with `num` of them, and up to `max_num` take part.
    `secret_file` holds a secret that all nodes share; see `core.secret` for the variables that can replace it.
    """

    num: int = 1
    address: str | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    secret_file: str | None = None
    max_num: int = 0  # 0: exactly `num`

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"nodes={self.num}: choose an integer >= 1")
        if self.max_num and self.max_num < self.num:
            raise ValueError(f"nodes={self.num}:{self.max_num}: the maximum must be >= the minimum")
        if self.are_several and self.address is None:
            raise ValueError(f"nodes={self.num} requires an address: set address HOST:PORT, the same on every node")
        if not self.are_several and self.address is not None:
            raise ValueError(f"address={self.address!r} requires several nodes: choose nodes >= 2, or omit it")
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 2**16):
                raise ValueError(
                    f"address={self.address!r}: choose HOST:PORT, where HOST is one of the nodes and PORT is free there"
                )
        if not self.join_timeout_s > 0:
            raise ValueError(f"join_timeout={self.join_timeout_s:g}: choose seconds > 0")
        if not self.are_several and self.secret_file is not None:
            raise ValueError(
                f"secret_file={self.secret_file!r} requires several nodes: omit it, the workers of one node get a "
                "secret automatically"
            )
        self.secret()

    def secret(self) -> Secret | None:
        """The secret with which the launchers of several nodes sign their messages."""
        if not self.are_several:
            return None
        return run_secret() if self.secret_file is None else read_secret(Path(self.secret_file))

    @property
    def are_several(self) -> bool:
        return max(self.num, self.max_num) > 1

    @property
    def host_and_port(self) -> tuple[str, int]:
        assert self.address is not None
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


SINGLE_NODE = Nodes()


class NodeRendezvous:
    """All nodes of a launch, or this one alone. The constructor waits until all have joined, or raises `NodesError`.

    All nodes make the same decisions (to start, to restart, to end), since each decides from the records of all. Ranks
    are numbered node by node, starting at the node with the address. `options` must be equal on all nodes. Of the
    methods only `wait_for_results` and `close` wait for other nodes, each with a time limit.
    """

    has_others = False  # the run cannot continue without this node

    def __init__(self, nodes: Nodes, num_workers: int, run_id: str, options: Mapping[str, Any]) -> None:
        deadline_s = time.monotonic() + nodes.join_timeout_s
        self._nodes, self.num_nodes = nodes, nodes.num
        self._hosts_store, self.index, self.name = True, 0, socket.gethostname()
        self.environment: dict[str, str] = {}  # variables with which workers of several nodes connect
        self.num_restarts = 0  # incremented by the agent: the current start, to which results belong
        store = self._open_store() if nodes.num > 1 else None
        own = Record(name=self.name, num_workers=num_workers, options=options, run_id=run_id)
        self._heartbeats = Heartbeats(
            store, self.index, own, lost_s=LOST_S, hosts_store=self._hosts_store, count_nodes=lambda: nodes.num
        )
        try:
            wait_for_nodes(
                nodes, self._heartbeats, self.lost, lambda: len(self._heartbeats.records) == nodes.num, deadline_s
            )
        except BaseException:
            self.close()
            raise
        records = self._heartbeats.records
        sizes = [record.num_workers for record in records.values()]
        self.run_id = records[0].run_id
        self.num_workers, self.num_workers_here = sum(sizes), num_workers
        self.first_rank = sum(sizes[: self.index])  # the lowest rank on this node

    def _open_store(self) -> Any:
        from paceline.comm.rendezvous import private_store

        nodes = self._nodes
        shared_store, self._hosts_store, own_address = open_store(nodes)
        store = private_store(shared_store, nodes.secret(), "nodes")
        self.index = 0 if self._hosts_store else store.add("arrived", 1)
        if self.index >= nodes.num:
            raise NodesError(f"{nodes.num} nodes have already joined at {nodes.address}: choose another port")
        self.name = f"{self.name} ({own_address})"
        self.environment = worker_environment(nodes, own_address, shared_store.port)
        return store

    def close(self) -> None:
        """Leave, and notify the others. The node with the store leaves last."""
        self._heartbeats.leave(LOST_S)

    def publish(self, result: WorkerExit) -> None:
        """Publish how the current start ended on this node. Only a start's first result counts."""
        results = self._heartbeats.own.results
        if self.num_restarts not in results:
            recent = {start: old for start, old in results.items() if start == self.num_restarts - 1}
            self._heartbeats.publish(results={**recent, self.num_restarts: result})

    def wait_for_results(self) -> bool:
        """Wait until the current start has ended on all nodes. Returns whether all can restart; not if one is lost."""
        while len(results := self._results()) < self.num_nodes:
            if self.lost():
                return False
            time.sleep(POLL_S)
        return not any(result.is_final for result in results.values())

    def peer_failed(self) -> bool:
        """Whether this node's workers must end because of another node.

        A stop is not a reason: all workers stop after the same step, and each node ends once it has saved.
        """
        kinds = {result.kind for index, result in self._results().items() if index != self.index}
        return bool(kinds - {ExitKind.DONE, ExitKind.STOPPED} or self.lost())

    def lost(self) -> str:
        """The nodes that cannot be reached although their start has not ended; empty if there are none."""
        heartbeats, results = self._heartbeats, self._results()
        awaited = {index: peer for index, peer in heartbeats.peers.items() if index not in results}
        if left := [peer.name for peer in awaited.values() if peer.has_left]:
            return f"node {', '.join(left)} has left"
        if awaited and heartbeats.store_error:
            return f"lost contact with the node at {self._nodes.address}: {heartbeats.store_error}"
        lost_s = heartbeats.lost_s
        silent = heartbeats.peers if heartbeats.store_silence_s > lost_s else heartbeats.silent
        if names := [peer.name for index, peer in awaited.items() if index in silent]:
            silence = f"no heartbeat for {lost_s:g} s: it is down, or the link to it"
            return f"lost contact with node {', '.join(names)}: {silence}"
        return ""

    def first_failure(self) -> WorkerExit | None:
        """Why the current start failed, according to the known records; None if it has not."""
        failure, lost = first_failure(self._results().values()), self.lost()
        if failure is None:
            return WorkerExit(ExitKind.COMMUNICATION, self.first_rank, lost) if lost else None
        return failure.with_notes(lost)

    def _results(self) -> dict[int, WorkerExit]:
        """Of the current start, by node."""
        return {
            i: record.results[self.num_restarts]
            for i, record in self._heartbeats.records.items()
            if self.num_restarts in record.results
        }


def wait_for_nodes(
    nodes: Nodes,
    heartbeats: Heartbeats,
    lost: Callable[[], str],
    have_joined: Callable[[], bool],
    deadline_s: float,
) -> None:
    """Wait until enough nodes have joined. lost: why they cannot."""
    while True:
        # Where nodes come and go, one with other options was refused, and has left.
        awaited = [peer for peer in heartbeats.peers.values() if not (nodes.max_num and peer.has_left)]
        for other in [peer for peer in awaited if peer.options != heartbeats.own.options]:
            raise NodesError(
                f"node {other.name} was started with {other.options}, this one with {heartbeats.own.options}: use the "
                "same command on every node"
            )
        if heartbeats.has_unreadable and not heartbeats.peers:
            raise NodesError(f"the nodes at {nodes.address} run another version of Paceline: install the same on all")
        if reason := lost():
            raise NodesError(f"the nodes could not connect: {reason}")
        if have_joined():
            return
        if time.monotonic() > deadline_s:
            names = [record.name for record in heartbeats.records.values()]
            needed = f"at least {nodes.num}" if nodes.max_num else f"{nodes.num}"
            raise NodesError(
                f"{len(names)} of {needed} nodes joined at {nodes.address} within join_timeout="
                f"{nodes.join_timeout_s:g} s: {', '.join(names)}. Start the same command on the others, with the same "
                "secret or none"
            )
        time.sleep(POLL_S)


def worker_environment(nodes: Nodes, own_address: str, port: int) -> dict[str, str]:
    """Variables with which the workers of several nodes connect."""
    environment = {"MASTER_ADDR": nodes.host_and_port[0], "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if nodes.secret_file is not None:
        environment[FILE_VARIABLE] = str(Path(nodes.secret_file).absolute())
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(own_address)) is not None:
        # Gloo's default is the interface of the host's own name, which often is the loopback.
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def open_store(nodes: Nodes) -> tuple[Any, bool, str]:
    """Open the store on the node that has the address; connect to it from the others as soon as it is up.

    Returns the store, whether this node hosts it, and this node's own address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if nodes.secret() is None:
        notice(
            f"this run has no secret: any process that can reach {nodes.address} can join or disturb it. Pass "
            "--secret-file, the same on every node; see docs/security.md"
        )
    host, port = nodes.host_and_port
    timeout = timedelta(seconds=nodes.join_timeout_s)
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while True:
        try:
            if (listener := _listen(host, port)) is not None:
                own_address = listener.getsockname()[0]
                if ip_address(own_address).is_loopback and host not in ("localhost", own_address):
                    notice(  # Debian, for example, maps a host's own name to 127.0.1.1
                        f"{host} is {own_address} on this machine, which other machines cannot reach: give an IP "
                        "address of this machine instead, or correct /etc/hosts"
                    )
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
            time.sleep(HEARTBEAT_S)
    connected = []

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


def keep_store(address: str) -> None:
    """Serve the rendezvous of other nodes at this address of this machine until interrupted; for `--nodes MIN:MAX`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = Nodes(1, address, max_num=2).host_and_port
    if (listener := _listen(host, port)) is None:
        raise NodesError(f"cannot listen at {address}: choose an address of this machine and a free port")
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    notice(f"keeping the rendezvous at {address}; press Ctrl-C to end")
    try:
        while True:
            time.sleep(3600)
    finally:
        del store


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen at this address only, where torch would listen at all; None if it is another machine's, or in use."""
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
