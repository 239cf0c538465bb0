"""Small exact runs in which chosen workers die at chosen points, and what each worker that is left ends with.

Several runs follow each other in one launch, with fewer workers each time: exact mode gives the same bits on any number
of them, so one process without a launch computes what is expected.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from grouping import grouped
from models import digest, vectors
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.run.membership.member import Membership
from paceline.run.saving.state import optimizer_state

NUM_SAMPLES = 110
STEPS_PER_EPOCH = 3  # two of ten micro-batches, and one of eight, the last of which is half full
CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


class Death(NamedTuple):
    """Where a worker dies. `point` is a name that the program passes with the number of completed steps.

    start: of which worker in its slot. restart: after how many restarts of all workers.
    """

    slot: int
    point: str = "micro-batch"
    step: int = 3
    how: str = "kill"
    start: int = 0
    restart: int = 0


@dataclass(frozen=True)
class Case:
    """One run. `train`: what is done in it, `loop` or a function of the same form; settings are `Trainer.setup`'s."""

    deaths: Sequence[Death]
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = lambda: vectors(NUM_SAMPLES)
    train: Callable[[Points, pl.Trainer], Any] | None = None
    num_epochs: int = 2
    whole: Callable[[Points], Any] | None = None  # a program of its own instead of all that; rank 0's result counts


class Points:
    """Called by a program at named points; ends this process where it is to die."""

    def __init__(self, deaths: Sequence[Death]) -> None:
        _, slot, start = map(int, os.environ.get("PACELINE_MEMBER", "0:-1:0").split(":"))
        self.own = (slot, start, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        self._deaths = [each for each in deaths if (each.slot, each.start, each.restart) == self.own]

    def will_die(self, point: str, step: int) -> bool:
        return any((death.point, death.step) == (point, step) for death in self._deaths)

    def __call__(self, point: str, step: int) -> None:
        for death in self._deaths:
            if (death.point, death.step) == (point, step):
                die(death.how)


def die(how: str = "kill") -> None:
    if how == "exit":
        os._exit(7)
    if how == "error":
        raise torch.AcceleratorError(CUDA_ERROR)
    while how == "stall":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class Tally:
    """State of the user's, with random numbers drawn between the steps."""

    def __init__(self, here: Points) -> None:
        self._here = here
        self.total, self.draws = 0.0, torch.zeros(2)

    def add(self, loss: float) -> None:
        self.total += loss
        self.draws = self.draws * 0.9 + torch.rand(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._here("load", 0)
        self.total, self.draws = state["total"], state["draws"].clone()


def model() -> nn.Module:
    """Dropout, and BatchNorm of both kinds."""
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, 4),
    )  # fmt: skip


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
    return functional.cross_entropy(net(x), y)


def setup(case: Case) -> pl.Trainer:
    # Steps of a few micro-batches: equal shares, so that workers that die have one.
    settings = {"exact": True, "seed": 5, "global_batch": 40, "micro_batch": 4, "threads": 1, "shares": "equal"}
    settings |= {"quiet": True, **case.settings}
    return pl.Trainer.setup(
        model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01), data=case.data(), **grouped(**settings)
    )


def loop(here: Points, trainer: pl.Trainer, num_epochs: int = 2) -> None:
    """The user's loop."""
    for epoch in trainer.epochs(num_epochs):
        for batch in epoch:
            here("micro-batch", trainer.position.step)
            trainer.backward(loss_of(trainer.model, batch))
            trainer.step()


def run(case: Case) -> list[dict[str, Any]]:
    """What all workers that are left have at the end of a run, by rank."""
    here = Points(case.deaths)
    here("set-up", 0)
    if case.whole is not None:
        return [{"results": case.whole(here)}]
    tally = Tally(here)
    losses: list[tuple[int, str]] = []
    events: list[dict[str, Any]] = []
    with setup(case) as trainer:
        trainer.register("tally", tally)

        def after_step(record: pl.StepRecord) -> None:
            losses.append((record.step, record.loss.hex()))
            tally.add(record.loss)
            here("hook", record.step)

        trainer.every(1, after_step)
        trainer.listen(lambda event: events.append({**event.details}) if event.name == "world" else None)
        results = case.train(here, trainer) if case.train else loop(here, trainer, case.num_epochs)
        trainer.gather(None)  # a worker may die in the background
        optimizer = optimizer_state(trainer.run.loop.replica, lambda _: True)  # whole, also if it is divided
        states = [trainer.model.state_dict(), optimizer, tally.state_dict()]
        world, environment = trainer.world, {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        own = {
            "digest": digest(*states),
            "losses": losses,
            "results": results,
            "events": events,
            "world": (world.rank, world.size, trainer.is_main),
            "environment": environment,
            "position": trainer.position.step,
            "member": here.own,
        }
        return trainer.gather(own)


def run_all(cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    return [run(case) for case in cases]


def launch(cases: Sequence[Case], num_workers: int, **options: Any) -> list[list[dict[str, Any]]]:
    return pl.launch(run_all, num_workers, args=(cases,), **{"min_workers": 1, **options})


def expected(case: Case) -> dict[str, Any]:
    """The undisturbed run, on one worker."""
    [outcome] = run(replace(case, deaths=()))
    return outcome


def check(outcomes: Sequence[Mapping[str, Any]], want: Mapping[str, Any], num_workers: int) -> None:
    """All workers that are left ended as the undisturbed run did, and each ran each hook once.

    One that joined ran the hooks of the steps since then.
    """
    worlds = [outcome["world"] for outcome in outcomes]
    assert worlds == [(rank, num_workers, rank == 0) for rank in range(num_workers)], (worlds, outcomes[0]["events"])
    for rank, outcome in enumerate(outcomes):
        assert outcome["environment"] == {"RANK": str(rank), "WORLD_SIZE": str(num_workers)}
        for name in ("position", "results", "digest"):
            assert outcome[name] == want[name], f"{name} of rank {rank}"
        has_joined = outcome["member"][1] > 0
        assert outcome["losses"] == want["losses"][-len(outcome["losses"]) if has_joined else 0 :], f"losses of {rank}"


def wait_for_members(count: int) -> None:
    """Until the agent has announced that so many take part. In a hook: the workers change after the next step."""
    membership = Membership.from_environment()
    while membership is not None and len((newest := membership.newest()).members) != count:
        assert membership.wait_for_newer(newest, 100), f"still {newest}"


class Stream:
    """Samples one after the other."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = vectors(NUM_SAMPLES)
        return zip(x, y, strict=True)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are read one by one, by the user's code."""

    def __init__(self) -> None:
        self._x, self._y = vectors(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[number], self._y[number]
