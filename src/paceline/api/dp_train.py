"""`dp_train`: a model factory, a list of samples, one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.core.deferred import DeferredReader
from paceline.core.errors import NonFiniteError
from paceline.core.generators import host_randomness
from paceline.core.settings import check_value
from paceline.core.world import World, devices
from paceline.data.feeds.device import to_device
from paceline.data.sources.base import Cycle, Source
from paceline.run.assemble import assemble
from paceline.run.config import RunConfig
from paceline.run.launching.launch import launch, workers_to_start
from paceline.run.manual.functional import LOSSES_PER_READ, checked_loss, verbose_lines
from paceline.run.manual.replicas import shared_parameter
from paceline.run.run import Run
from paceline.run.saving.state import load_model, model_state
from paceline.run.settings import Optimization, Runtime, check_unused
from paceline.run.step.build import build_model, named_parameters
from paceline.run.step.record import StepRecord
from paceline.run.step.replica import OptimizerFactory, SchedulerFactory

DEFAULT_LR = 1e-3


@dataclass(frozen=True)
class DpResult:
    """The result of `dp_train`: the trained model, its named parameters, and the mean loss of every iteration."""

    model: Any
    params: dict[str, torch.Tensor]
    loss_history: list[float]

    @property
    def loss(self) -> float:
        """The last iteration's loss; NaN if there was none."""
        return self.loss_history[-1] if self.loss_history else math.nan


