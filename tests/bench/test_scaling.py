"""The scaling benchmark's loop of ours."""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

from torch import Tensor, nn
from worker_pool import WorkerPool

from bench import scaling


def steps_seen(shares: tuple[float, ...], num_steps: int) -> int:
    """How often a worker's loop yields where some workers have no micro-batch."""
    task = scaling.Task(num_workers=2, micro_batch=8, num_micro_batches=1, num_turns=1, seconds=1.0)
    with mock.patch.object(scaling, "make_model", _Tiny):
        loop = scaling.paceline(task, 0, shares=shares, quiet=True)
        return sum(1 for _ in itertools.islice(loop, num_steps))


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(scaling.VOCABULARY, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).square().mean()


def test_a_worker_without_a_share_counts_every_step_and_ends_its_turn_with_the_others(pool: WorkerPool) -> None:
    # Past the epoch's end, and with a number of steps that is none of the balancer's.
    num_steps = scaling.NUM_SAMPLES // 16 + 3
    assert pool.run(partial(steps_seen, (1.0, 0.0), num_steps), 2) == [num_steps, num_steps]
