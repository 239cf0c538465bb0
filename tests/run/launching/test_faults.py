"""What goes wrong on one worker is one error in the caller, before any timeout, with rank, type and the user's line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.run.launching.agent import CAUSE_WAIT_S


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("trouble in backward")


def job(place: str, culprit: int, timeout_s: float = 600.0) -> Callable[[], None]:
    """A small training run in which one worker meets with trouble at the given place, in its second step."""

    def is_hit(name: str) -> bool:
        return name == place and int(os.environ["RANK"]) == culprit

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> torch.Tensor:
            if is_hit("data") and index >= 8:
                raise LookupError("trouble in the data set")
            return torch.full((4,), float(index))

    def build() -> nn.Module:
        if is_hit("model"):
            raise TypeError("trouble in make_model")
        return nn.Linear(4, 1)

    def loss_of(trainer: pl.Trainer, batch: torch.Tensor) -> torch.Tensor:
        loss = trainer.model(batch).square().mean()
        if trainer.position.step == 1:
            if is_hit("loss") or is_hit("slow end"):
                raise ValueError("trouble in the loss")
            if is_hit("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if is_hit("hang"):
                time.sleep(1000)  # the line where rank 1 stands
            if is_hit("nan"):
                return loss * float("nan")
            if is_hit("backward"):
                return Doubling.apply(loss)
        return loss

    def train() -> None:
        with pl.Trainer.setup(
            build, lambda p: torch.optim.SGD(p, lr=0.01), data=Data(), global_batch=8, micro_batch=4, shuffle=False,
            runtime=pl.Runtime(timeout_s=timeout_s), balancing=pl.Balancing(shares="equal"),
        ) as trainer:  # fmt: skip
            for epoch in trainer.epochs(1):
                for batch in epoch:
                    trainer.backward(loss_of(trainer, batch))
                    trainer.step()

    def main() -> None:
        try:
            train()
        finally:
            if is_hit("slow end"):
                time.sleep(CAUSE_WAIT_S / 2)  # the others have noticed by now, and said so

    return main


def failure(place: str, culprit: int, timeout_s: float = 600.0) -> pl.errors.WorkerError:
    with pytest.raises(pl.errors.WorkerError) as caught:
        pl.launch(job(place, culprit, timeout_s), 2)
    return caught.value


PLACES = [
    ("model", "TypeError", "trouble in make_model", 'raise TypeError("trouble in make_model")'),
    ("data", "LookupError", "trouble in the data set", 'raise LookupError("trouble in the data set")'),
    ("loss", "ValueError", "trouble in the loss", 'raise ValueError("trouble in the loss")'),
    ("backward", "ArithmeticError", "trouble in backward", "trainer.backward(loss_of(trainer, batch))"),
]
CASES = [(*place, (number + turn) % 2) for turn in (0, 1) for number, place in enumerate(PLACES)]


@pytest.mark.parametrize(
    ("place", "kind", "text", "line", "culprit"),
    [pytest.param(*case, marks=() if index < len(PLACES) else pytest.mark.soak) for index, case in enumerate(CASES)],
    ids=[f"{case[0]}-{case[-1]}" for case in CASES],
)
def test_an_exception_anywhere_on_any_rank(culprit: int, place: str, kind: str, text: str, line: str) -> None:
    error = failure(place, culprit)
    assert error.rank == culprit
    assert str(error).startswith(f"rank {culprit} failed: {kind}: {text}")
    assert str(error).count(f"{kind}: {text}") <= 2  # in the first line and at the traceback's end
    assert line in str(error)
    if place == "data":
        assert "while reading sample" in str(error)


def test_the_cause_is_named_though_the_others_noticed_its_effect_first() -> None:
    error = failure("slow end", 1)
    assert str(error).startswith("rank 1 failed: ValueError: trouble in the loss")


def test_a_killed_worker() -> None:
    error = failure("killed", 1)
    assert error.rank == 1
    assert "rank 1 was killed by SIGKILL" in str(error)


def test_a_hanging_worker_is_named_with_the_line_where_it_stands() -> None:
    error = failure("hang", 1, timeout_s=2.0)
    assert error.rank == 0
    assert str(error).startswith("rank 0 failed: CommunicationTimeout: rank 0 waited timeout_s=2 s in all_reduce")
    assert "trainer.step()" in str(error)
    stack = str(error).partition("rank 1 is still running, at:")[2]
    assert "test_faults.py" in stack
    assert "time.sleep(1000)  # the line where rank 1 stands" in stack


def test_a_loss_that_is_no_number_names_step_micro_batch_and_rank() -> None:
    error = failure("nan", 1)
    assert "NonFiniteError: loss is nan at step 2, micro-batch 1, rank 1" in str(error)
    assert "trainer.step()" in str(error)