def dp_train(
    make_model: Callable[[], Any],
    data: Sequence[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    forward_fn: Callable[[Any, Any], Any] | None = None,
    target_fn: Callable[[Any], Any] | None = None,
    n_gpu: int | None = None,
    n_iter: int = 10,
    lr: float = DEFAULT_LR,
    max_norm: float = math.inf,
    verbose: int | bool = 10,
    *,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    seed: int = 0,
    exact: bool = False,
    workers: int | None = None,
    optimization: Optimization = Optimization(),
    runtime: Runtime = Runtime(),
) -> DpResult:
    """Train `n_gpu` replicas together for `n_iter` optimizer steps; the mean of their gradients is applied to all.

    In iteration t, replica i takes the sample data[(t * n_gpu + i) % len(data)]; a sample may itself be a batch. The
    result depends on `n_gpu`, not on the number of `workers` (processes) that compute it: by default one per
    accelerator, at most n_gpu; one where there is no accelerator.

    make_model: returns a new model each time: an nn.Module, or any object with forward(x) and parameters().
    forward_fn(model, sample): default, the model applied to the sample. loss_fn(output, target): default, the output
    is the loss. target_fn(sample): default, the sample itself.
    n_gpu: default, the number of devices; under torchrun or `paceline run`, of workers.
    max_norm: bound on the mean gradient's norm.
    lr: Adam's learning rate, unless `optimizer` (a function from parameters to a torch optimizer) is given.
    verbose: print iteration 1 and every `verbose`-th; True: every iteration; False or 0: none.
    optimization, runtime: groups of further settings, as in `Trainer.setup`.
    """
    check_unused(optimization, ("fused", "train_mode", "shard", "shard_by", "master_weights"), "dp_train")
    to_start = workers_to_start(None)
    # A worker of an existing world starts no others; alone it starts one per device. So one of these is 1.
    num_devices = World.from_environment("cpu").size * to_start
    replicas = num_devices if n_gpu is None else n_gpu
    _check_data(make_model, data)
    check_value("n_gpu", replicas, int, least=1)
    check_value("n_iter", n_iter, int, least=0)
    check_value("lr", lr, float, least=0)
    check_value("max_norm", max_norm, float, least=0, finite=False)
    check_value("verbose", verbose, int | bool, least=0)
    if workers is not None and not (type(workers) is int and 1 <= workers <= replicas):
        raise ValueError(f"workers={workers!r} cannot share {replicas} replicas: choose 1 <= workers <= {replicas}")
    if optimizer is not None and lr != DEFAULT_LR:
        raise ValueError(f"lr={lr} would be ignored, since optimizer is given: set the learning rate in optimizer")
    source = Cycle(data, n_iter * replicas, seed)

    def loss_of(model: Any, sample: Any) -> Any:
        if forward_fn is not None:
            output = forward_fn(model, sample)
        else:
            output = model(sample) if isinstance(model, nn.Module) else model.forward(sample)
        if loss_fn is None:
            return output
        return loss_fn(output, sample if target_fn is None else target_fn(sample))

    build = partial(build_model, make_model, torch.device("cpu"), seed)
    model = build()
    _try_out(model, build(), loss_of, source)
    if n_iter == 0:
        return DpResult(model, named_parameters(model), [])

    config = RunConfig(
        global_batch=replicas,
        micro_batch=1,
        seed=seed,
        shuffle=False,
        max_grad_norm=max_norm if math.isfinite(max_norm) else None,
        exact=exact,
        optimization=optimization,
        runtime=runtime,
    )
    optimizer = optimizer or partial(torch.optim.Adam, lr=lr)

    def train(model: Any) -> DpResult:
        run = assemble(config, World.from_environment(), model, optimizer, source, scheduler=scheduler)
        return _train(run, loss_of, n_iter, verbose)

    processes = min(to_start, replicas) if workers is None else workers
    if processes == 1:
        return train(model)
    state, loss_history = launch(partial(_train_in_worker, train, make_model), processes)
    load_model(model, state)
    model = build_model(model, devices()[0], seed)  # where a single worker would have left it
    return DpResult(model, named_parameters(model), loss_history)


def _train(run: Run, loss_of: Callable[[Any, Any], torch.Tensor], n_iter: int, verbose: int | bool) -> DpResult:
    losses: list[float] = []
    loss_reader = DeferredReader[StepRecord](lambda record: losses.append(record.loss), batch=LOSSES_PER_READ)
    with run.cleanup, verbose_lines(n_iter, verbose, is_main=run.world.is_main, label="iteration") as lines:

        def after_iteration(record: StepRecord) -> None:
            loss_reader.add(record)
            if lines.is_due(record.step):
                lines.show(record.step, record.loss)

        run.loop.hooks.every(1, after_iteration)
        step = run.stepping.with_function(lambda sample: (loss_of(run.model, sample), {}))
        run.enter()
        try:
            for sample in run.loop.micro_batches(epoch=0):
                step(sample)
        except NonFiniteError as error:
            if error.micro_batch is not None:  # in the terms of dp_train
                error.args = (
                    f"the loss of replica {error.micro_batch} is not finite in iteration {error.step} (computed by "
                    f"rank {error.rank}): lower lr, clip with max_norm, or check its sample",
                )
            raise
        loss_reader.flush()
        return DpResult(run.model, named_parameters(run.model), losses)


def _train_in_worker(train: Callable[[Any], DpResult], make_model: Callable[[], Any]) -> Any:
    """Return the state only: the caller has its own model to load it into."""
    result = train(make_model)
    state = model_state(result.model)
    # A module's extra state need not be a tensor.
    on_host = {name: v.detach().cpu() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    return on_host, result.loss_history


def _check_data(make_model: Callable[[], Any], data: Sequence[Any]) -> None:
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(
            f"make_model is a {type(make_model).__name__}: pass a function that builds a new model on every call"
        )
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(f"data is a {type(data).__name__}: pass a list of samples, or of batches")
    if len(data) == 0:
        raise ValueError("data is empty: there is nothing to train on")


def _try_out(model: Any, another: Any, loss_of: Callable[[Any, Any], Any], source: Source) -> None:
    """Run one forward pass of a second model, so that errors are raised before workers start."""
    if (shared := shared_parameter((model, another))) is not None:
        raise ValueError(
            f"two models from make_model share the parameter {shared[2]!r}: every call must build a new model"
        )
    with host_randomness():
        sample = source.read(np.zeros(1, np.int64), 0, 0)
        loss = loss_of(another, to_device(sample, torch.device("cpu")))
    checked_loss(loss, "Without loss_fn, the output of the model is the loss")
