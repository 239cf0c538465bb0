"""A worker that stands still, where workers read together, is an error within the run's time-out, and a restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grouping import grouped
from models import digest
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import paceline as pl
from paceline.run.launching import agent

TIMEOUT_S = 2.0
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


class Numbered(Dataset):
    """Hangs in sample 20, once."""

    def __init__(self, hang: Any) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            self.hang()
        return X[index]


class Streamed(IterableDataset):
    def __init__(self, hang: Any) -> None:
        self.hang = hang

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index, x in enumerate(X):
            if index == 20:
                self.hang()
            yield x


def hang_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        time.sleep(600)  # this line is named


def train(kind: type, settings: dict[str, Any], marker: Path, stop_rank: int | None) -> str:
    def hang() -> None:
        if stop_rank is None:
            hang_once(marker)

    with pl.Trainer.setup(
        lambda: nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=kind(hang),
        global_batch=8,
        micro_batch=2,
        exact=True,
        **grouped(timeout_s=TIMEOUT_S, **settings),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch).square().mean())
                trainer.step()
                if trainer.world.rank == stop_rank and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGSTOP)
        return digest(trainer.model.state_dict())


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "GRACE_S", 0.5)
    monkeypatch.setattr(agent, "CAUSE_WAIT_S", 0.5)


DISPATCHED = {"feed": "dispatched"}
CASES: dict[str, tuple[type, dict[str, Any], int | None]] = {
    "dispatched": (Numbered, DISPATCHED, None),
    "dispatched, readers": (Numbered, {**DISPATCHED, "readers": 1}, None),
    "stream": (Streamed, {}, None),
    "stream, readers": (Streamed, {"readers": 1}, None),
    "stopped, dispatched": (Numbered, DISPATCHED, 1),
    "stopped, dispatched, readers": (Numbered, {**DISPATCHED, "readers": 1}, 1),
    "stopped, stream": (Streamed, {}, 1),
    "stopped reader of all": (Streamed, DISPATCHED, 0),
}


def cases(*short: str) -> list[Any]:
    """Those of the normal run, and the others for `make soak`."""
    assert set(short) <= set(CASES)
    return [
        pytest.param(case, id=name, marks=() if name in short else pytest.mark.soak) for name, case in CASES.items()
    ]


@pytest.mark.parametrize("case", cases("dispatched"))
def test_a_worker_that_stands_still_is_named_in_time(case: tuple[Any, ...], tmp_path: Path) -> None:
    kind, settings, stop_rank = case
    with pytest.raises(pl.errors.WorkerError) as caught:
        pl.launch(train, 2, args=(kind, settings, tmp_path / "marker", stop_rank))
    text = str(caught.value)
    assert f"waited timeout_s={TIMEOUT_S:g} s" in text
    if stop_rank is None:
        assert "in hang_once" in text, text
        assert Path(__file__).name in text
    else:
        assert f"rank {stop_rank} is still running but did not report its stack" in text, text


@pytest.mark.parametrize("case", cases("stopped, stream"))
def test_a_worker_that_stands_still_is_started_again(
    case: tuple[Any, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, settings, stop_rank = case
    marker = tmp_path / "marker"
    assert pl.launch(train, 2, args=(kind, settings, marker, stop_rank), max_restarts=3) == train(
        kind, {}, marker, None
    )
    err = capfd.readouterr().err
    assert "paceline: restart 1: rank " in err
    assert "restart 2" not in err
