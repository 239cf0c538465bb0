"""`setup_with`: flodl's knobs, row B10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import mlp, vectors
from torch.nn import functional
from worker_pool import WorkerPool

import paceline as pl

X, Y = vectors(240)


def shares_of(config: pl.compat.flodl.DdpConfig, **settings: Any) -> list[tuple[int, ...]]:
    shares: list[tuple[int, ...]] = []
    with pl.Trainer.setup_with(
        config, mlp, lambda p: torch.optim.SGD(p, lr=0.05), data=(X, Y), micro_batch=2, **grouped(**settings)
    ) as trainer:
        trainer.every(1, lambda record: shares.append(record.shares))
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
    return shares


def test_b10_max_anchor_0_is_el_che_off(pool: WorkerPool) -> None:
    shares = pool.run(lambda: shares_of(pl.compat.flodl.DdpConfig(max_anchor=0), drop_last=True), 2)[0]
    assert shares[0] == (1, 1)
    assert {sum(step) for step in shares} == {2}  # who takes them follows the measured speeds
    # The hint then divides the first step.
    hinted = pl.compat.flodl.DdpConfig(max_anchor=0, speed_hint=(1, 9.0))
    assert pool.run(lambda: shares_of(hinted), 2)[0][0] == (2, 0)


def test_b10_max_anchor_n_is_fixed_at_n(pool: WorkerPool) -> None:
    shares = pool.run(lambda: shares_of(pl.compat.flodl.DdpConfig(max_anchor=6)), 2)[0]
    assert shares[0] == (6, 6)
    assert {min(s) for s in shares[:-1]} == {6}


def test_b10_max_anchor_none_finds_it(pool: WorkerPool) -> None:
    shares = pool.run(lambda: shares_of(pl.compat.flodl.DdpConfig(speed_hint=(1, 2.0), overhead_target=0.5)), 2)[0]
    assert shares[0] == (20, 10)  # El Che's own anchor, and the hint


def test_b10_the_mean_gradient_is_clipped() -> None:
    def norm(limit: float) -> float:
        with pl.Trainer.setup_with(
            pl.compat.flodl.DdpConfig(max_anchor=4, max_grad_norm=limit),
            mlp,
            lambda p: torch.optim.SGD(p, lr=1.0),
            data=(X, Y),
            micro_batch=2,
        ) as trainer:
            before = [p.detach().clone() for p in trainer.model.parameters()]
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    if trainer.step():
                        break
            moved = [p.detach() - q for p, q in zip(trainer.model.parameters(), before, strict=True)]
        return float(torch.cat([m.flatten() for m in moved]).norm())

    assert norm(1e-3) == pytest.approx(1e-3, rel=1e-3)
    assert norm(1e9) > 1e-2


def test_a_bad_knob_is_found_at_once() -> None:
    with pytest.raises(ValueError, match="max_anchor=-1 must be >= 0"):
        pl.compat.flodl.DdpConfig(max_anchor=-1)
    with pytest.raises(ValueError, match="overhead_target=0 is not a part of compute time"):
        pl.compat.flodl.DdpConfig(overhead_target=0)


def test_b10_a_timeline_is_recorded(tmp_path: Path) -> None:
    shares_of(pl.compat.flodl.DdpConfig(timeline=tmp_path / "timeline"))
    assert pl.reports.Timeline.load(tmp_path).summary().workers[0].num_steps > 0
