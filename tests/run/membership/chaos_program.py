"""A run whose workers are disturbed at random, and all that must be the same as if they were not.

Shuffle, dropout, BatchNorm, AdamW with a schedule, an average of the weights, state that the user registers,
checkpoints and evaluation inside the epochs. Each worker leaves files in the run's folder, which outlive it: a board
that others look at, and what it has seen of losses, evaluations and samples.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from grouping import grouped
from models import digest, vectors
from torch import nn
from torch.nn import functional

import paceline as pl
from paceline.sync.gradients import exchange

# Ten steps of four micro-batches of four, and one of two: 11 steps in an epoch, the last sample group smaller.
NUM_SAMPLES = 167
STEPS_PER_EPOCH = 11
SAVE_EVERY, EVALUATE_EVERY = 5, 7

EXIT_SIGNAL, ERROR_SIGNAL = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
TRAINING, EVALUATING = 0, 1
HURRY_FILE = "hurry"
CUDA_ERROR = "CUDA error: an illegal memory access was encountered"

# By variant: what `Trainer.setup` gets beside the rest.
VARIANTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "dispatched": {"feed": "dispatched"},
    "stream": {"shuffle_buffer": 24},
    "readers": {"readers": 1},
    "unsaved": {"checkpoints": None},
    "buckets": {},
}
SMALL_BUCKET_BYTES = 2048  # of the variant "buckets": several, the first of which leaves during backward


@dataclass(frozen=True)
class Program:
    """`folder` is the run's own; `pause_s` is spent in each step, unless told to hurry."""

    folder: str
    variant: str = "sharded"
    num_epochs: int = 20
    exact: bool = True
    pause_s: float = 0.0

    @property
    def num_steps(self) -> int:
        return self.num_epochs * STEPS_PER_EPOCH

    def reset(self) -> None:
        Path(self.folder).mkdir(parents=True)


class Board:
    """What a worker is doing, in memory that other processes see: its last completed step, its phase and its rank."""

    _FORM = struct.Struct("qqq")

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        if is_new:
            path.with_suffix(".new").write_bytes(bytes(self._FORM.size))
            path.with_suffix(".new").rename(path)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._FORM.size)

    def write(self, step: int, phase: int, rank: int) -> None:
        self._FORM.pack_into(self._memory, 0, step, phase, rank)

    def read(self) -> tuple[int, int, int]:
        step, phase, rank = self._FORM.unpack_from(self._memory)
        return step, phase, rank


class Journal:
    """Lines of one worker that are complete, or not there at all, when it is killed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *values: Any) -> None:
        os.write(self._file, f"{json.dumps(values)}\n".encode())

    @staticmethod
    def read(folder: Path, name: str) -> list[list[Any]]:
        """The lines of all workers that lived."""
        return [json.loads(line) for path in sorted(folder.glob(f"{name}-*")) for line in path.read_text().splitlines()]


class Tally:
    """State of the user's: a sum over the steps and the random numbers drawn between them."""

    def __init__(self) -> None:
        self.total, self.draws = 0.0, torch.zeros(3)

    def add(self, loss: float) -> None:
        self.total += loss
        self.draws = self.draws * 0.9 + torch.rand(3)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.draws = state["total"], state["draws"].clone()


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample's first number is its own."""

    def __init__(self) -> None:
        x, self._y = vectors(NUM_SAMPLES)
        self._x = torch.cat([torch.arange(float(NUM_SAMPLES))[:, None], x], 1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[number], self._y[number]


class Stream:
    """The same samples one after the other."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = Samples()
        return (samples[number] for number in range(NUM_SAMPLES))


class Model(nn.Module):
    """Calls `in_backward` between the gradients of its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 4))
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x[:, 1:])
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.in_backward())
        return self.second(hidden)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


class Pauses:
    """Time for others to strike: in each step at one place of the loop, which differs between the workers."""

    PLACES = ("after the step", "before backward", "in backward", "after backward")

    def __init__(self, program: Program, trainer: pl.Trainer) -> None:
        self._pause_s = program.pause_s
        self._hurry = str(Path(program.folder) / HURRY_FILE)
        self._trainer = trainer

    def at(self, place: str) -> None:
        number = self._trainer.position.step + self._trainer.world.rank
        is_due = self._pause_s and self.PLACES[number % len(self.PLACES)] == place
        if is_due and not os.path.exists(self._hurry):  # noqa: PTH110 - in every step
            time.sleep(self._pause_s)


class Faults:
    """Lets other processes make this one fail: by its exit, or by an error that a broken GPU would raise."""

    def __init__(self) -> None:
        self._has_error = False
        signal.signal(EXIT_SIGNAL, lambda *_: os._exit(7))
        signal.signal(ERROR_SIGNAL, self._order_error)

    def _order_error(self, *_: Any) -> None:
        self._has_error = True

    def check(self) -> None:
        if self._has_error:
            raise torch.AcceleratorError(CUDA_ERROR)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Not for plain mode: where a gradient is zero but for rounding, Adam makes steps of the full learning rate."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def setup(program: Program) -> pl.Trainer:
    if program.variant == "buckets":
        exchange.BUCKET_BYTES = SMALL_BUCKET_BYTES
    checkpoints = pl.Checkpoints(Path(program.folder) / "run", every_steps=SAVE_EVERY, keep_last=2)
    settings = {"checkpoints": checkpoints, **VARIANTS[program.variant]}
    return pl.Trainer.setup(
        Model,
        make_optimizer if program.exact else partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        data=Stream() if program.variant == "stream" else Samples(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, program.num_steps),
        **grouped(
            exact=program.exact,
            seed=5,
            global_batch=16,
            micro_batch=4,
            max_grad_norm=1.0,
            ema=0.9,
            threads=1,
            quiet=True,
            **settings,
        ),
    )


