"""`dp_train`: a model factory, a list of samples, one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import NonFiniteError
from paceline.core.world import World, device_count
from paceline.data.sharded import to_device
from paceline.data.sources import Cycle
from paceline.observe.progress import StepLines
from paceline.run.assemble import assemble
from paceline.run.config import RunConfig
from paceline.run.launch import launch
from paceline.run.loop import StepRecord
from paceline.run.replica import OptimizerFactory, SchedulerFactory, build_model, named_parameters

DEFAULT_LR = 1e-3
# Losses wait on the device and are fetched this many at a time.
READ_INTERVAL = 256


@dataclass(frozen=True)
class DpResult:
    """What `dp_train` returns: the trained model, its named parameters, and the mean loss of every iteration."""

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
) -> DpResult:
    """Train `n_gpu` replicas together for `n_iter` optimizer steps; the mean of their gradients is applied to all.

    In iteration t, replica i takes the sample data[(t * n_gpu + i) % len(data)]; a sample may itself be a batch. The
    result depends on `n_gpu`, not on the number of `workers` (processes) that compute it: by default one per
    accelerator, at most n_gpu; one where there is no accelerator.

    make_model: returns a new model each time: an nn.Module, or any object with forward(x) and parameters().
    forward_fn(model, sample): default, the model applied to the sample. loss_fn(output, target): default, the output
    is the loss. target_fn(sample): default, the sample itself.
    n_gpu: default, the number of devices. max_norm: bound on the mean gradient's norm.
    lr: Adam's learning rate, unless `optimizer` (a function from parameters to a torch optimizer) is given.
    verbose: print iteration 1 and every so-many; True: each, False or 0: none.
    """
    replicas = device_count() if n_gpu is None else n_gpu
    processes = min(replicas, device_count()) if workers is None else workers
    _check_arguments(replicas, processes, n_iter, lr, max_norm, verbose, data, optimizer)
    loss_of = partial(_loss_of, loss_fn, forward_fn, target_fn)
    model = build_model(make_model, torch.device("cpu"), seed)
    _check_independent(model, make_model())
    _check_loss(loss_of, model, data[0])
    if n_iter == 0:
        return DpResult(model, named_parameters(model), [])

    config = RunConfig(
        global_batch=replicas,
        micro_batch=1,
        seed=seed,
        shuffle=False,
        max_grad_norm=max_norm if math.isfinite(max_norm) else None,
        exact=exact,
    )
    train = partial(
        _train,
        config=config,
        data=data,
        loss_of=loss_of,
        n_iter=n_iter,
        optimizer=optimizer or partial(_adam, lr=lr),
        scheduler=scheduler,
        print_interval=int(verbose),
    )
    if processes == 1:
        return train(model)
    state, loss_history = launch(partial(_train_in_worker, make_model, train), processes)
    _load(model, state)
    return DpResult(model, named_parameters(model), loss_history)


def _train(
    model: Any,
    *,
    config: RunConfig,
    data: Sequence[Any],
    loss_of: Callable[[Any, Any], torch.Tensor],
    n_iter: int,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    print_interval: int,
) -> DpResult:
    world = World.from_environment()
    source = Cycle(data, n_iter * config.global_batch)
    run = assemble(config, world, model, optimizer, source, scheduler=scheduler)
    lines = StepLines(n_iter, print_interval if world.is_main else 0, label="iteration")
    history: list[float] = []
    unread: list[StepRecord] = []

    def after_iteration(record: StepRecord) -> None:
        unread.append(record)
        if lines.is_due(record.step):
            lines.show(record.step, record.loss)
        if len(unread) == READ_INTERVAL or record.step == n_iter:
            history.extend(r.loss for r in unread)
            unread.clear()

    with run.cleanup:
        loop = run.loop
        loop.every(1, after_iteration)
        try:
            for sample in loop.micro_batches():
                loop.backward(loss_of(loop.replica.model, sample))
                loop.step()
        except NonFiniteError as error:
            if error.micro_batch is None:
                raise
            raise NonFiniteError(
                f"the loss of replica {error.micro_batch} is not finite in iteration {error.step} (computed by rank "
                f"{error.rank}): lower lr, clip with max_norm, or look at its sample",
                step=error.step,
                micro_batch=error.micro_batch,
                rank=error.rank,
            ) from error
        finally:
            lines.close()
        return DpResult(loop.replica.model, named_parameters(loop.replica.model), history)


def _train_in_worker(make_model: Callable[[], Any], train: Callable[[Any], DpResult]) -> Any:
    """What travels back is tensors and numbers: the caller has a model of its own to put them in."""
    result = train(make_model)
    tensors = result.model.state_dict() if isinstance(result.model, nn.Module) else result.params
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}, result.loss_history


@torch.no_grad()
def _load(model: Any, state: dict[str, torch.Tensor]) -> None:
    if isinstance(model, nn.Module):
        model.load_state_dict(state)
    else:
        for name, parameter in named_parameters(model).items():
            parameter.copy_(state[name])


def _adam(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr)


def _loss_of(
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    forward_fn: Callable[[Any, Any], Any] | None,
    target_fn: Callable[[Any], Any] | None,
    model: Any,
    sample: Any,
) -> Any:
    if forward_fn is not None:
        output = forward_fn(model, sample)
    else:
        output = model(sample) if isinstance(model, nn.Module) else model.forward(sample)
    if loss_fn is None:
        return output
    return loss_fn(output, sample if target_fn is None else target_fn(sample))


def _check_arguments(
    replicas: int,
    processes: int,
    n_iter: int,
    lr: float,
    max_norm: float,
    verbose: int | bool,
    data: Sequence[Any],
    optimizer: OptimizerFactory | None,
) -> None:
    if replicas < 1:
        raise ValueError(f"n_gpu={replicas}: choose at least 1 replica, or None for one per device")
    if not 1 <= processes <= replicas:
        raise ValueError(f"workers={processes} cannot share {replicas} replicas: choose 1 <= workers <= {replicas}")
    if n_iter < 0:
        raise ValueError(f"n_iter={n_iter} is negative: choose the number of optimizer steps, at least 0")
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} is no bound: choose a number >= 0, or math.inf not to clip")
    if verbose < 0:
        raise ValueError(f"verbose={verbose}: choose how many iterations lie between two lines, or False for none")
    if len(data) == 0:
        raise ValueError("data is empty: there is nothing to train on")
    if optimizer is not None and lr != DEFAULT_LR:
        raise ValueError(f"lr={lr} would be ignored, since optimizer is given: set the learning rate in optimizer")


def _check_independent(first: Any, second: Any) -> None:
    if first is second:
        raise ValueError("make_model returned the same object twice: it must build a new model on every call")
    storages = {parameter.data_ptr() for parameter in named_parameters(first).values()}
    for name, parameter in named_parameters(second).items():
        if parameter.numel() and parameter.data_ptr() in storages:
            raise ValueError(
                f"two models from make_model share the parameter {name!r}: every call must make its own parameters"
            )


def _check_loss(loss_of: Callable[[Any, Any], Any], model: Any, sample: Any) -> None:
    """One trial, so that a loss of the wrong form is an error before anything starts. Leaves the model as it was."""
    buffers = {name: b.clone() for name, b in model.named_buffers()} if isinstance(model, nn.Module) else {}
    state = torch.default_generator.get_state()
    with torch.no_grad():
        loss = loss_of(model, to_device(sample, torch.device("cpu")))
    torch.default_generator.set_state(state)
    for name, buffer in model.named_buffers() if isinstance(model, nn.Module) else ():
        buffer.copy_(buffers[name])
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor with one number")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}: it must be one number, such as loss.mean(); "
            + ("without loss_fn, what the model returns is taken as the loss" if loss.numel() else "it is empty")
        )
