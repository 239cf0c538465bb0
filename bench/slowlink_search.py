"""Losses of many settings of the averaging strategy, side by side, on the CPU or on one GPU. Each is a run of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bench.far_apart import Task
from bench.workers import gloo_group, run_workers

Setting = dict[str, Any]  # of a run: {} is synchronous


def final_loss(task: Task, setting: Setting, device: str) -> float:
    import paceline as pl

    strategy: Any = "gradients"
    if setting:
        lr, momentum = setting["lr"], setting["momentum"]
        strategy = pl.Averaging(
            every=setting["every"],
            overlap=True,
            fragments=max(1, setting["every"] // setting["under_way"]),
            compress=setting["compress"],
            first_step=setting.get("first_step", 0),
            outer=None
            if lr is None
            else lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0),
        )
    with pl.Trainer.setup(
        task.make_model,
        task.make_optimizer,
        data=task.training_tokens(),
        micro_batch=task.micro_batch,
        global_batch=task.global_batch,
        balancing=pl.Balancing(shares="equal"),
        strategy=strategy,
        seed=task.seed,
        device=None if device == "cuda" else "cpu",
        runtime=pl.Runtime(threads=1, quiet=True, capture="off", backend="gloo"),
    ) as trainer:
        for epoch in trainer.epochs(1):
            for batch in epoch:
                trainer.backward(trainer.model(batch))
                trainer.step()
        return float(trainer.evaluate(task.held_out_tokens(), lambda model, batch: model(batch)))


def worker(jobs: list[tuple[Task, Setting]], device: str, until_s: float, path: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    with gloo_group():
        for task, setting in jobs:
            is_over = torch.tensor([time.monotonic() > until_s])
            distributed.broadcast(is_over, 0)
            if is_over.item():
                return
            begun_s = time.monotonic()
            loss = final_loss(task, setting, device)
            if distributed.get_rank() == 0:
                fields = {
                    "source": task.source,
                    "width": task.width,
                    "samples": task.num_samples,
                    "hosts": task.num_hosts,
                    "seed": task.seed,
                    **setting,
                    "loss": loss,
                    "s": round(time.monotonic() - begun_s, 1),
                }
                with open(path, "a") as file:
                    file.write(json.dumps(fields) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True, help="a JSON list of [task fields, [settings]]")
    options = parser.parse_args()
    jobs: dict[int, list[tuple[Task, Setting]]] = {}
    for fields, settings in json.loads(options.plan.read_text()):
        task = Task(**fields)
        jobs.setdefault(task.num_hosts, []).extend((task, setting) for setting in settings)
    until_s = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Hosts of two and of three share the slots by their number of jobs; a chain of jobs has one group of workers.
    total = sum(map(len, jobs.values()))
    chains = []
    for hosts, own in jobs.items():
        count = max(1, round(options.at_once * len(own) / total))
        chains += [(hosts, own[number::count]) for number in range(count)]

    def run(chain: tuple[int, list[Any]]) -> None:
        try:
            run_workers(worker, chain[0], chain[1], options.device, until_s, str(options.out))
        except RuntimeError as error:
            print(str(error)[-2000:], file=sys.stderr, flush=True)

    with ThreadPoolExecutor(len(chains)) as pool:
        list(pool.map(run, chains))


if __name__ == "__main__":
    main()
