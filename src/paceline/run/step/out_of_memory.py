"""Explains out-of-memory errors, with the settings that need less memory."""

from __future__ import annotations

import torch

from paceline.core.world import World
from paceline.plan.epoch import divisors
from paceline.run.config import RunConfig
from paceline.run.step.replica import Replica

_MARK = "paceline: out of memory"


def explain_out_of_memory(error: torch.OutOfMemoryError, config: RunConfig, replica: Replica, world: World) -> None:
    """Add a note to the error, once: what uses the memory, and which settings need less."""
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        return
    micro_batch = config.micro_batch or config.global_batch or 1
    at_once = micro_batch * config.micro_batches_at_once(world.rank)
    samples = "1 sample" if at_once == 1 else f"{at_once} samples"
    error.add_note(
        f"{_MARK} on {world.device}{_size_of(world.device)} in a forward and backward of {samples}. Weights, gradients "
        f"and the optimizer's state take {_gib(_bytes_of(replica))} of it, for any batch size.\n"
        + "\n".join(f"- {remedy}" for remedy in _remedies(config, micro_batch, at_once))
    )


def _remedies(config: RunConfig, micro_batch: int, at_once: int) -> list[str]:
    remedies = []
    if at_once > micro_batch:
        remedies.append(
            f"physical_batch={at_once // 2 // micro_batch * micro_batch or micro_batch} needs less at a time"
        )
    elif micro_batch > 1:
        smaller = max(d for d in divisors(config.global_batch or micro_batch) if d <= micro_batch // 2)
        step = ""
        if config.global_batch is not None:
            step = f"; a step stays {config.global_batch} samples, in {config.global_batch // smaller} micro-batches"
        remedies.append(f"micro_batch={smaller} needs about {smaller / micro_batch:.0%} of the remaining memory{step}")
    remedies.append("gradient checkpointing in the model (torch.utils.checkpoint) trades computing for memory")
    if config.precision == "fp32":
        remedies.append("precision='bf16' with trainer.autocast() halves the activations kept for backward")
    return remedies


def _bytes_of(replica: Replica) -> int:
    state = (value for o in replica.optimizers for values in o.state.values() for value in values.values())
    weights = sum(parameter.nbytes for parameter in replica.parameters.values())
    return 2 * weights + sum(value.nbytes for value in state if isinstance(value, torch.Tensor))


def _size_of(device: torch.device) -> str:
    return f" ({_gib(torch.cuda.mem_get_info(device)[1])})" if device.type == "cuda" else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
