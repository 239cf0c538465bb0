"""EarlyStopping: when it says that a run is over, and that a resumed run goes on counting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp, vectors
from torch.nn import functional

import paceline as pl

NAN = math.nan


@pytest.mark.parametrize(
    ("settings", "values", "over"),
    [
        ({"patience": 2}, [5, 4, 4, 3, 3, 3], [0, 0, 0, 0, 0, 1]),
        ({"patience": 1}, [5, 6], [0, 1]),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 3, 3, 2], [0, 0, 0, 0, 0, 1]),
        ({"patience": 2, "min_delta": 0.5}, [5, 4.6, 4.5, 4.4, 4.3], [0, 0, 1, 0, 0]),
        ({"patience": 2}, [NAN, NAN], [0, 1]),
        ({"patience": 2}, [NAN, 1, NAN, 0.5, NAN, NAN], [0, 0, 0, 0, 0, 1]),
        ({"patience": 2, "mode": "max"}, [1, NAN, math.inf, 2, 2], [0, 0, 0, 0, 1]),
        ({"patience": 1}, [5, 6, 4], [0, 1, 0]),
    ],
)
def test_when_it_is_over(settings: dict[str, Any], values: list[float], over: list[int]) -> None:
    early_stopping = pl.EarlyStopping(**settings)
    assert [early_stopping.is_over(value) for value in values] == [bool(answer) for answer in over]


def test_it_tells_the_best_and_how_long_ago_it_was() -> None:
    early_stopping = pl.EarlyStopping()
    assert (early_stopping.best, early_stopping.num_bad) == (None, 0)
    for value in (torch.tensor(2.0), 3, 4.0):
        early_stopping.is_over(value)  # type: ignore[arg-type]
    assert (early_stopping.best, early_stopping.num_bad) == (2.0, 2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"patience": 0}, "patience=0 must be >= 1"),
        ({"patience": 1.5}, "patience=1.5"),
        ({"min_delta": -1.0}, "min_delta=-1.0 must be >= 0"),
        ({"min_delta": NAN}, "min_delta=nan"),
        ({"mode": "best"}, "mode='best' is unknown: choose 'min' or 'max'"),
    ],
)
def test_bad_settings_name_value_and_remedy(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pl.EarlyStopping(**settings)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    values = [3.0, 2.0, 2.5, 2.5, 2.5]

    def run(num_epochs: int) -> tuple[int, pl.EarlyStopping]:
        early_stopping = pl.EarlyStopping(patience=3)
        with pl.Trainer.setup(
            mlp,
            lambda params: torch.optim.SGD(params, lr=0.1),
            data=vectors(8),
            global_batch=8,
            checkpoints=pl.Checkpoints(tmp_path),
            runtime=pl.Runtime(quiet=True),
        ) as trainer:
            trainer.register("early_stopping", early_stopping)
            for epoch in trainer.epochs(num_epochs):
                for batch in epoch:
                    trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                    trainer.step()
                if early_stopping.is_over(values[epoch.number]):
                    break
            return trainer.position.epoch, early_stopping

    assert run(3)[0] == 3
    epochs, early_stopping = run(100)
    assert (epochs, early_stopping.best, early_stopping.num_bad) == (5, 2.0, 3)
