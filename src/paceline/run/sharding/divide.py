"""Divides a replica's optimizer state among the workers according to the settings."""

from __future__ import annotations

import os
from time import perf_counter

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.world import World
from paceline.run.settings import Optimization, ShardBy
from paceline.run.sharding.optimizers import PieceOptimizers
from paceline.run.sharding.update import ShardedUpdate
from paceline.run.step.replica import Replica, Update
from paceline.sync.gradients.division import Division
from paceline.sync.gradients.shards import Shards

# Devices whose memory differs by less are equal.
EQUAL_MEMORY = 0.1
_TRIAL_NUMEL = 1 << 20
# Several periods of a CPU quota, which alternately runs and stops a worker.
_TRIAL_S = 0.3


def divide(replica: Replica, settings: Optimization, communicator: Communicator, *, can_change: bool) -> Shards | None:
    """Divide the state among the workers. None if it stays whole: by the settings, or with a single worker.

    Masters are part of the divided state, so a single worker with masters owns all pieces; so does one that others may
    join (can_change).
    """
    is_divided = settings.shard is not None and (communicator.world.size > 1 or can_change)
    if not is_divided and not settings.master_weights:
        return None
    if settings.master_weights and not any(
        p.dtype in (torch.bfloat16, torch.float16) for p in replica.parameters.values()
    ):
        raise ValueError(
            "master_weights=True keeps float32 masters of weights in bf16, but the model has none: build it in bf16, "
            "such as lambda: Model().bfloat16(), or leave master_weights out"
        )
    shards = Shards(communicator, make_division(settings, communicator))
    replica.pieces = PieceOptimizers(replica.optimizers, replica.parameters, shards)
    return shards


def make_division(settings: Optimization, communicator: Communicator) -> Division:
    """The division for the current workers, which call this together. It covers no parameter yet."""
    world = communicator.world
    weights = _weights(settings.shard_by, communicator) if world.size > 1 else [1.0]
    return Division(world, weights, copies=settings.redundancy, has_masters=settings.master_weights)


def make_update(replica: Replica, max_norm: float | None, *, exact: bool) -> Update:
    if replica.pieces is None:
        return Update(replica, max_norm, exact=exact)
    return ShardedUpdate(replica, max_norm, replica.pieces)


def _weights(by: ShardBy, communicator: Communicator) -> list[float]:
    """By rank: how much of the state a worker gets, compared with the others."""
    world = communicator.world
    if isinstance(by, tuple):
        return list(by)
    if by == "equal":
        return [1.0] * world.size
    own = _update_speed(world.device) if by == "speed" else _memory_bytes(world.device) / _sharers(world)
    found = [float(text) for text in gather(repr(own), communicator)]
    if by == "auto" and max(found) < (1 + EQUAL_MEMORY) * min(found):
        return [1.0] * world.size
    return found


def _sharers(world: World) -> int:
    """Workers on the same memory: of one host's CPU, or of one GPU."""
    num_memories = torch.cuda.device_count() if world.device.type == "cuda" else 1
    return max(world.local_size // num_memories, 1)


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _update_speed(device: torch.device) -> float:
    """Elements per second of an update like Adam's."""
    parameter = torch.nn.Parameter(torch.ones(_TRIAL_NUMEL, device=device))
    parameter.grad = torch.ones(_TRIAL_NUMEL, device=device)
    optimizer = torch.optim.AdamW([parameter], fused=device.type in ("cpu", "cuda"))
    optimizer.step()  # makes its state
    count, begin = 0, perf_counter()
    while (seconds := perf_counter() - begin) < _TRIAL_S:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return count * _TRIAL_NUMEL / seconds
