"""Moving tensors between workers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline.comm.base import DEFAULT_TIMEOUT_S, Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World

if TYPE_CHECKING:
    from paceline.comm.rendezvous import RendezvousPoint

logger = logging.getLogger("paceline")


def connect(
    world: World,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    rendezvous_point: RendezvousPoint | None = None,
) -> Communicator:
    """The communicator for this world. All workers call it together and get the same kind.

    `rendezvous_point`: replaces the store that the environment names.

    A world of one gets a no-op. CPU workers share memory inside each host, and one worker per host exchanges with the
    other hosts over Gloo. All other worlds, and those with a named `backend`, use a process group of all workers.
    """
    if world.size == 1:
        return SingleCommunicator(world, timeout_s)
    # Imported here: a world of one needs no torch.distributed.
    from paceline.comm.process_group import ProcessGroupCommunicator
    from paceline.comm.rendezvous import Rendezvous
    from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator
    from paceline.comm.shared_memory.peers import SharedMemoryUnavailable, placement

    if backend is not None:
        return ProcessGroupCommunicator(world, backend, timeout_s, Rendezvous(world, timeout_s, at=rendezvous_point))
    rendezvous = Rendezvous(world, timeout_s, placement(world), at=rendezvous_point)
    try:
        communicator = SharedMemoryCommunicator(world, timeout_s, rendezvous)
    except SharedMemoryUnavailable as error:
        flat = ProcessGroupCommunicator(world, None, timeout_s, rendezvous)
        logger.info("workers exchange over %s, not through shared memory: %s", flat.backend, error)
        return flat
    if communicator.num_hosts > 1:
        hosts = communicator.num_hosts
        logger.info("workers exchange through shared memory inside each of %d hosts, and over gloo between them", hosts)
    return communicator
