"""Nodes that join, fail to join, and disappear. Here all of them are on one machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from waiting import wait_until

from paceline.core.processes import LAUNCHED_VARIABLE
from paceline.run.launching import nodes as nodes_module
from paceline.run.launching.elastic_nodes import ElasticNodes
from paceline.run.launching.nodes import NodeRendezvous, Nodes, NodesError, interface_of
from paceline.run.launching.worker_exit import ExitKind, WorkerExit


def join(nodes: Nodes, **options: object) -> NodeRendezvous:
    return NodeRendezvous(nodes, 1, "run", options)


@pytest.fixture
def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def pair(free_address: str) -> Iterator[tuple[NodeRendezvous, NodeRendezvous]]:
    """Two nodes that have joined, in the order of their ranks."""
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(join, Nodes(2, free_address, 20.0)) for _ in range(2)]
        first, second = sorted((node.result() for node in joined), key=lambda node: node.index)
    yield first, second
    second.close()
    first.close()


def ended(kind: ExitKind, rank: int, is_final: bool = False) -> WorkerExit:
    return WorkerExit(kind, rank, f"{kind} on {rank}", time_s=0.0, is_final=is_final)


def test_all_nodes_restart_and_name_the_same_failure(pair: tuple[NodeRendezvous, NodeRendezvous]) -> None:
    first, second = pair
    first.publish(ended(ExitKind.COMMUNICATION, 0))
    wait_until(second.peer_failed)
    second.publish(ended(ExitKind.FAILED, 1))
    second.publish(ended(ExitKind.DONE, 1))  # too late: the first result of a start counts
    assert first.wait_for_results()
    assert second.wait_for_results()
    assert [node.first_failure() for node in pair] == [ended(ExitKind.FAILED, 1)] * 2
    # One node can be one start ahead: the other still finds both results.
    first.num_restarts += 1
    first.publish(ended(ExitKind.DIED, 0))
    assert second.wait_for_results()
    second.num_restarts += 1
    wait_until(second.peer_failed)
    second.publish(ended(ExitKind.ENDED, 1, is_final=True))
    assert [node.wait_for_results() for node in pair] == [False, False]
    assert [node.first_failure() for node in pair] == [ended(ExitKind.DIED, 0)] * 2


def test_nodes_that_come_and_go_know_when_the_run_was_launched(free_address: str) -> None:
    """The next rank 0 finds the run's folder by it, on whichever host."""
    nodes = Nodes(1, free_address, 20.0, max_num=2)
    with closing(ElasticNodes(nodes, 1, {})) as first, closing(ElasticNodes(nodes, 1, {})) as second:
        assert first.environment[LAUNCHED_VARIABLE] == second.environment[LAUNCHED_VARIABLE]


@contextmanager
def elastic_pair(address: str) -> Iterator[tuple[ElasticNodes, ElasticNodes]]:
    """Two nodes of a run that others can join. The first one has the store, and the second one joins."""
    nodes = Nodes(1, address, 20.0, max_num=3)
    with closing(ElasticNodes(nodes, 1, {})) as first, closing(ElasticNodes(nodes, 1, {})) as second:
        wait_until(lambda: first.num_nodes == second.num_nodes == 2)
        yield first, second


@pytest.mark.parametrize(
    ("kind", "ends_all"),
    [(ExitKind.FAILED, True), (ExitKind.DIED, True), (ExitKind.ABORTED, True), (ExitKind.COMMUNICATION, False)],
)
def test_which_ends_of_a_node_end_the_others(free_address: str, kind: ExitKind, ends_all: bool) -> None:
    with elastic_pair(free_address) as (first, second):
        second.publish(ended(kind, 1))
        wait_until(lambda: first._heartbeats.peers[1].results)
        assert first.peer_failed() == ends_all
        first.publish(ended(ExitKind.ENDED, 0))
        failure = first.first_failure()
        assert (None if failure is None else failure.kind) == (kind if ends_all else None)


def test_the_node_with_the_store_keeps_it_for_the_others(free_address: str) -> None:
    """All of its workers have died, or left."""
    with elastic_pair(free_address) as (first, second), ThreadPoolExecutor() as threads:
        kept = threads.submit(first.wait_for_results)
        second.publish(ended(ExitKind.DONE, 1))
        wait_until(lambda: first._heartbeats.peers[1].results)
        assert not kept.done()
        assert second.wait_for_results() is False
        second.close()
        assert kept.result(20.0) is False


