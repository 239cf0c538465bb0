"""Two workers far apart: what they learn, and the ways in which they may train together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.models import LanguageModel
from bench.namespaces import NUM_HOSTS

if TYPE_CHECKING:
    from paceline import StepRecord, Trainer

VOCABULARY, LENGTH = 1000, 64
SUCCESSOR_ODDS = (0.5, 0.25, 0.125, 0.125)  # of the tokens that may follow a token
NUM_HELD_OUT = 512
LEARNING_RATE = 1e-3
OVERHEAD_TARGET = 0.1
# The timed runs go several times over the samples in one epoch: at its end replicas would meet out of turn.
SPEED_REPEATS = 8
ENDLESS = 1_000_000

NO_TALK, DDP, GRADIENTS, CADENCE = "no talk", "torch DDP", "gradients", "cadence"
AVERAGING, BF16, OUTER_BF16 = "averaging", "averaging, bf16", "averaging, outer, bf16"
OVERLAPPED, OVERLAPPED_BF16 = "overlapped averaging", "overlapped averaging, bf16"
BARE, SYNCHRONOUS = (NO_TALK, DDP), (DDP, GRADIENTS)
CONTESTANTS = (NO_TALK, *SYNCHRONOUS, CADENCE, AVERAGING, BF16, OUTER_BF16, OVERLAPPED, OVERLAPPED_BF16)


@dataclass(frozen=True)
class Task:
    """Every step has one micro-batch per worker; with averaging replicas meet after `every` steps."""

    mbit: float
    width: int
    num_layers: int
    micro_batch: int
    every: int
    num_samples: int
    num_turns: int

    def __post_init__(self) -> None:
        if not self.mbit > 0:
            raise ValueError(f"mbit={self.mbit} lets nothing pass: choose mbit > 0")
        if self.num_turns < 2:  # a step of the cadence tells what the exchange before it took
            raise ValueError(f"turns={self.num_turns} cannot tell what a cadence costs: choose turns >= 2")
        if self.num_samples < self.global_batch or self.num_samples % self.global_batch:
            raise ValueError(
                f"samples={self.num_samples} are no whole steps of {self.global_batch}: "
                f"choose a multiple of {self.global_batch}"
            )
        num_needed = (self.num_turns + 2) * self.every * self.global_batch
        if self.num_samples * SPEED_REPEATS < num_needed:
            raise ValueError(
                f"samples={self.num_samples} are too few for turns={self.num_turns} of {self.every} steps: choose at "
                f"least {math.ceil(num_needed / SPEED_REPEATS)}, or fewer turns"
            )

    @property
    def global_batch(self) -> int:
        return NUM_HOSTS * self.micro_batch

    def make_model(self) -> nn.Module:
        """The same weights every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return LanguageModel(vocabulary=VOCABULARY, length=LENGTH, width=self.width, num_layers=self.num_layers)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.make_model().parameters())

    def settings(self) -> dict[str, Any]:
        """What a result says about how it came about."""
        return {
            "workers": NUM_HOSTS,
            **asdict(self),
            "global_batch": self.global_batch,
            "parameters": self.num_parameters,
            "vocabulary": VOCABULARY,
            "length": LENGTH,
            "optimizer": f"AdamW, lr {LEARNING_RATE}",
            "overhead_target": OVERHEAD_TARGET,
            "backend": "gloo",
            "threads_per_worker": 1,
        }


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def outer_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def markov_tokens(num_samples: int, seed: int) -> Tensor:
    """Samples of one source, in which four tokens may follow a token, each with its own odds."""
    successors = torch.randint(
        VOCABULARY, (VOCABULARY, len(SUCCESSOR_ODDS)), generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(seed)
    picks = torch.multinomial(torch.tensor(SUCCESSOR_ODDS), num_samples * LENGTH, replacement=True, generator=generator)
    tokens = [torch.randint(VOCABULARY, (num_samples,), generator=generator)]
    for pick in picks.view(LENGTH, num_samples)[1:]:
        tokens.append(successors[tokens[-1], pick])
    return torch.stack(tokens, dim=1)


def training_tokens(task: Task) -> Tensor:
    return markov_tokens(task.num_samples, seed=1)


def held_out_tokens() -> Tensor:
    return markov_tokens(NUM_HELD_OUT, seed=2)


def least_loss() -> float:
    """Of whoever knows the source."""
    return -sum(odds * math.log(odds) for odds in SUCCESSOR_ODDS)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return statistics.fmean(model(batch).item() for batch in held_out_tokens().split(64))


def bare(task: Task, model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Once over this worker's half of the samples; yields after each step."""
    optimizer = make_optimizer(model.parameters())
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    for mine in order[distributed.get_rank() :: NUM_HOSTS].split(task.micro_batch):
        optimizer.zero_grad(set_to_none=True)
        model(tokens[mine]).backward()
        optimizer.step()
        yield


def bare_model(task: Task, name: str) -> nn.Module:
    model = task.make_model()
    if name == NO_TALK:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def trainer_of(task: Task, name: str, tokens: Tensor) -> Trainer:
    import paceline as pl

    averaging = partial(pl.Averaging, every=task.every)
    strategies: dict[str, Callable[[], Any]] = {
        GRADIENTS: lambda: "gradients",
        CADENCE: lambda: pl.Cadence(overhead_target=OVERHEAD_TARGET),
        AVERAGING: averaging,
        BF16: partial(averaging, transfer="bf16"),
        OUTER_BF16: partial(averaging, transfer="bf16", outer=outer_optimizer),
        OVERLAPPED: partial(averaging, overlap=True),
        OVERLAPPED_BF16: partial(averaging, overlap=True, transfer="bf16"),
    }
    equal = pl.Balancing(shares="equal")
    division: dict[str, Any] = {} if name == CADENCE else {"global_batch": task.global_batch, "balancing": equal}
    return pl.Trainer.setup(
        task.make_model,
        make_optimizer,
        data=tokens,
        micro_batch=task.micro_batch,
        strategy=strategies[name](),
        runtime=pl.Runtime(threads=1),
        **division,
    )


def steps_of(trainer: Trainer, num_epochs: int) -> Iterator[StepRecord]:
    for epoch in trainer.epochs(num_epochs):
        for batch in epoch:
            trainer.backward(trainer.model(batch))
            if record := trainer.step():
                yield record


def timed_loop(task: Task, name: str, see: Callable[[StepRecord], object]) -> Iterator[int]:
    """Trains on and on. Yields after each step the samples it took: of all workers, unless they never talk.

    `see` is called with the record of every step, where there is one.
    """
    tokens = training_tokens(task).repeat(SPEED_REPEATS, 1)
    if name in BARE:
        for _ in bare(task, bare_model(task, name), tokens):
            yield task.micro_batch if name == NO_TALK else task.global_batch
        return
    with trainer_of(task, name, tokens) as trainer:
        for record in steps_of(trainer, ENDLESS):
            see(record)
            yield sum(record.shares) * task.micro_batch


def final_loss(task: Task, name: str) -> float:
    tokens = training_tokens(task)
    if name in BARE:
        model = bare_model(task, name)
        for _ in bare(task, model, tokens):
            pass
        return loss_of(model)
    with trainer_of(task, name, tokens) as trainer:
        for _ in steps_of(trainer, num_epochs=1):
            pass
        loss = trainer.evaluate(held_out_tokens(), lambda model, batch: model(batch))
        assert isinstance(loss, float)
        return loss
