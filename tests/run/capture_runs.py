"""Short runs with `step_with`, and graphs for a device that has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from grouping import grouped
from models import digest, mlp, vectors
from torch.nn import functional

import paceline as pl
from paceline.core.events import Event
from paceline.run.capture.graphs import CaptureFailed, Seconds
from paceline.run.capture.step import Stepping

# A full collection takes longer than such a run.
QUICK = {"seed": 5, "quiet": True, "garbage_collection": "as usual"}


def class_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Outcome:
    """What a run came to; `events` are those of capture."""

    digest: str
    records: list[tuple[Any, ...]]
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events if "reason" in event]

    @property
    def captured(self) -> list[str]:
        return [event["what"] for event in self.events if "number" in event]


@dataclass
class Case:
    """A run; `during(trainer, step)` is called after each of its steps."""

    build: Callable[[], torch.nn.Module] = mlp
    data: Any = field(default_factory=lambda: vectors(16 * 20))
    loss: Callable[[Any, Any], torch.Tensor] = class_loss
    optimizer: Callable[[Any], Any] = sgd
    settings: dict[str, Any] = field(default_factory=lambda: {"global_batch": 16})
    num_epochs: int = 2
    during: Callable[[pl.Trainer, int], object] | None = None

    def run(self, graphs: Any = None, **settings: Any) -> Outcome:
        """In the world this process is in, with these graphs instead of the device's."""
        outcome = Outcome("", [])

        def note(event: Event) -> None:
            if event.name == "capture":
                outcome.events.append(event.details)

        def after_step(record: pl.StepRecord) -> None:
            outcome.records.append((record.step, record.loss, record.grad_norm, record.lr))
            if self.during is not None:
                self.during(trainer, record.step)

        with pl.Trainer.setup(
            self.build, self.optimizer, data=self.data, **grouped(**{**QUICK, **self.settings, **settings})
        ) as trainer:
            trainer.listen(note)
            trainer.every(1, after_step)
            if graphs is not None:
                use_graphs(trainer, graphs)
            step = trainer.step_with(lambda batch: self.loss(trainer.model, batch))
            for epoch in trainer.epochs(self.num_epochs):
                for batch in epoch:
                    step(batch)
            outcome.digest = digest(trainer.model.state_dict(), trainer.optimizer.state_dict(), outcome.records)
        return outcome


def use_graphs(trainer: pl.Trainer, graphs: Any) -> None:
    run = trainer.run
    object.__setattr__(run, "stepping", Stepping(run.loop, run.loop.exchange, run.events, graphs, trainer.run.config))


class FakeGraphs:
    """Records work by running it, and replays it by running it again, its results in the place of the first ones.

    As graphs that share their memory do, a replay spoils what graphs that were recorded later have left.
    `fails`: why recording fails, after the work was run. `seconds`: what timing is to show.
    """

    def __init__(self, fails: str | None = None, seconds: Seconds | None = None) -> None:
        self._fails = fails
        self._seconds = seconds or Seconds(host=1.0, device=1.0)
        self.num_replayed = 0
        self.recorded: list[FakeGraph] = []

    @property
    def num_recorded(self) -> int:
        return len(self.recorded)

    def record(self, work: Callable[[], Any]) -> Any:
        made = work()
        if self._fails is not None:
            raise CaptureFailed(self._fails)
        self.recorded.append(FakeGraph(self, work, made))
        return self.recorded[-1], made

    def timed(self, work: Callable[[], Any]) -> Any:
        return work(), self._seconds


class FakeGraph:
    def __init__(self, graphs: FakeGraphs, work: Callable[[], Any], made: Any) -> None:
        self._graphs = graphs
        self._work = work
        self._made = made
        self._is_first = True

    def replay(self) -> None:
        self._graphs.num_replayed += 1
        for later in self._graphs.recorded[self._graphs.recorded.index(self) + 1 :]:
            _spoil(later._made)
        if not self._is_first:  # recording has run it
            _copy(self._work(), self._made)
        self._is_first = False


def _copy(new: Any, old: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif isinstance(old, Mapping):
        _copy(list(new.values()), list(old.values()))
    elif isinstance(old, list | tuple):
        for a, b in zip(new, old, strict=True):
            _copy(a, b)


def _spoil(old: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.fill_(float("nan"))
    elif isinstance(old, Mapping):
        _spoil(list(old.values()))
    elif isinstance(old, list | tuple):
        for item in old:
            _spoil(item)


def both(case: Case, **settings: Any) -> tuple[Outcome, FakeGraphs]:
    """The run with graphs, once it was seen to end as the one without."""
    graphs = FakeGraphs()
    captured, plain = case.run(graphs, **settings), case.run(**settings)
    assert captured.digest == plain.digest
    return captured, graphs
