"""The scaling benchmark's loop of ours."""

from __future__ import annotations

import itertools
import os
from functools import partial
from unittest import mock

import pytest
from torch import Tensor, nn
from worker_pool import WorkerPool

from bench import scaling
from bench.harness import Result


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


@pytest.mark.slow
def test_trainers_with_and_without_membership_take_turns() -> None:
    task = scaling.Task(num_workers=2, micro_batch=8, num_micro_batches=1, num_turns=2, seconds=0.05)
    measured = scaling.measure_membership(task)
    assert {name: len(values) for name, values in measured.items()} == {"on": 2, "off": 2}


def test_the_ratio_of_membership_is_that_within_a_turn() -> None:
    result = Result.of("s", "samples/s", {"a": [1.0]}, ours="a", limit="a", better="higher", settings={})
    scaling.add_membership(result, {"on": [99.0, 99.0, 10.0], "off": [100.0, 100.0, 1.0]})
    assert result.detail["membership"]["on_over_off"]["median"] == 0.99
    (note,) = result.detail["notes"]
    assert note == "membership on 99, off 100 samples/s; on over off, by turn: 0.9900 (0.9900 .. 5.4950)"


def test_hidden_variables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_SECRET_ONE", "1")
    with scaling.without_variables("BENCH_SECRET"):
        assert "BENCH_SECRET_ONE" not in os.environ
    assert os.environ["BENCH_SECRET_ONE"] == "1"
