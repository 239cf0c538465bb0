"""The memory report of a run."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from paceline.plan.memory import CHUNK_NUMEL, GPU_CHUNK_NUMEL, MemoryReport, StateSize, memory_of
from paceline.run.run import Run
from paceline.run.step.build import named_parameters
from paceline.run.step.replica import Replica

logger = logging.getLogger("paceline")

_PROBE_SHAPE = (32, 32)


def memory_report(run: Run, num_workers: int | None = None) -> MemoryReport:
    """The memory of this worker, also before the first step. num_workers: of another world, to predict its memory."""
    config, replica, world = run.config, run.loop.replica, run.world
    trained = list(replica.parameters.values())
    count = sum(p.numel() for p in trained)
    everything = sum(p.numel() for p in named_parameters(replica.model).values())
    is_own_world = num_workers is None or num_workers == world.size
    size = num_workers or world.size
    share = None
    if replica.pieces is not None and is_own_world:
        share = replica.pieces.shards.division.own_share
    report = memory_of(
        StateSize(
            num_parameters=count,
            parameter_bytes=max(p.element_size() for p in trained),
            optimizer_bytes=bytes_per_parameter(replica),
            num_workers=size,
            micro_batches=max(-(-config.max_micro_batches(size) // size), 1),
            exact=config.exact,
            fp16=config.precision == "fp16",
            ema=config.optimization.ema is not None,
            shard=config.optimization.shard,
            share=share,
            redundancy=config.optimization.redundancy,
            chunk_numel=GPU_CHUNK_NUMEL if world.device.type == "cuda" else CHUNK_NUMEL,
            frozen=everything - count,
            master_weights=config.optimization.master_weights,
        )
    )
    if world.device.type == "cuda" and is_own_world and run.loop.position.step:
        return report.with_activations(torch.cuda.max_memory_allocated(world.device))
    return report


def bytes_per_parameter(replica: Replica) -> float:
    """The size of the optimizers' state for one trained number, on average, found by a step on a small matrix."""
    total, count = 0.0, 0
    for optimizer in replica.optimizers:
        for group in optimizer.param_groups:
            numel = sum(p.numel() for p in group["params"] if p.requires_grad)
            total += numel * _probe(optimizer, group)
            count += numel
    return total / max(count, 1)


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    dtype = next((p.dtype for p in group["params"]), torch.float32)
    parameter = torch.nn.Parameter(torch.ones(_PROBE_SHAPE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    make: Any = type(optimizer)
    # Not all defaults are arguments: AdamW has one of Adam's. Fused and capturable ones may need a GPU.
    names = inspect.signature(make).parameters.keys() & group.keys() - {"params", "fused", "capturable"}
    settings = {name: group[name] for name in names}
    try:
        trial = make([parameter], **settings)
        trial.step()
    except Exception as error:  # a user's optimizer with another constructor
        logger.info("the memory of %s's state is not known: %s", type(optimizer).__name__, error)
        return 0.0
    state = [v for v in trial.state[parameter].values() if isinstance(v, torch.Tensor) and v.shape == _PROBE_SHAPE]
    return sum(value.nbytes for value in state) / parameter.numel()
