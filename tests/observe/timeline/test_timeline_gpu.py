"""A timeline of a GPU's run: its moments come from the stream and lie on the host's clock."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional
from torch.utils.data import Dataset

import paceline as pl
from paceline.observe.timeline.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of which eight take 20 ms."""

    def __init__(self) -> None:
        self.x, self.y = vectors(64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sleep(0.0025)
        return self.x[index], self.y[index]


def test_a_gpus_steps_lie_within_the_run_and_waiting_for_data_is_seen(tmp_path: Path) -> None:
    settings = {"global_batch": 16, "micro_batch": 8, "quiet": True, "timeline": tmp_path}
    start = perf_counter()
    with pl.Trainer.setup(mlp, lambda p: torch.optim.SGD(p, lr=0.1), data=Slow(), **grouped(**settings)) as trainer:
        for epoch in trainer.epochs(3):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
    wall_s = perf_counter() - start
    timeline = Timeline.load(tmp_path)
    (lane,) = timeline.lanes
    assert lane.num_steps == 12
    assert all(earlier.end <= later.start + 1e-6 for earlier, later in pairwise(lane.spans))
    assert lane.spans[-1].end <= wall_s
    (worker,) = timeline.summary().workers
    assert worker.seconds["data"] > 24 * 0.02 * 0.8
    assert 0 < worker.seconds["compute"] < wall_s
    assert worker.use["gpu_memory"] > 0
