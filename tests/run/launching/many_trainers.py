"""A program with many trainers, whose losses all must come out the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import digest
from torch import nn

import paceline as pl

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
SEQUENCE = 2
SHORT_ORDERS = ((1, 0, 2), (2, 1, 0))  # in which three nested trainers are closed
ALL_ORDERS = tuple(itertools.permutations(range(3)))
Orders = tuple[tuple[int, ...], ...]


def count(orders: Orders) -> int:
    return SEQUENCE + len(orders) * 3 + 2


def open_trainer(timeout_s: float = 60.0, fail: bool = False) -> pl.Trainer:
    def optimizer(parameters: object) -> torch.optim.Optimizer:
        if fail:
            raise RuntimeError("no optimizer here")
        return torch.optim.SGD(parameters, lr=0.1)

    return pl.Trainer.setup(
        lambda: nn.Linear(4, 1),
        optimizer,
        data=X,
        global_batch=8,
        micro_batch=2,
        exact=True,
        runtime=pl.Runtime(timeout_s=timeout_s),
    )


def train(trainer: pl.Trainer) -> str:
    for epoch in trainer.epochs(1):
        for batch in epoch:
            trainer.backward(trainer.model(batch).square().mean())
            trainer.step()
    return digest(trainer.model.state_dict())


def digest_alone() -> str:
    with open_trainer() as trainer:
        return train(trainer)


def all_digests(orders: Orders = SHORT_ORDERS) -> set[str]:
    found = []
    for _ in range(SEQUENCE):
        with open_trainer() as trainer:
            found.append(train(trainer))
    for order in orders:
        nested = [open_trainer() for _ in range(3)]
        found += [train(trainer) for trainer in nested[::-1]]
        for index in order:
            nested[index].close()
    after_failures(found)
    assert len(found) == count(orders)
    return set(found)


def after_failures(found: list[str]) -> None:
    """A trainer that fails on one worker fails on all; those around it and after it work."""
    with open_trainer() as outer:
        if outer.world.size > 1:
            is_guilty = outer.world.rank == outer.world.size - 1
            with pytest.raises(RuntimeError) as caught:  # the guilty one fails after it has joined the others
                open_trainer(timeout_s=20.0, fail=is_guilty)
            assert is_guilty == ("no optimizer here" in str(caught.value)), caught.value
            outer.gather(0)
            if not is_guilty:
                with pytest.raises(pl.errors.CommunicationTimeout, match=r"^rank \d waited 1 s for the world"):
                    open_trainer(timeout_s=1.0)
            outer.gather(0)
        found.append(train(outer))
        found.append(digest_alone())


def main() -> None:
    digests = all_digests()
    with open_trainer() as trainer:
        together = trainer.gather(sorted(digests))
        if trainer.is_main:
            print(
                f"trainers: {count(SHORT_ORDERS)} digests: {sorted({d for each in together for d in each})}", flush=True
            )
