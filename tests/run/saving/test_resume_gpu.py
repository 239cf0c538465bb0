"""Saving and resuming on a GPU. CI has no GPU; run by hand where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import run
from worker_pool import WorkerPool

from paceline.checkpoint.folders import complete_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(root: Path | None, until: int | None = None, **settings: Any) -> str:
    return run(root, until, device="cuda", **settings)


def test_saved_and_resumed_on_one_and_two_ranks(tmp_path: Path, pool: WorkerPool) -> None:
    (undisturbed,) = pool.run(on_gpu, 1, None)
    pool.run(on_gpu, 1, tmp_path, 4)
    pool.run(on_gpu, 2, tmp_path, 9)
    # Numbers are read some steps late, by all workers equally: they stop a little later, and together.
    first, second = complete_steps(tmp_path)
    assert first == 4
    assert 9 <= second <= 12
    assert pool.run(on_gpu, 2, tmp_path) == [undisturbed] * 2


def test_a_run_saved_after_every_step_is_not_disturbed_by_it(tmp_path: Path, pool: WorkerPool) -> None:
    def often() -> str:
        return on_gpu(tmp_path, every_steps=1, snapshot_every=1)

    assert pool.run(often, 2) == pool.run(on_gpu, 1, None) * 2
