"""Moving tensors between workers."""

from __future__ import annotations

from paceline.comm.base import DEFAULT_TIMEOUT_S, Communicator
from paceline.comm.single import SingleCommunicator
from paceline.core.world import World


def connect(world: World, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Communicator:
    """The communicator for this world: nothing for one worker, else torch.distributed."""
    if world.size == 1:
        return SingleCommunicator(world, timeout_s)
    # Imported here: a world of one should not pay for torch.distributed.
    from paceline.comm.process_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator(world, backend, timeout_s)
