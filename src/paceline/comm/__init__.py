"""Moving tensors between workers."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from paceline.comm.base import DEFAULT_TIMEOUT_S, Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError, CommunicationTimeout
from paceline.core.world import World

if TYPE_CHECKING:
    from paceline.comm.process_group import ProcessGroupCommunicator

logger = logging.getLogger("paceline")


def connect(world: World, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Communicator:
    """The communicator for this world: nothing for one worker, shared memory for CPU workers of one host, else
    torch.distributed.

    CPU workers of several hosts reduce inside each host first. A backend that is named serves for everything.
    """
    if world.size == 1:
        return SingleCommunicator(world, timeout_s)
    # Imported here: a world of one should not pay for torch.distributed.
    from paceline.comm.process_group import ProcessGroupCommunicator

    if backend is None and (communicator := _on_one_host(world, timeout_s)) is not None:
        return communicator
    flat = ProcessGroupCommunicator(world, backend, timeout_s)
    try:
        if backend is not None:
            raise CommunicationError("a backend was named")
        return _through_memory(flat)
    except CommunicationError as error:
        logger.info("workers exchange over %s, not through shared memory: %s", flat.backend, error)
    return flat


def _on_one_host(world: World, timeout_s: float) -> Communicator | None:
    """For CPU workers of one host, if they can share memory; else None, on all workers."""
    from paceline.comm.rendezvous import meet
    from paceline.comm.shared_memory.one_host import OneHostCommunicator

    meeting = meet(world, timeout_s, world.local_size == world.size and world.device.type == "cpu")
    if not all(meeting.offers):
        return None
    try:
        return OneHostCommunicator(world, timeout_s, meeting)
    except CommunicationTimeout:
        raise
    except CommunicationError as error:
        logger.info("the workers of this host cannot share memory: %s", error)
        return None


def _through_memory(flat: ProcessGroupCommunicator) -> Communicator:
    """The same kind on all workers; CommunicationError on all of them if there is none."""
    from paceline.comm.host_topology import find_hosts
    from paceline.comm.hosts import HostsCommunicator
    from paceline.comm.leaders import Leaders
    from paceline.comm.shared_memory.communicator import SharedMemoryCommunicator

    world = flat.world
    if flat.backend != "gloo":
        raise CommunicationError("each worker has a GPU of its own")
    hosts = find_hosts(flat)
    if len(hosts) == 1:
        return SharedMemoryCommunicator(flat)
    if len(hosts) == world.size:
        raise CommunicationError(f"each of the {len(hosts)} hosts has one worker")
    communicator = HostsCommunicator(flat, hosts, partial(Leaders, world, flat.timeout_s))
    logger.info("workers exchange inside each of %d hosts through shared memory, then across over gloo", len(hosts))
    return communicator
