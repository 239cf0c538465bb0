"""Predictions of `paceline plan` on a GPU, each made before its measurement, and the micro-batch finder there.

    python -m bench.plan_gpu [--part alone mps finder] [--json]

alone: a profile of small steps predicts larger ones. mps: two workers with 70% and 30% of the multiprocessors; a
profile of small common steps predicts large ones. finder: its choice against all sizes, for three models, and ten
out-of-memory errors survived. Takes about two minutes; needs no pydantic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import plan_finder
from bench.models import LanguageModel
from bench.mps import mps_daemon
from bench.workers import run_workers
from paceline import Runtime, Trainer
from paceline.plan.predict import Device, Exchange, Hardware, Host, Workload, predict
from paceline.plan.profile import Profile, StepTimes
from paceline.run import probe

PERCENTAGES = (70, 30)
LENGTH, VOCABULARY = 512, 50257
MICRO_BATCH = 8
SMALL, LARGE = 8, 32  # micro-batches per step: profiled, and predicted
MEASURED_S = 4.0

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


PARTS = {"alone": alone, "mps": mps, "finder": plan_finder.rows}


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
