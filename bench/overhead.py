"""Microseconds per step on one CPU worker: what a tool adds to the step itself.

A tiny MLP makes the step short, so that the tool's own work shows. The limit is a bare PyTorch loop over tensors;
peers read through a DataLoader, as they expect, and `bare loop, DataLoader` shows how much of their time is that.
Everyone trains the same model with the same optimizer on the same samples (Paceline fuses it by itself; `bare loop,
fused` shows a bare loop whose author did), one intra-op thread, no logging,
checkpoints, progress bars or validation. Set-up is never timed: a loop that we own is timed from outside after some
untimed steps; inside a `fit` that we do not own, a callback takes the time after the same number of steps and again
after the last.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from bench.harness import Contestant, Result, alternate, isolated, missing_package
from bench.hugging_face import tell_steps, training_alone
from bench.models import mlp

WIDTHS = (32, 64, 64, 10)
BATCH = 32
NUM_SAMPLES = 8192
WARMUP_STEPS = 25
ENDLESS = 1_000_000


def make_model() -> nn.Sequential:
    return mlp(*WIDTHS)


def make_optimizer(parameters: Any, **choice: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **choice)


@dataclass(frozen=True)
class Task:
    """The samples, how a DataLoader reads them, how many steps of a turn are timed, and where a tool may write."""

    x: Tensor
    y: Tensor
    num_steps: int
    by_sample: bool
    folder: str

    @classmethod
    def make(cls, num_steps: int, *, by_sample: bool, folder: str) -> Task:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(NUM_SAMPLES, WIDTHS[0], generator=generator)
        y = torch.randint(WIDTHS[-1], (NUM_SAMPLES,), generator=generator)
        return cls(x, y, num_steps, by_sample, folder)

    def dataset(self) -> Dataset[Any]:
        return TensorDataset(self.x, self.y) if self.by_sample else Columns(self.x, self.y)

    def collate(self, batch: Any) -> Any:
        return default_collate(batch) if self.by_sample else batch

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset(), batch_size=BATCH, shuffle=True, collate_fn=self.collate)

    def timed(self, loop: Iterator[None]) -> Contestant:
        """A contestant out of an endless loop that yields after each step."""

        def turn() -> float:
            for _ in itertools.islice(loop, WARMUP_STEPS):
                pass
            start = time.perf_counter()
            for _ in itertools.islice(loop, self.num_steps):
                pass
            return (time.perf_counter() - start) / self.num_steps * 1e6

        return turn


class Columns(Dataset[Any]):
    """Tensors as a map-style data set that a DataLoader reads a batch at a time, the fastest way it has."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