def generation_of(trainer: pl.Trainer) -> int:
    generation = getattr(trainer.run.communicator, "generation", None)
    return 0 if generation is None else int(generation.number)


def train(program: Program) -> None:
    """On one worker; what it ends with is in its files."""
    folder, faults = Path(program.folder), Faults()
    board = Board(folder / f"board-{os.getpid()}", is_new=True)
    losses, evaluations, samples = (Journal(folder, name) for name in ("losses", "evaluations", "samples"))
    Journal(folder, "starts").write(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    held_out = vectors(37, seed=9)
    held_out = torch.cat([torch.zeros(37, 1), held_out[0]], 1), held_out[1]
    with setup(program) as trainer:
        tally, pauses = Tally(), Pauses(program, trainer)
        trainer.model.in_backward = partial(pauses.at, "in backward")
        trainer.register("tally", tally)

        def after_step(record: pl.StepRecord) -> None:
            losses.write(record.step, record.loss.hex())
            tally.add(record.loss)
            board.write(record.step, TRAINING, trainer.world.rank)
            pauses.at("after the step")

        def evaluate(record: pl.StepRecord) -> None:
            board.write(record.step, EVALUATING, trainer.world.rank)
            faults.check()
            with trainer.ema_weights():
                value = trainer.evaluate(held_out, loss_of)
            evaluations.write(record.step, float(value).hex())  # type: ignore[arg-type]
            board.write(record.step, TRAINING, trainer.world.rank)

        trainer.every(1, after_step)
        trainer.every(EVALUATE_EVERY, evaluate)
        for epoch in trainer.epochs(program.num_epochs):
            for batch in epoch:
                numbers = batch.x[:, 0].int().tolist()
                samples.write(trainer.position.step, generation_of(trainer), os.getpid(), numbers)
                faults.check()
                pauses.at("before backward")
                trainer.backward(loss_of(trainer.model, batch))
                pauses.at("after backward")
                trainer.step()
        with trainer.ema_weights():
            average = digest(trainer.model.state_dict())
        states = [each.state_dict() for each in (trainer.model, trainer.optimizer, trainer.scheduler, tally)]
        weights = torch.cat([value.double().flatten() for value in trainer.model.state_dict().values()]).tolist()
        Journal(folder, "end").write(digest(*states, average), trainer.position.step, weights)


@dataclass(frozen=True)
class Outcome:
    """What a run ended with, over all workers that lived."""

    digest: str  # of everything below and of all that a run has
    losses: tuple[float, ...]
    evaluations: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def read(cls, program: Program) -> Outcome:
        """`AssertionError` if workers contradict each other, a step is missing, or a sample was not trained once."""
        folder = Path(program.folder)
        restarts = max(number for (number,) in Journal.read(folder, "starts"))
        assert restarts == 0, f"all workers were restarted {restarts} times"
        ends = Journal.read(folder, "end")
        assert ends, "no worker reached the end"
        assert len({(own, step) for own, step, _ in ends}) == 1, f"workers ended differently: {[e[:2] for e in ends]}"
        own, step, weights = ends[0]
        assert step == program.num_steps
        losses = _by_step(Journal.read(folder, "losses"), range(1, program.num_steps + 1), "loss")
        due = range(EVALUATE_EVERY, program.num_steps + 1, EVALUATE_EVERY)
        evaluations = _by_step(Journal.read(folder, "evaluations"), due, "evaluation")
        _check_samples(Journal.read(folder, "samples"), program)
        return cls(digest(own, losses, evaluations), losses, evaluations, tuple(weights))

    def is_close(self, other: Outcome, tolerance: float) -> bool:
        return all(
            len(own) == len(others)
            and all(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(own, others, strict=True))
            for own, others in ((self.losses, other.losses), (self.weights, other.weights))
        )


def _by_step(lines: list[list[Any]], steps: range, what: str) -> tuple[float, ...]:
    """A hook that was interrupted runs again, so that a step may be there twice; with the same number."""
    found: dict[int, set[str]] = {}
    for step, value in lines:
        found.setdefault(step, set()).add(value)
    assert sorted(found) == [*steps], f"{what} of steps {sorted(set(steps) ^ set(found))} is missing, or too much"
    different = {step: values for step, values in found.items() if len(values) > 1}
    assert not different, f"{what} differs between workers: {different}"
    return tuple(float.fromhex(*found[step]) for step in steps)


def _check_samples(lines: list[list[Any]], program: Program) -> None:
    """Every sample was trained once in every epoch.

    A step that was abandoned is begun again in a later generation, so its last one is the one that completed it. A
    worker that has a micro-batch twice in a generation repeated the step, as exact mode does on a wider grid.
    """
    last: dict[int, int] = {}
    for step, generation, _, _ in lines:
        last[step] = max(generation, last.get(step, 0))
    trained: dict[int, list[int]] = {}
    for step, generation, _, numbers in {(*line[:3], tuple(line[3])) for line in lines}:
        if generation == last[step]:
            trained.setdefault(step // STEPS_PER_EPOCH, []).extend(numbers)
    assert sorted(trained) == [*range(program.num_epochs)]
    for epoch, numbers in trained.items():
        assert sorted(numbers) == [*range(NUM_SAMPLES)], f"epoch {epoch}: {_differences(numbers)}"


def _differences(numbers: list[int]) -> str:
    missing = sorted(set(range(NUM_SAMPLES)) - set(numbers))
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    return f"samples {missing} were not trained, samples {twice} more than once"
