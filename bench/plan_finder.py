"""The micro-batch finder against trying everything: `python -m bench.plan_finder`, for three models on this device.

All sizes, powers of two and their middle, take turns. The fastest of many noisy medians looks faster than it is, so
that size and the finder's choice then take turns by themselves: the ratio is its time per sample over that of the
choice. On a GPU also: ten out-of-memory errors, after each of which the memory is free again and training goes on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models import LanguageModel, mlp
from paceline import Runtime, Trainer
from paceline.core.world import World
from paceline.data.sources.base import as_source
from paceline.run.micro_batch_finder import Trials, candidates, replica_for_trials

NUM_TURNS, NUM_DUELS = 5, 11
HOPELESS = 1.5  # sizes this much slower than the fastest take no further turns
NUM_ERRORS = 10
TOO_MANY = 1 << 11  # samples, for the memory that is left by MEMORY_PART
MEMORY_PART = 0.1


class Images(nn.Module):
    """A CNN over 3 x 64 x 64 images, with its loss."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in itertools.pairwise((3, *widths))]
        last = nn.Linear(widths[-1], 10)
        self.body = nn.Sequential(*itertools.chain(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)

    def forward(self, images: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(images), images.new_zeros(len(images), dtype=torch.long))


@dataclass(frozen=True)
class Subject:
    make: Callable[[], Any]
    loss_of: Callable[[Any, Any], Tensor]
    data: Tensor
    global_batch: int


def own_loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def mean_square(model: Any, x: Tensor) -> Tensor:
    return own_loss(model, x).square().mean()


def tokens(num_samples: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (num_samples, length), generator=torch.Generator().manual_seed(0))


def subjects(is_gpu: bool) -> dict[str, Subject]:
    if is_gpu:
        gpt2 = partial(LanguageModel, vocabulary=50257, length=512, width=768, num_layers=12, num_heads=12)
        return {
            "mlp": Subject(lambda: mlp(1024, 4096, 4096, 10), mean_square, torch.randn(4096, 1024), 6144),
            "cnn": Subject(lambda: Images(64, 128, 256, 512), own_loss, torch.randn(1024, 3, 64, 64), 1536),
            "gpt2": Subject(gpt2, own_loss, tokens(256, 512, 50257), 96),
        }
    transformer = partial(LanguageModel, vocabulary=1000, length=64, width=128, num_layers=2)
    return {
        "mlp": Subject(lambda: mlp(256, 512, 512, 10), mean_square, torch.randn(768, 256), 768),
        "cnn": Subject(lambda: Images(16, 32), own_loss, torch.randn(96, 3, 64, 64), 96),
        "transformer": Subject(transformer, own_loss, tokens(96, 64, 1000), 96),
    }


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


@contextmanager
def trials_of(subject: Subject) -> Iterator[Trials]:
    runtime = Runtime(threads=1)
    with replica_for_trials(subject.make, make_optimizer, World.from_environment(), False, runtime) as (replica, link):
        source = as_source(subject.data, collate_fn=None, seed=0)
        yield Trials(replica, subject.loss_of, source, link.world.device)


def fastest_size(trials: Trials, global_batch: int) -> int:
    """By the medians of all sizes that fit."""
    turns: dict[int, list[float]] = {}
    for turn in range(NUM_TURNS):
        best = min((min(each) for each in turns.values()), default=0.0)
        for size in candidates(global_batch):
            if turn and (size not in turns or min(turns[size]) > HOPELESS * best):
                continue
            if (seconds := trials.seconds_per_sample(size)) is None:
                break
            turns.setdefault(size, []).append(seconds)
    medians = {size: statistics.median(each) for size, each in turns.items() if len(each) == NUM_TURNS}
    return min(medians, key=medians.__getitem__)


def compare(subject: Subject) -> tuple[int, int, float, float]:
    """The finder's choice, the best size, and the seconds per sample of both."""
    found = Trainer.find_micro_batch(
        subject.make,
        make_optimizer,
        subject.loss_of,
        data=subject.data,
        global_batch=subject.global_batch,
        runtime=Runtime(threads=1),
    )
    print(found, file=sys.stderr, flush=True)
    chosen = found.micro_batch
    with trials_of(subject) as trials:
        best = fastest_size(trials, subject.global_batch)
        duels = [[trials.seconds_per_sample(size) or math.inf for size in (chosen, best)] for _ in range(NUM_DUELS)]
    chosen_s, best_s = map(statistics.median, zip(*duels, strict=True))
    return chosen, best, chosen_s, best_s


def survived(subject: Subject) -> int:
    """Attempts after which the memory is as before and training goes on."""
    count = 0
    with trials_of(subject) as trials:
        assert trials.seconds_per_sample(1) is not None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(NUM_ERRORS):
            is_refused = trials.seconds_per_sample(TOO_MANY) is None
            is_free = torch.cuda.memory_allocated() <= before + (1 << 20)
            count += is_refused and is_free and trials.seconds_per_sample(1) is not None
    return count


def rows() -> Iterator[tuple[str, float, float]]:
    """A name, the best size's seconds per sample, and those of the finder's choice."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_per_process_memory_fraction(MEMORY_PART)  # so that sizes that do not fit are found in seconds
    measured = subjects(is_gpu)
    for name, subject in measured.items():
        chosen, best, chosen_s, best_s = compare(subject)
        yield f"finder, {name}: {chosen}, best {best}", best_s, chosen_s
    if is_gpu:
        print(f"out-of-memory errors survived: {survived(measured['gpt2'])} of {NUM_ERRORS}")


def main() -> None:
    torch.set_num_threads(1)
    for name, best_s, chosen_s in rows():
        print(f"{name:<50} {1e3 * best_s:>10.4f} ms {1e3 * chosen_s:>10.4f} ms {best_s / chosen_s:>7.3f}", flush=True)


if __name__ == "__main__":
    main()
