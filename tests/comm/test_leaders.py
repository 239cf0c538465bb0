"""The group of one worker per host: it can be given up, and nothing else with it."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from time import monotonic

import pytest
import torch
from worker_pool import WorkerPool

from paceline.comm import leaders as leaders_module
from paceline.comm.leaders import Leaders
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World


def give_up(ranks: list[int]) -> tuple[list[float], str, float]:
    """What a leader had exchanged, its error and the seconds until then; another thread's connection must live on."""
    world = World.from_environment()
    opened: list[socket.socket] = []

    class BesideAnother(ProcessGroupCommunicator):
        def __init__(self, *args: object) -> None:
            with socket.create_server(("127.0.0.1", 0)) as server:
                opened.append(socket.create_connection(server.getsockname()))
                opened.append(server.accept()[0])
            super().__init__(*args)

    class Joined(Leaders, BesideAnother):
        pass

    with (
        closing(ProcessGroupCommunicator(world, timeout_s=20.0)) as flat,
        closing(Joined(world, 20.0, ranks)) as leaders,
    ):
        tensor, text, started = torch.full((3,), world.rank + 1.0), "", monotonic()
        if world.rank in ranks:
            for call in (leaders.all_reduce, lambda t: leaders.broadcast(t, 1)):
                call(tensor).wait()
            started = monotonic()
            if world.rank == ranks[0]:
                leaders.abort()
                leaders.abort()
            with pytest.raises(CommunicationError) as caught:
                leaders.all_reduce(torch.zeros(1)).wait()
            assert not isinstance(caught.value, CommunicationTimeout)
            text = str(caught.value)
        seconds = monotonic() - started
        total = torch.ones(1)
        flat.all_reduce(total).wait()
        assert total.item() == world.size
        opened[0].sendall(b"still here")
        assert opened[1].recv(100) == b"still here"
        for each in opened:
            each.close()
        return tensor.tolist(), text, seconds


@pytest.mark.parametrize("ranks", [[0, 1], [0, 2]])
def test_giving_up_ends_the_exchanges_of_the_leaders_alone(ranks: list[int], pool: WorkerPool) -> None:
    for rank, (values, text, seconds) in enumerate(pool.run(give_up, 3, ranks)):
        if rank in ranks:
            assert values == [sum(ranks) + 2.0] * 3
            assert text.startswith(f"rank {rank} lost contact with the other workers in all_reduce: ")
            assert seconds < 10
        else:
            assert (values, text) == ([rank + 1.0] * 3, "")


def test_a_connection_is_found_by_its_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            found = [leaders_module._connection(each.fileno()) for each in (server, client, there)]
            assert found[0] is None  # it only listens
            assert [c.getsockname() for c in found[1:]] == [client.getsockname(), there.getsockname()]
            for connection in found[1:]:
                connection.close()
            assert (client.fileno(), f"socket:[{os.fstat(client.fileno()).st_ino}]") in leaders_module._sockets()
