"""Process-wide settings of a run: CPU threads, and deterministic kernels in exact mode."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from paceline.core.world import World


def process_settings(world: World, *, exact: bool, threads: int | None) -> ExitStack:
    """Apply the settings. Closing the returned stack restores the previous ones.

    Exact mode fixes the number of CPU threads (default: 1), because it determines how sums are split. Otherwise the
    workers of a host divide its cores; a worker that is alone on its host keeps its number of threads.
    """
    # Not a generator-based context manager: one that is never closed raises at interpreter exit.
    before = ExitStack()
    num_threads = torch.get_num_threads()
    before.callback(torch.set_num_threads, num_threads)
    if threads is not None or exact:
        torch.set_num_threads(threads or 1)
    elif world.local_size > 1:
        torch.set_num_threads(max(1, min(num_threads, len(os.sched_getaffinity(0)) // world.local_size)))
    if exact:
        _use_deterministic_kernels(before)
    return before


def _use_deterministic_kernels(before: ExitStack) -> None:
    # cuBLAS reads this when its handle is created; without it deterministic mode refuses matrix products on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    deterministic: Any = torch.utils.deterministic
    before.callback(setattr, deterministic, "fill_uninitialized_memory", deterministic.fill_uninitialized_memory)
    before.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    before.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
    # Not warn_only, which leaves flash attention's backward nondeterministic.
    torch.use_deterministic_algorithms(True)
    # Filling only helps to find reads of uninitialized memory. It takes 6 of 80 ms in a step of GPT-2 on an H200.
    deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
