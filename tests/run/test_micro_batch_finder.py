"""The finder: which sizes it tries, what it chooses, and that an out-of-memory error leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.world import World
from paceline.data.sources.base import as_source
from paceline.run.micro_batch_finder import Trials, candidates, choose, replica_for_trials, try_sizes


@pytest.mark.parametrize(
    ("global_batch", "sizes"),
    [
        (1, [1]),
        (8, [1, 2, 4, 8]),
        (12, [1, 2, 3, 4, 6, 12]),
        (96, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
        (7, [1, 7]),
        (100, [1, 2, 4, 10, 20, 50, 100]),
        (720, [1, 2, 3, 4, 6, 8, 12, 16, 24, 36, 48, 72, 120, 180, 240, 360, 720]),
    ],
)
def test_candidates_divide_the_global_batch(global_batch: int, sizes: list[int]) -> None:
    assert candidates(global_batch) == sizes


@pytest.mark.parametrize("global_batch", [0, -8, 2.0])
def test_the_global_batch_is_a_number_of_samples(global_batch: object) -> None:
    with pytest.raises(ValueError, match=f"global_batch={global_batch} must be "):
        candidates(global_batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sample_s", "expected"),
    [
        ([{1: 1.0, 2: 0.7, 4: 0.5}], 4),
        ([{1: 1.0, 2: 0.5, 4: 0.495}], 2),  # hardly slower, half the memory
        ([{1: 1.0, 2: 0.5, 4: None}], 2),
        ([{1: 1.0, 2: 0.5, 4: 0.4}, {1: 1.0, 2: 0.5, 4: None}], 2),  # it has to fit everyone
        # Eight samples, of which the slow worker takes two, or the fast one all: 8 * 0.1.
        ([{1: 0.12, 2: 0.11, 8: 0.1}, {1: 0.4, 2: 0.36, 8: 0.3}], 2),
    ],
)
def test_the_shortest_step_is_chosen(sample_s: list[dict[int, float | None]], expected: int) -> None:
    assert choose(8, sample_s).micro_batch == expected


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="not even one sample fits every worker's device"):
        choose(8, [{1: None}])


def test_sizes_are_tried_until_they_do_not_fit_or_pay() -> None:
    tried: list[int] = []

    def of(times: dict[int, float | None]) -> Callable[[int], float | None]:
        tried.clear()
        return lambda size: tried.append(size) or times[size]  # type: ignore[func-returns-value]

    assert try_sizes([1, 2, 4, 8], of({1: 1.0, 2: 0.5, 4: None, 8: 0.1})) == {1: 1.0, 2: 0.5, 4: None}
    assert try_sizes([1, 2, 4, 8], of({1: 0.5, 2: 1.0, 4: 1.0, 8: 0.1})) == {1: 0.5, 2: 1.0, 4: 1.0}
    assert 8 not in tried


# Seconds per sample of GPT-2 on a GPU whose host is the limit up to 8.
CURVE = {1: 16.0, 2: 8.0, 3: 5.4, 4: 4.0, 6: 2.8, 8: 2.1, 12: 1.6, 16: 1.5, 24: 1.49, 32: None, 48: 1.0, 96: 1.0}


def test_a_burst_of_other_work_does_not_end_the_search() -> None:
    """The first readings of two sizes in a row are four times too long."""
    spoilt = {6, 8}

    def seconds(size: int) -> float | None:
        true = CURVE[size]
        if true is None or size not in spoilt:
            return true
        spoilt.remove(size)
        return 4 * true

    found = try_sizes(list(CURVE), seconds)
    assert choose(96, [found]).micro_batch == 16
    assert 48 not in found


@pytest.mark.parametrize("seed", range(40))
def test_bursts_at_random_do_not_change_the_choice(seed: int) -> None:
    """A quarter of all readings is up to four times too long, the others up to 2%."""
    random = Random(seed)

    def seconds(size: int) -> float | None:
        true = CURVE[size]
        return true and true * (random.uniform(1.1, 4) if random.random() < 0.25 else random.uniform(1, 1.02))

    chosen = choose(96, [try_sizes(list(CURVE), seconds)]).micro_batch
    assert (CURVE[chosen] or 9) <= 1.05 * 1.49


class Hungry(nn.Module):
    """Runs out of memory for more than four samples, after it has allocated something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.left_behind: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if len(x) > 4:
            self.left_behind.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("injected")
        return hidden.square().mean()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_ten_out_of_memory_errors_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.micro_batch_finder.TURN_S", 0.0)
    source = as_source(torch.randn(16, 6), collate_fn=None, seed=0)
    with replica_for_trials(Hungry, make_optimizer, World(), False, pl.Runtime(threads=1)) as (replica, link):
        trials = Trials(replica, lambda model, batch: model(batch), source, link.world.device)
        for _ in range(10):
            assert trials.seconds_per_sample(8) is None
            assert all(p.grad is None or not p.grad.any() for p in replica.parameters.values())
            assert trials.seconds_per_sample(4) is not None
        gc.collect()
        assert [kept() for kept in replica.model.left_behind] == [None] * 10


def test_other_errors_are_raised() -> None:
    class Broken(Hungry):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        pl.Trainer.find_micro_batch(
            Broken, make_optimizer, lambda model, batch: model(batch), data=torch.randn(8, 6), global_batch=8
        )


def test_find_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.micro_batch_finder.TURN_S", 0.0)
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    found = pl.Trainer.find_micro_batch(
        Hungry,
        make_optimizer,
        lambda model, batch: model(batch),
        data=torch.randn(16, 6, generator=torch.Generator().manual_seed(0)),
        global_batch=16,
        runtime=pl.Runtime(threads=1),
    )
    assert found.micro_batch <= 4
    assert found.sample_s[0][8] is None
    assert "out of memory" in str(found)
    assert "<- fastest" in str(found)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="find_micro_batch trains a copy: give functions that build"):
        pl.Trainer.find_micro_batch(Hungry(), make_optimizer, lambda m, b: m(b), data=torch.ones(8, 6), global_batch=8)