def test_a_run_that_others_have_lost_is_no_success(free_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a node that was about to join."""
    with elastic_pair(free_address) as (first, second):
        second.publish(ended(ExitKind.ENDED, 1))
        assert second.first_failure() is None
        monkeypatch.setattr(first._heartbeats, "_exchange", lambda *_: True)
        wait_until(lambda: second.first_failure() is not None)
        failure = second.first_failure()
        assert failure is not None
        assert failure.message.startswith(f"all workers with the state of the run are lost (node {first.name} sent no")


def test_a_node_that_was_refused_keeps_no_other_out(free_address: str) -> None:
    with elastic_pair(free_address) as (first, _):
        with pytest.raises(NodesError, match="use the same command on every node"):
            ElasticNodes(first._nodes, 1, {"max_restarts": 3})
        ElasticNodes(first._nodes, 1, {}).close()


def test_a_stop_on_one_node_does_not_end_the_other(pair: tuple[NodeRendezvous, NodeRendezvous]) -> None:
    first, second = pair
    second.publish(ended(ExitKind.STOPPED, 1))
    wait_until(lambda: first.first_failure() is not None)
    assert not first.peer_failed()


def test_a_node_that_leaves_ends_the_others(pair: tuple[NodeRendezvous, NodeRendezvous]) -> None:
    first, second = pair
    second.close()
    wait_until(first.peer_failed)
    assert first.lost() == f"node {second.name} has left"
    assert not first.wait_for_results()


def test_a_missing_node_is_named_by_those_who_came(free_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(2, free_address, 0.3)
    with pytest.raises(
        NodesError, match=rf"^1 of 2 nodes joined at {free_address} within join_timeout=0.3 s: .*127.0.0.1"
    ):
        join(nodes)
    monkeypatch.setattr(nodes_module, "_listen", lambda *_: None)  # as on any other machine
    with pytest.raises(NodesError, match=rf"^no answer from {free_address} within join_timeout=0.3 s .*same command"):
        join(nodes)


def test_a_name_that_means_this_machine_only_is_reported(
    free_address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian maps a host's own name to 127.0.1.1: the other nodes would try to connect to its real address."""
    port = int(free_address.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(NodesError, match="1 of 2 nodes joined"):
        join(Nodes(2, f"node-1:{port}", 0.3))
    assert "node-1 is 127.0.1.1 on this machine, which other machines cannot reach" in capsys.readouterr().err
    with pytest.raises(NodesError, match="1 of 2 nodes joined"):
        join(Nodes(2, f"localhost:{port}", 0.3))
    assert "cannot reach" not in capsys.readouterr().err


def test_somebody_else_at_the_port_is_no_launcher() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NodesError, match=f"^the server at {address} is not a launcher: choose another port"):
            join(Nodes(2, address, 1.0))


def test_different_commands_are_named_on_both_nodes(free_address: str) -> None:
    """Two launchers on one machine: the second finds the port taken and joins the first."""
    nodes = Nodes(2, free_address, 20.0)
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(join, nodes, max_restarts=restarts) for restarts in (0, 3)]
        errors = [str(node.exception()) for node in joined]
    assert all("use the same command on every node" in error or "has left" in error for error in errors)
    assert any("was started with {'max_restarts': " in error for error in errors)


def test_one_node_too_many_is_told_so(pair: tuple[NodeRendezvous, NodeRendezvous], free_address: str) -> None:
    with pytest.raises(NodesError, match=rf"2 nodes have already joined at {free_address}: choose another port"):
        join(Nodes(2, free_address, 20.0))
    assert [(node.first_rank, node.num_workers) for node in pair] == [(0, 2), (1, 2)]
    assert [node.environment["GLOO_SOCKET_IFNAME"] for node in pair] == ["lo", "lo"]


def test_a_node_without_heartbeat_is_lost(
    pair: tuple[NodeRendezvous, NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    assert not first.lost()
    assert not first.peer_failed()
    monkeypatch.setattr(second._heartbeats, "_exchange", lambda *_: True)
    second._heartbeats._thread.join()
    first._heartbeats.lost_s = 0.5
    wait_until(first.lost)
    assert first.lost().startswith(f"lost contact with node {second.name}: no heartbeat for 0.5 s")
    assert first.peer_failed()
    failure = first.first_failure()
    assert failure is not None
    assert failure.message == first.lost()
    first.close()  # while the timeout is short: it waits for the other node


@pytest.mark.parametrize(
    ("num", "address", "timeout_s", "message"),
    [
        (2, None, 1.0, "nodes=2 requires an address: set address HOST:PORT"),
        (1, "a:1", 1.0, "address='a:1' requires several nodes: choose nodes >= 2"),
        (2, "a", 1.0, "address='a': choose HOST:PORT"),
        (2, "a:b", 1.0, "address='a:b': choose HOST:PORT"),
        (2, ":1", 1.0, "address=':1': choose HOST:PORT"),
        (2, "a:70000", 1.0, "address='a:70000': choose HOST:PORT"),
        (0, None, 1.0, "nodes=0: choose an integer >= 1"),
        (2, "a:1", 0.0, "join_timeout=0: choose seconds > 0"),
    ],
)
def test_bad_nodes_are_named(num: int, address: str | None, timeout_s: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Nodes(num, address, timeout_s)


def test_places_are_read() -> None:
    assert Nodes(2, "node-1:29500").host_and_port == ("node-1", 29500)
    assert Nodes(2, "[fd00::1]:29500").host_and_port == ("fd00::1", 29500)
    assert (interface_of("127.0.0.1"), interface_of("192.0.2.1")) == ("lo", None)
