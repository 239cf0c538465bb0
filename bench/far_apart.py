"""What workers far apart learn: two tasks with unlike data, models and optimizers.

"markov" is a fixed random Markov source, learnt by a transformer with AdamW. "text" is the source code of Python's
standard library, byte by byte, learnt by a convolutional network with BatchNorm and SGD with momentum.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models import LanguageModel

LENGTH = 64
VOCABULARY = 1000
SUCCESSOR_ODDS = (0.5, 0.25, 0.125, 0.125)  # of the tokens that may follow a token
NUM_HELD_OUT = 512
SOURCES = ("markov", "text")


@dataclass(frozen=True)
class Task:
    """Every step has one micro-batch per worker; with averaging replicas meet after `every` steps."""

    source: str
    width: int
    num_layers: int
    micro_batch: int
    every: int
    num_samples: int
    num_hosts: int = 2
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} is unknown: choose one of {', '.join(SOURCES)}")
        if self.num_hosts < 2:
            raise ValueError(f"hosts={self.num_hosts} have no link: choose hosts >= 2")
        if self.num_samples < self.global_batch or self.num_samples % self.global_batch:
            raise ValueError(
                f"samples={self.num_samples} are no whole steps of {self.global_batch}: "
                f"choose a multiple of {self.global_batch}"
            )

    @property
    def global_batch(self) -> int:
        return self.num_hosts * self.micro_batch

    def make_model(self) -> nn.Module:
        """The same weights every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            if self.source == "text":
                return ByteModel(self.width, self.num_layers)
            return LanguageModel(vocabulary=VOCABULARY, length=LENGTH, width=self.width, num_layers=self.num_layers)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.source == "text":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-3)

    def training_tokens(self) -> Tensor:
        return _tokens(self.source)(self.num_samples, 1)

    def held_out_tokens(self) -> Tensor:
        return _tokens(self.source)(NUM_HELD_OUT, 2)

    @torch.no_grad()
    def loss_of(self, model: nn.Module) -> float:
        """On samples held out."""
        model.eval()
        return statistics.fmean(model(batch).item() for batch in self.held_out_tokens().split(64))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.make_model().parameters())

    def settings(self) -> dict[str, Any]:
        """What a result says about how it came about."""
        optimizer = self.make_optimizer([nn.Parameter(torch.zeros(1))])
        return {
            **asdict(self),
            "global_batch": self.global_batch,
            "parameters": self.num_parameters,
            "length": LENGTH,
            "optimizer": f"{type(optimizer).__name__}, lr {optimizer.defaults['lr']}",
            "backend": "gloo",
            "threads_per_worker": 1,
        }


class ByteModel(nn.Module):
    """Causal convolutions: bytes (batch, length) to the mean loss of predicting each next byte."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.ConstantPad1d((2 << number, 0), 0.0),
                nn.Conv1d(width, width, 3, dilation=1 << number, bias=False),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            )
            for number in range(num_layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden.transpose(1, 2))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(source: str) -> Callable[[int, int], Tensor]:
    return markov_tokens if source == "markov" else text_tokens


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


def text_tokens(num_samples: int, seed: int) -> Tensor:
    """Pieces of the modules of Python's standard library. Every eighth module is held out, for seed 2."""
    text = _library_text(is_held_out=seed == 2)
    starts = torch.randint(len(text) - LENGTH, (num_samples,), generator=torch.Generator().manual_seed(seed))
    return text[starts[:, None] + torch.arange(LENGTH)].long()


@cache
def _library_text(*, is_held_out: bool) -> Tensor:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for number, path in enumerate(paths) if (number % 8 == 0) == is_held_out]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)
