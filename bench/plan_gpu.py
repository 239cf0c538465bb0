"""Predictions of `paceline plan` on a GPU, each made before its measurement, and the micro-batch finder there.

    python -m bench.plan_gpu [--part alone mps finder] [--json]

alone: a profile of small steps predicts larger ones. mps: two workers with 70% and 30% of the multiprocessors; a
profile of small common steps predicts large ones. finder: its choice against all sizes, for three models, and ten
out-of-memory errors survived. Takes about two minutes; needs no pydantic.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models import LanguageModel, mlp
from bench.mps import mps_daemon
from bench.workers import run_workers
from paceline import Runtime, Trainer
from paceline.core.world import World
from paceline.data.sources.base import as_source
from paceline.plan.predict import Device, Exchange, Hardware, Host, Workload, predict
from paceline.plan.profile import Profile, StepTimes
from paceline.run import probe
from paceline.run.micro_batch_finder import Trials, candidates, replica_for_trials

PERCENTAGES = (70, 30)
LENGTH, VOCABULARY = 512, 50257
MICRO_BATCH = 8
SMALL, LARGE = 8, 32  # micro-batches per step: profiled, and predicted
MEASURED_S = 4.0
NUM_ERRORS = 10
# So that sizes that do not fit are found in seconds.
MEMORY_PART = 0.1

make_gpt2 = partial(LanguageModel, vocabulary=VOCABULARY, length=LENGTH, width=768, num_layers=12, num_heads=12)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def tokens(num_samples: int) -> Tensor:
    return torch.randint(VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(0))


def trainer_of(num_micro_batches: int) -> Trainer:
    return Trainer.setup(
        make_gpt2,
        make_optimizer,
        data=tokens(4 * LARGE * MICRO_BATCH),
        global_batch=num_micro_batches * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        runtime=Runtime(quiet=True, capture="off"),
    )


def profiled(num_micro_batches: int, num_steps: int = 8) -> tuple[Profile, StepTimes]:
    with trainer_of(num_micro_batches) as trainer:
        return probe.profile(trainer.run, trainer.step_with(trainer.model), num_steps)


def measured(num_micro_batches: int) -> float:
    """Samples per second of all workers, after some steps in which shares settle."""
    with trainer_of(num_micro_batches) as trainer:
        step = trainer.step_with(trainer.model)

        def train(num_steps: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for epoch in trainer.epochs(max_steps=trainer.position.step + num_steps):
                for batch in epoch:
                    step(batch)
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / num_steps

        train(5)
        step_s = trainer.reduce(train(2), "max")
        step_s = trainer.reduce(train(max(2, round(MEASURED_S / step_s))), "max")
        return num_micro_batches * MICRO_BATCH / step_s


def share_of_gpu(work: str) -> Any:
    """In a worker: `work` under MPS. RANK is set by `run_workers`."""
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(PERCENTAGES[int(os.environ["RANK"])])
    torch.backends.cuda.matmul.allow_tf32 = True
    return measured(LARGE) if work == "measure" else profiled(SMALL)


def workload(profile: Profile, num_micro_batches: int) -> Workload:
    return Workload(num_micro_batches, MICRO_BATCH, profile.subject.gradient_bytes)


def alone() -> Iterator[tuple[str, float, float]]:
    profile, _ = profiled(SMALL)
    for count in (2 * SMALL, LARGE):
        predicted = predict(workload(profile, count), profile.devices).samples_per_s
        yield f"alone, {count} micro-batches", predicted, measured(count)


def mps() -> Iterator[tuple[str, float, float]]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("mps: nvidia-cuda-mps-control was not found")
        return
    with mps_daemon():
        profile, together = run_workers(share_of_gpu, len(PERCENTAGES), "profile")[0]
        devices = [
            Device(f"{percentage}%", seconds, rest, host="gpu")
            for percentage, seconds, rest in zip(PERCENTAGES, together.micro_batch_s, together.rest_s, strict=True)
        ]
        exchange = Exchange.fitted(together.exchange_s, len(devices), profile.subject.gradient_bytes)
        hardware = Hardware({"gpu": Host(exchange=exchange)})
        predicted = predict(workload(profile, LARGE), devices, hardware)
        rate = run_workers(share_of_gpu, len(PERCENTAGES), "measure")[0]
        yield f"MPS 70/30, {LARGE} micro-batches, shares {predicted.shares}", predicted.samples_per_s, rate


class Images(nn.Module):
    """A small residual-free CNN over 3 x 64 x 64 images, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512)
        layers = [(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.body = nn.Sequential(*itertools.chain(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(images), images.new_zeros(len(images), dtype=torch.long))


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Tensor], Callable[[], Tensor], int]] = {
    "mlp": (
        lambda: mlp(1024, 4096, 4096, 10),
        lambda m, x: m(x).square().mean(),
        lambda: torch.randn(4096, 1024),
        6144,
    ),
    "cnn": (Images, lambda m, x: m(x), lambda: torch.randn(1024, 3, 64, 64), 1536),
    "gpt2": (make_gpt2, lambda m, x: m(x), lambda: tokens(256), 96),
}


def finder() -> Iterator[tuple[str, float, float]]:
    """Seconds per sample of the best size of all, over that of the finder's choice."""
    torch.cuda.set_per_process_memory_fraction(MEMORY_PART)
    for name, (make, loss_of, make_data, global_batch) in MODELS.items():
        data = make_data()
        found = Trainer.find_micro_batch(make, make_optimizer, loss_of, data=data, global_batch=global_batch)
        with _trials(make, loss_of, data) as trials:
            best: dict[int, float] = {}
            for size in candidates(global_batch):
                times = [trials.seconds_per_sample(size) for _ in range(2)]
                if None in times:
                    break
                best[size] = min(t for t in times if t is not None)
        yield (
            f"finder, {name}: {found.micro_batch}, best {min(best, key=best.__getitem__)}",
            min(best.values()),
            best[found.micro_batch],
        )
    print(f"out-of-memory errors survived: {survived()} of {NUM_ERRORS}")


def survived() -> int:
    """Attempts after which the memory is as before and training goes on."""
    make, loss_of, make_data, _ = MODELS["gpt2"]
    count = 0
    with _trials(make, loss_of, make_data()) as trials:
        assert trials.seconds_per_sample(1) is not None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(NUM_ERRORS):
            is_refused = trials.seconds_per_sample(1 << 11) is None
            is_free = torch.cuda.memory_allocated() <= before + (1 << 20)
            count += is_refused and is_free and trials.seconds_per_sample(1) is not None
    return count


@contextmanager
def _trials(make: Callable[[], Any], loss_of: Any, data: Tensor) -> Iterator[Trials]:
    with replica_for_trials(make, make_optimizer, World.from_environment(), False, Runtime()) as (replica, link):
        yield Trials(replica, loss_of, as_source(data, collate_fn=None, seed=0), link.world.device)


PARTS = {"alone": alone, "mps": mps, "finder": finder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = []
    for part in options.part:
        start = time.perf_counter()
        for name, predicted, seen in PARTS[part]():
            rows.append({"name": name, "predicted": predicted, "measured": seen, "ratio": predicted / seen})
            print(f"{name:<50} {predicted:>12.5g} {seen:>12.5g} {predicted / seen:>7.3f}", flush=True)
        print(f"{part} took {time.perf_counter() - start:.0f} s", flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