class StepClock:
    """Microseconds per step between the end of the last untimed step and the end of the last step of a `fit`."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.last_step = WARMUP_STEPS + num_steps
        self.start = self.end = 0.0

    def step_ended(self, step: int) -> None:
        if step == WARMUP_STEPS:
            self.start, self.end = time.perf_counter(), math.nan  # a fit that ends early has no result
        elif step == self.last_step:
            self.end = time.perf_counter()

    @property
    def per_step_us(self) -> float:
        return (self.end - self.start) / self.num_steps * 1e6


def bare(task: Task, **choice: Any) -> Contestant:
    model = make_model()
    optimizer = make_optimizer(model.parameters(), **choice)

    def loop() -> Iterator[None]:
        while True:
            order = torch.randperm(NUM_SAMPLES)
            for first in range(0, NUM_SAMPLES, BATCH):
                indices = order[first : first + BATCH]
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(model(task.x[indices]), task.y[indices]).backward()
                optimizer.step()
                yield

    return task.timed(loop())


def bare_with_loader(task: Task) -> Contestant:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    loader = task.loader()

    def loop() -> Iterator[None]:
        while True:
            for x, y in loader:
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                yield

    return task.timed(loop())


def paceline(task: Task) -> Contestant:
    import paceline as pl

    def loop() -> Iterator[None]:
        setup = pl.Trainer.setup(
            make_model, make_optimizer, data=(task.x, task.y), global_batch=BATCH, runtime=pl.Runtime(threads=1)
        )
        with setup as trainer:
            for epoch in trainer.epochs(ENDLESS):
                for batch in epoch:
                    loss = functional.cross_entropy(trainer.model(batch.x), batch.y)
                    trainer.backward(loss)
                    trainer.step()
                    yield

    return task.timed(loop())


def accelerate(task: Task) -> Contestant:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model.parameters()), task.loader())

    def loop() -> Iterator[None]:
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                yield

    return task.timed(loop())


def fabric(task: Task) -> Contestant:
    from lightning.fabric import Fabric

    runtime = Fabric(accelerator="cpu", devices=1)
    runtime.launch()
    plain = make_model()
    model, optimizer = runtime.setup(plain, make_optimizer(plain.parameters()))
    loader = runtime.setup_dataloaders(task.loader())

    def loop() -> Iterator[None]:
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                runtime.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                yield

    return task.timed(loop())


def lightning(task: Task) -> Contestant:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step_ended(self.global_step)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it sets its own level when imported
    module, loader = Module(), task.loader()
    clock = StepClock(task.num_steps)

    def turn() -> float:
        # barebones is Lightning's own switch for measuring its overhead: everything optional is off.
        Trainer(barebones=True, accelerator="cpu", devices=1, max_steps=clock.last_step).fit(module, loader)
        return clock.per_step_us

    return turn


def hugging_face(task: Task) -> Contestant:
    from transformers import Trainer

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(self.model(x), labels)}

    def collate(batch: Any) -> dict[str, Tensor]:
        x, labels = task.collate(batch)
        return {"x": x, "labels": labels}

    clock = StepClock(task.num_steps)
    model = WithLoss()
    arguments = training_alone(task.folder, clock.last_step, BATCH, use_cpu=True, dataloader_pin_memory=False)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=task.dataset(),
        data_collator=collate,
        optimizers=(make_optimizer(model.parameters()), None),
    )
    tell_steps(trainer, clock.step_ended)

    def turn() -> float:
        trainer.train()
        return clock.per_step_us

    return turn


class Peer(NamedTuple):
    build: Callable[[Task], Contestant]
    packages: tuple[str, ...] = ()


PEERS = {
    "bare loop, fused": Peer(partial(bare, fused=True)),
    "bare loop, DataLoader": Peer(bare_with_loader),
    "Accelerate": Peer(accelerate, ("accelerate",)),
    "Fabric": Peer(fabric, ("lightning",)),
    "Lightning": Peer(lightning, ("lightning",)),
    "HF Trainer": Peer(hugging_face, ("transformers", "accelerate")),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=51, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=256, help="timed steps per turn (default: %(default)s)")
    parser.add_argument(
        "--loader",
        choices=["batches", "samples"],
        default="batches",
        help="what a DataLoader fetches at a time: a batch, its fastest way (default), or a sample, its usual one",
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="default: all")


def measure(builders: Mapping[str, Callable[[], Contestant]], num_turns: int) -> dict[str, list[float]]:
    contestants = {name: isolated(build) for name, build in builders.items()}
    alternate(contestants, 1)  # lazy imports and first allocations happen here
    # The peers' imports leave 250,000 objects that a run with one tool would not have: keep them out of the
    # collections that a turn triggers.
    gc.collect()
    gc.freeze()
    try:
        return alternate(contestants, num_turns)
    finally:
        gc.unfreeze()


def run(options: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    skipped = {name: reason for name in options.peers if (reason := missing_package(*PEERS[name].packages))}
    builders = {"bare loop": bare, "paceline": paceline}
    builders |= {name: PEERS[name].build for name in options.peers if name not in skipped}
    with tempfile.TemporaryDirectory() as folder:
        task = Task.make(options.steps, by_sample=options.loader == "samples", folder=folder)
        measurements = measure({name: partial(build, task) for name, build in builders.items()}, options.turns)

    return Result.of(
        "overhead",
        "microseconds per step",
        measurements,
        ours="paceline",
        limit="bare loop",
        better="lower",
        settings={
            "model": "-".join(map(str, WIDTHS)),
            "batch": BATCH,
            "optimizer": "SGD with momentum",
            "samples": NUM_SAMPLES,
            "loader_fetches": options.loader,
            "steps_per_turn": options.steps,
            "untimed_steps_per_turn": WARMUP_STEPS,
            "threads": 1,
        },
        packages=("accelerate", "lightning", "transformers"),
        skipped=skipped,
    )
