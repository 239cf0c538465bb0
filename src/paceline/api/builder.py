"""`Trainer.builder`: Paceline owns the loop and trains in the background."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.api.builder_worker import WorkerTask, train
from paceline.api.handle import Handle
from paceline.api.trainer import Trainer
from paceline.api.unknown_settings import check_group, explanation
from paceline.core.processes import is_worker
from paceline.core.settings import check_value
from paceline.core.world import World, choose_device, choose_devices
from paceline.data.array_loader import ArrayLoader
from paceline.plan.balance import hinted_speeds
from paceline.plan.cadence import Cadence
from paceline.run.config import RunConfig
from paceline.run.epoch_metrics import EpochMetrics
from paceline.run.launching.background import Background
from paceline.run.launching.launch import workers_to_start
from paceline.run.settings import Balancing, Batching, Optimization, Runtime
from paceline.sync.averaging.strategy import Averaging

Policy = Literal["sync", "cadence", "async"]
AveragingBackend = Literal["device", "cpu"]

# A batch has this many micro-batches, or the largest number below that divides it: enough for unequal workers.
MICRO_BATCHES_PER_BATCH = 8

_CADENCE_KNOBS = ("overhead_target", "max_anchor", "anchor", "max_batch_diff")
_AVERAGING_KNOBS = (*_CADENCE_KNOBS, "divergence_threshold", "no_divergence_guard")

# Parameters of Trainer.setup, and settings of its groups, that are given to a method.
_METHODS = {
    **dict.fromkeys(("model", "optimizer"), "Trainer.builder"),
    "data": "the builder's .dataset",
    "global_batch": "the builder's .batch_size",
    "strategy": "the builder's .policy",
    "device": "the builder's .devices",
    **{name: f"the builder's .{name}" for name in ("scheduler", "max_grad_norm", "seed")},
}
_GROUP_METHODS = {"speed_hints": "speed_hint", "backend": "backend", "timeline": "timeline"}


class Builder:
    """Builds a run: every method sets one thing and returns the builder; `run` starts it.

    `dataset`, `batch_size` and `num_epochs` are required. `run` refuses settings that contradict each other.
    """

    def __init__(
        self,
        model_factory: Callable[[], Any],
        optim_factory: Callable[[list[torch.Tensor]], Any],
        train_fn: Callable[[Any, Any], Any],
    ) -> None:
        if isinstance(model_factory, nn.Module):
            raise TypeError(
                f"model_factory is a {type(model_factory).__name__}: pass a function that builds one, since every "
                "worker needs its own"
            )
        self._set: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._with_function("model_factory", model_factory)
        self._with_function("optim_factory", optim_factory)
        self._with_function("train_fn", train_fn)

    def dataset(self, dataset: Any) -> Builder:
        """The data, as for `Trainer.setup`. Started workers get a copy: for large data, pass a source that reads it."""
        return self._with("dataset", dataset)

    def batch_size(self, samples: int) -> Builder:
        """Samples per optimizer step.

        With policy "sync" this is the global batch, which all workers share: the result does not depend on their
        number. With "cadence" and "async" every worker takes its own steps, and this is their mean batch: W workers
        together take W times as many samples.

        The batch is divided into 8 micro-batches (or the largest number below that divides it evenly), whatever the
        number of workers. `settings(micro_batch=...)` chooses their size: larger for GPUs, smaller for more workers.
        """
        return self._with("batch_size", samples, int, least=1)

    def num_epochs(self, count: int) -> Builder:
        """Passes over the data."""
        return self._with("num_epochs", count, int, least=1)

    def seed(self, seed: int) -> Builder:
        """The seed of all random numbers of the run (default 0)."""
        return self._with("seed", seed, int)

    def max_grad_norm(self, limit: float) -> Builder:
        """Clip the mean gradient's norm."""
        return self._with("max_grad_norm", limit, float, least=0, finite=False)

    def scheduler(self, factory: Callable[[Any], Any]) -> Builder:
        """A function from the optimizer to a torch scheduler, which is stepped after every optimizer step."""
        return self._with_function("scheduler", factory)

    def lr_scale_ratio(self, ratio: float) -> Builder:
        """Multiply the learning rate by 1 + (W - 1) * ratio for W workers (default 0: not at all).

        For the policies that average, whose batch grows with the workers. It is applied before a scheduler is made.
        """
        return self._with("lr_scale_ratio", ratio, float, least=0, most=1)

    def devices(self, devices: int | Sequence[torch.device | str]) -> Builder:
        """The devices of this machine, one worker each, or the number of workers.

        Default: every GPU, or one CPU worker. A device that is named twice is shared by two workers.
        """
        if isinstance(devices, int) and not isinstance(devices, bool):
            return self._with("devices", devices, int, least=1)
        if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence) or not devices:
            raise ValueError(f'devices={devices!r}: give a list of devices, such as ["cuda:0", "cuda:1"], or a number')
        return self._with("devices", choose_devices(devices))

    def policy(self, policy: Policy) -> Builder:
        """How workers synchronize.

        "sync" (default): gradients are exchanged in every step; the result does not depend on the workers.
        "cadence": every worker takes its own steps, and weights are averaged as often as the overhead target allows.
        "async": the same, and training continues while the average is computed; no step is lost.
        """
        return self._with("policy", policy, Policy)

    def backend(self, backend: AveragingBackend) -> Builder:
        """Average on the "device" (default; GPUs over NCCL) or on the "cpu" (Gloo), in both cases weighted by samples.

        CPU workers always average in shared memory.
        """
        return self._with("backend", backend, AveragingBackend)

    def overhead_target(self, part: float) -> Builder:
        """The overhead of averaging as a fraction of compute time: 0.01 to 0.5 (default 0.1)."""
        return self._with("overhead_target", Cadence(overhead_target=part).overhead_target)

    def anchor(self, steps: int) -> Builder:
        """The initial and least number of steps between two averages (default 10)."""
        return self._with("anchor", Cadence(anchor=steps).anchor)

    def max_anchor(self, steps: int) -> Builder:
        """The largest number of steps between two averages (default 200)."""
        return self._with("max_anchor", Cadence(max_anchor=steps).max_anchor)

    def max_batch_diff(self, steps: int) -> Builder:
        """How many micro-batches a worker may be ahead of the slowest at an average (default: any number)."""
        return self._with("max_batch_diff", Cadence(max_batch_diff=steps).max_batch_diff)

    def divergence_threshold(self, drift: float) -> Builder:
        """The relative distance of replicas above which three rises in a row halve the steps between averages."""
        return self._with("divergence_threshold", Averaging(divergence_threshold=drift).divergence_threshold)

    def no_divergence_guard(self) -> Builder:
        """Do not measure how far replicas drift apart."""
        return self._with("no_divergence_guard", True)

    def speed_hint(self, slow_rank: int, ratio: float) -> Builder:
        """Every other worker is about `ratio` times as fast as `slow_rank`. Used until the speeds are measured."""
        check_value("slow_rank", slow_rank, int, least=0)
        hinted_speeds(slow_rank + 1, slow_rank, ratio)
        return self._with("speed_hint", (slow_rank, ratio))

    def epoch_fn(self, callback: Callable[[int, Any], object]) -> Builder:
        """Call `callback(epoch, model)` at the end of every epoch, on every worker. Returning True ends the run.

        Callbacks run in the workers' processes. An exception in one ends the run on all workers.
        """
        return self._with_function("epoch_fn", callback)

    def metrics_fn(self, callback: Callable[[EpochMetrics], object]) -> Builder:
        """Call `callback(metrics)` at the end of every epoch, on rank 0. Returning True ends the run."""
        return self._with_function("metrics_fn", callback)

    def checkpoint_fn(self, callback: Callable[[int, Any], object]) -> Builder:
        """Call `callback(epoch, model)` on rank 0 at the end of every `checkpoint_every` epochs, to save the model.

        For a run that can be resumed, use `settings(checkpoints=pl.Checkpoints(folder))`.
        """
        return self._with_function("checkpoint_fn", callback)

    def checkpoint_every(self, epochs: int) -> Builder:
        """Epochs between two calls of `checkpoint_fn` (default 1)."""
        return self._with("checkpoint_every", epochs, int, least=1)

    def timeline(self, folder: str | PathLike[str]) -> Builder:
        """Record a timeline of every worker in this folder; `paceline timeline FOLDER` shows it."""
        return self._with("timeline", Path(folder))

    def settings(self, **settings: Any) -> Builder:
        """Any other parameter of `Trainer.setup`, groups included; also num_workers, like a number of `devices`."""
        known = inspect.signature(Trainer.setup).parameters
        for name, value in settings.items():
            if name in _METHODS:
                raise ValueError(f"settings({name}=...): use {_METHODS[name]}(...)")
            for inner, method in _GROUP_METHODS.items() if name in ("balancing", "runtime") else ():
                if getattr(value, inner, None) is not None:
                    kind = type(value).__name__
                    raise ValueError(f"settings({name}={kind}({inner}=...)): use the builder's .{method}(...)")
            if name == "num_workers":
                self.devices(value)
            elif name in known:
                check_group(name, value)
                self._settings[name] = value
            else:
                own = [method for method in vars(Builder) if not method.startswith("_")]
                raise ValueError(f"settings({name}=...): {explanation(name, value, [*known, *own, 'num_workers'])}")
        return self

    def run(self) -> Handle:
        """Start training in the background. One worker is a thread of this process, several are processes.

        A process that already is a worker (torchrun, `paceline run`, `pl.launch`) joins its world. The thread uses the
        process's torch settings and random generators: do not change them until it has ended.
        """
        self._check_complete()
        self._check_conflicts()
        count, size, devices = self._workers()
        settings = self._setup_settings(size, devices[0])
        _check_early(settings, size)
        task = WorkerTask(
            **self._given("model_factory", "optim_factory", "train_fn", "dataset", "num_epochs"),
            **self._given("checkpoint_every", "checkpoint_fn", "epoch_fn", "metrics_fn"),
            devices=devices,
            settings=settings,
            lr_factor=1 + (size - 1) * self._set.get("lr_scale_ratio", 0.0),
        )
        return Handle(Background(partial(train, task), count), size, devices)

    def _with(self, name: str, value: Any, hint: Any = Any, **limits: float) -> Builder:
        check_value(name, value, hint, **limits)
        self._set[name] = value
        return self

    def _with_function(self, name: str, function: Callable[..., Any]) -> Builder:
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}: pass a function")
        return self._with(name, function)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: self._set[name] for name in names if name in self._set}

    def _workers(self) -> tuple[int, int, tuple[torch.device, ...]]:
        """The number of workers to start (1: a thread), the world's size, and the devices of this machine's workers."""
        chosen = self._set.get("devices")
        num_chosen = len(chosen) if isinstance(chosen, tuple) else chosen
        if is_worker():
            world = World.from_environment("cpu")
            count, size, local_size = 1, world.size, world.local_size
            if num_chosen not in (None, local_size):
                raise ValueError(
                    f"devices for {num_chosen} workers, in a process that already is one of {local_size} on this "
                    f"machine: give {local_size}, or leave it out"
                )
        else:
            count = size = local_size = workers_to_start(num_chosen)
        return count, size, chosen if isinstance(chosen, tuple) else tuple(map(choose_device, range(local_size)))

    def _check_complete(self) -> None:
        batches_per_step = self._settings.get("batching", Batching()).batches_per_step
        for name in ("dataset", "num_epochs", *(() if batches_per_step else ("batch_size",))):
            if name not in self._set:
                raise ValueError(f"{name} is missing: give it with .{name}(...)")
        if batches_per_step and "batch_size" in self._set:
            raise ValueError(
                f"batch_size({self._set['batch_size']}) contradicts batches_per_step={batches_per_step}: leave one of "
                "them out"
            )

    def _check_conflicts(self) -> None:
        if self._set.get("policy", "sync") == "sync" and (unused := self._given(*_AVERAGING_KNOBS)):
            raise ValueError(
                f"{next(iter(unused))} would be ignored: nothing is averaged with policy('sync'). Leave it out, or "
                "choose policy('cadence') or policy('async')"
            )
        if "divergence_threshold" in self._set and "no_divergence_guard" in self._set:
            raise ValueError(
                "divergence_threshold and no_divergence_guard contradict each other: leave one of them out"
            )
        if "checkpoint_every" in self._set and "checkpoint_fn" not in self._set:
            raise ValueError(
                "checkpoint_every would be ignored without checkpoint_fn: give one, or settings(checkpoints="
                f"pl.Checkpoints(folder, every_epochs={self._set['checkpoint_every']})) for a run that can be resumed"
            )
        if self._settings.get("exact") and self._set.get("lr_scale_ratio"):
            raise ValueError(
                f"lr_scale_ratio({self._set['lr_scale_ratio']}) contradicts exact=True: the result would depend on the "
                "number of workers. Leave one of them out"
            )

    def _setup_settings(self, num_workers: int, device: torch.device) -> dict[str, Any]:
        """The parameters of `Trainer.setup`."""
        settings = self._settings | self._given("seed", "max_grad_norm", "scheduler")
        if shard := settings.pop("shard", None):
            settings["optimization"] = replace(settings.get("optimization", Optimization()), shard=shard)
        policy = self._set.get("policy", "sync")
        if batch_size := self._set.get("batch_size"):
            settings["global_batch"] = batch_size * (1 if policy == "sync" else num_workers)
            # A loader has its own batch size.
            if not isinstance(self._set["dataset"], DataLoader | ArrayLoader):
                settings.setdefault("micro_batch", _micro_batch(batch_size))
        if "speed_hint" in self._set:
            hints = hinted_speeds(num_workers, *self._set["speed_hint"])
            settings["balancing"] = replace(settings.get("balancing", Balancing()), speed_hints=hints)
        # Gloo copies a GPU's tensors through host memory.
        backend = "gloo" if self._set.get("backend") == "cpu" and device.type == "cuda" else None
        runtime = settings.get("runtime", Runtime())
        settings["runtime"] = replace(runtime, timeline=self._set.get("timeline"), backend=backend)
        if policy != "sync":
            guard = {"divergence_threshold": None} if "no_divergence_guard" in self._set else {}
            settings["strategy"] = Averaging(
                every=Cadence(**self._given(*_CADENCE_KNOBS)),
                overlap=policy == "async",
                **(guard | self._given("divergence_threshold")),
            )
        return settings


def _micro_batch(batch_size: int) -> int:
    """A micro-batch size that does not depend on the workers."""
    count = max(n for n in range(1, MICRO_BATCHES_PER_BATCH + 1) if batch_size % n == 0)
    return batch_size // count


def _check_early(settings: Mapping[str, Any], num_workers: int) -> None:
    """Raise errors of the run's configuration before a worker starts."""
    known = {field.name for field in fields(RunConfig)}
    values: dict[str, Any] = {name: settings[name] for name in known & settings.keys() if settings[name] is not None}
    if batches_per_step := settings.get("batching", Batching()).batches_per_step:
        values |= {"global_batch": batches_per_step, "micro_batch": 1}
    config = RunConfig(**values)
    config.check_workers(num_workers)
    assert config.global_batch is not None
    config.steps_of(config.global_batch)
