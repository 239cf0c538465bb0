"""Process-wide settings of a run: CPU threads, and in exact mode kernels that always add in the same order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.world import World


@contextmanager
def process_settings(world: World, *, exact: bool, threads: int | None) -> Iterator[None]:
    """Set them while the run lasts; the user's own settings come back afterwards.

    Exact mode fixes the number of CPU threads (1 unless given), since it decides how sums are split. Otherwise
    local workers divide the cores among themselves; a worker alone on its host keeps what it has.
    """
    before = torch.get_num_threads()
    if threads is not None or exact:
        torch.set_num_threads(threads or 1)
    elif world.local_size > 1:
        torch.set_num_threads(max(1, min(before, len(os.sched_getaffinity(0)) // world.local_size)))
    try:
        if exact:
            with _deterministic_kernels():
                yield
        else:
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    # cuBLAS reads this when its handle is made; without it deterministic mode refuses matrix products on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    # Not warn-only: that leaves flash attention's backward nondeterministic.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
