"""Which workers of a world are on one host."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World


@dataclass(frozen=True)
class Place:
    """Where a worker says it is."""

    local_rank: int
    local_size: int
    host: int

    @classmethod
    def of(cls, world: World) -> Place:
        digest = hashlib.sha256(world.host.encode()).digest()
        return cls(world.local_rank, world.local_size, int.from_bytes(digest[:7], "little"))


def divide(places: Sequence[Place]) -> list[range]:
    """The ranks of each host, from all workers' places; ValueError if they do not fit together."""
    hosts = []
    first = 0
    while first < len(places):
        ranks = range(first, min(first + places[first].local_size, len(places)))
        expected = [Place(i, places[first].local_size, places[first].host) for i in range(places[first].local_size)]
        if [places[rank] for rank in ranks] != expected:
            raise ValueError(
                f"ranks {list(ranks)} are not one host's: their places there are "
                f"{[places[rank].local_rank for rank in ranks]} of {[places[rank].local_size for rank in ranks]}, "
                f"under {len({places[rank].host for rank in ranks})} host names"
            )
        hosts.append(ranks)
        first = ranks.stop
    return hosts


def find_hosts(flat: Communicator) -> list[range]:
    """The ranks of each host, found by all workers together.

    CommunicationError on all if they do not fit together, or some have their tensors elsewhere than on the CPU.
    """
    world = flat.world
    own = Place.of(world)
    table = torch.zeros(world.size, 4, dtype=torch.int64)
    table[world.rank] = torch.tensor([own.local_rank, own.local_size, own.host, world.device.type != "cpu"])
    flat.all_reduce(table).wait()
    if others := table[:, 3].nonzero().flatten().tolist():
        raise CommunicationError(f"the tensors of ranks {others} are not on the CPU")
    try:
        return divide([Place(*row) for row in table[:, :3].tolist()])
    except ValueError as error:
        raise CommunicationError(str(error)) from None
