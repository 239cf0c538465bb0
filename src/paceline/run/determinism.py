"""Process-wide settings of a run: CPU threads, and deterministic kernels in exact mode."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

import torch

from paceline.core.world import World

logger = logging.getLogger("paceline")

# What restores the settings before those of each run, the newest last; False if that run has ended before a newer one.
_is_in_use: dict[ExitStack, bool] = {}


def process_settings(world: World, *, exact: bool, threads: int | None) -> ExitStack:
    """Apply the settings. Closing the returned stack restores the previous ones, unless newer ones are in use.

    Runs may end in any order: older settings are restored when all newer ones are closed.

    Exact mode fixes the number of CPU threads (default: 1), because it determines how sums are split. Otherwise the
    workers of a host divide its cores; the only worker of a host keeps its number of threads.
    """
    num_threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, num_threads)
        if threads is not None or exact:
            torch.set_num_threads(threads or 1)
        elif world.local_size > 1:
            torch.set_num_threads(max(1, min(num_threads, len(os.sched_getaffinity(0)) // world.local_size)))
        if exact:
            _use_deterministic_kernels(stack)
        before = stack.pop_all()
    _is_in_use[before] = True
    # Not a generator-based context manager: one that is never closed raises at interpreter exit.
    closing = ExitStack()
    closing.callback(_restore, before)
    return closing


def _restore(before: ExitStack) -> None:
    _is_in_use[before] = False
    while _is_in_use and not next(reversed(_is_in_use.values())):
        _is_in_use.popitem()[0].close()


def _use_deterministic_kernels(before: ExitStack) -> None:
    before.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # Not warn_only, which leaves flash attention's backward nondeterministic. It imports torch._inductor.
    torch.use_deterministic_algorithms(True)
    compiler: Any = torch._inductor.config
    settings: list[tuple[Any, str, bool]] = [
        # Filling only helps to find reads of uninitialized memory. It takes 6 of 80 ms in a step of GPT-2 on an H200.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch.backends.cudnn, "benchmark", False),
        # torch.compile pads matrix products to aligned sizes only after a benchmark, which deterministic mode skips:
        # GPT-2's vocabulary of 50,257 then takes 37 of 119 ms on an H200.
        (compiler, "force_shape_pad", True),
    ]
    for owner, name, value in settings:
        before.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    before.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(False)
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ and torch.cuda.is_available():
        logger.warning(
            "CUBLAS_WORKSPACE_CONFIG is set: torch parses it in every matrix product, which may take longer than the "
            "product's launch. Exact mode does not need it: unset it"
        )
