"""Moving tensors between workers."""

from __future__ import annotations

import logging

from paceline.comm.base import DEFAULT_TIMEOUT_S, Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import CommunicationError
from paceline.core.world import World

logger = logging.getLogger("paceline")


def connect(world: World, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Communicator:
    """The communicator for this world: nothing for one worker, else torch.distributed.

    CPU workers of one host share memory, unless a backend is named.
    """
    if world.size == 1:
        return SingleCommunicator(world, timeout_s)
    # Imported here: a world of one should not pay for torch.distributed.
    from paceline.comm.process_group import ProcessGroupCommunicator
    from paceline.comm.shared_memory import SharedMemoryCommunicator, missing_shared_memory

    between_processes = ProcessGroupCommunicator(world, backend, timeout_s)
    reason = "a backend was named" if backend else missing_shared_memory(world)
    if reason is None:
        try:
            return SharedMemoryCommunicator(between_processes)
        except CommunicationError as error:
            reason = str(error)
    logger.info("workers exchange over %s, not through shared memory: %s", between_processes.backend, reason)
    return between_processes
