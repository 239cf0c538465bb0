"""Training step by step: `prepare_training`, then `train`, or the same loop by hand from the functions it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from paceline.observe.progress import StepLines
from paceline.run.evaluation.validation import Validation
from paceline.run.manual.step_loader import Reading
from paceline.run.manual.training_state import Forward, LossFunction, TrainingState
from paceline.run.settings import Loading, Optimization, Runtime, check_unused
from paceline.run.step.replica import OptimizerFactory, SchedulerFactory
from paceline.sync.replica_gradients import Reduce
from paceline.sync.step_numbers import Numbers

# Losses wait on the device and are fetched this many at a time.
READ_INTERVAL = 256


@dataclass(frozen=True)
class TrainingHistory:
    """What `train` returns: each step's mean loss, before its update, and the validations."""

    losses: list[float]
    validations: list[Validation]


def prepare_training(
    model: Any,
    dataset: Any,
    devices: Sequence[torch.device | str] | None,
    optimizer: OptimizerFactory,
    nsamples: int | None = None,
    *,
    epochs: int = 1,
    cycle: int | None = None,
    buffersize: int | None = None,
    scheduler: SchedulerFactory | None = None,
    forward_fn: Forward | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    exact: bool = False,
    loading: Loading = Loading(),
    optimization: Optimization = Optimization(),
    runtime: Runtime = Runtime(),
) -> TrainingState:
    """A replica and an optimizer for each device, a loader that feeds them, and memory for the exchange.

        with prepare_training(model, dataset, devices, optimizer, nsamples=32, epochs=3) as state:
            train(loss_fn, state)

    is the same as the loop by hand

        with prepare_training(model, dataset, devices, optimizer, nsamples=32, epochs=3) as state:
            for batches in state.loader:
                for replica, batch in enumerate(batches):
                    train_step(loss_fn, state, batch, replica)
                sync_buffer(state)
                update(state)

    Inside a world (torchrun, `paceline run`, `paceline.launch`) every process calls it with the devices of its own, and
    a step goes over the replicas of all.

    model: an nn.Module, which becomes the first replica, or a function that builds one; the others are copies.
    dataset: whatever `Trainer.setup` takes as data.
    devices: one replica each, also several times the same. None: all of this machine; in a world, the process's own.
    optimizer: a function from parameters to a torch optimizer. scheduler: from that to a torch scheduler, which is
        stepped by every `update`.
    nsamples: samples per replica and step; left out where a DataLoader says it. At an epoch's end batches may be
        smaller and the last replicas may have none: no sample is dropped, and each counts the same in the mean.
    epochs: passes over the data. cycle: steps instead, for which the data is begun again as often as needed.
    buffersize: how many steps are read ahead by the readers (default: two batches per reader).
    forward_fn(model, batch): gives the output and the target that loss_fn takes (default: of pairs, the model applied
        to the first, and the second).
    shuffle, seed: as in `Trainer.setup`.
    exact: the weights are bit for bit those of `Trainer.setup(exact=True)` with micro_batch=nsamples and global_batch=
        nsamples * replicas, in however many processes the replicas are.
    loading: `readers` (default: one process; none for arrays and tensors, which are in memory) and `collate_fn`.
    optimization: `fused` and `train_mode`. runtime: `backend`, `timeout_s` and `threads`.
    """
    check_unused(loading, ("readers", "collate_fn"), "prepare_training")
    check_unused(optimization, ("fused", "train_mode"), "prepare_training")
    check_unused(runtime, ("backend", "timeout_s", "threads"), "prepare_training")
    return TrainingState(
        model,
        dataset,
        devices,
        optimizer,
        Reading(
            nsamples=nsamples,
            epochs=epochs,
            cycle=cycle,
            buffersize=buffersize,
            readers=loading.readers,
            shuffle=shuffle,
            collate_fn=loading.collate_fn,
            seed=seed,
        ),
        scheduler=scheduler,
        forward_fn=forward_fn or _apply_to_first,
        exact=exact,
        optimization=optimization,
        runtime=runtime,
    )


def train_step(loss_fn: LossFunction, state: TrainingState, batch: Any, replica: int = 0) -> torch.Tensor | None:
    """Forward and backward of one replica on its batch: the gradient is then in its parameters' .grad.

    loss_fn(output, target): the mean over the batch's samples, on any device. A batch weighs its samples, the rows of
    the first tensor in it. Without a batch (None) the replica takes no part in this step.

    A batch that does not fit in the device's memory is run in halves, or smaller parts, with one warning. That is an
    error where it would change the result: in exact mode, and with BatchNorm in training.

    Returns the loss, on its device; None without a batch.
    """
    return None if batch is None else state.compute(loss_fn, batch, replica)


def sync_buffer(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """Give every replica the mean of all replicas' gradients, weighted by their samples, in its parameters' .grad.

    BatchNorm's running statistics become what they would be if the replicas' batches had run one after another. Inside
    a world the mean goes over the replicas of all processes, which must all call it.

    reduce(gradients, weights): another way than the mean, such as a median. It is called for each parameter with a list
    of gradients, one per replica that has a batch in this step, and a list of their samples; it returns the gradient
    for all. A replica that did not use the parameter has zeros.
    """
    state.synchronize(reduce)


def syncgrads(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """`sync_buffer` under the name that it has where several nodes take part: one function serves both."""
    sync_buffer(state, reduce=reduce)


def update(state: TrainingState, *, lr: float | None = None) -> None:
    """The optimizer's step on every replica, then the scheduler's. lr: the learning rate for this step and later ones.

    The replicas are equal afterwards, and so are their optimizers.
    """
    state.update(lr)


def train(
    loss_fn: LossFunction,
    state: TrainingState,
    *,
    validation: Any = None,
    validate_every: int | None = None,
    topk: Sequence[int] = (1, 5, 10),
    schedule: Callable[[int, int], float] | None = None,
    reduce: Reduce | None = None,
    verbose: int | bool = False,
) -> TrainingHistory:
    """Train until the loader ends: `train_step` on every replica, `sync_buffer`, `update`.

    validation: data of which every sample is visited once, after every epoch or every `validate_every` steps: its mean
        loss and, where outputs are scores of classes, how often the label is among the k highest, for each k of topk
        that is not more than the classes are. It does not change the training.
    schedule(step, epoch): the learning rate of a step, both counted from 0.
    reduce: see `sync_buffer`.
    verbose: print step 1 and every so-many, and every validation; True: each, False or 0: none.
    """
    _check_settings(state, validation, validate_every, schedule, verbose)
    lines = StepLines(state.loader.num_steps or 0, int(verbose) if state.is_main else 0)
    validate = None if validation is None else state.validator(loss_fn, validation, topk)
    losses, validations = _Losses(), []

    def note_validation(epoch: int) -> None:
        if validate is not None:
            validations.append(validate(state.models[0], state.step, epoch))
            if verbose and state.is_main:
                print(validations[-1], flush=True)

    epoch: int | None = None
    with closing(lines):
        for batches in state.loader:
            if validate_every is None and epoch is not None and epoch != state.epoch:
                note_validation(epoch)
            epoch = state.epoch
            for replica, batch in enumerate(batches):
                train_step(loss_fn, state, batch, replica)
            sync_buffer(state, reduce=reduce)
            update(state, lr=None if schedule is None else schedule(state.step, epoch))
            losses.add(state.numbers)
            if lines.is_due(state.step):
                lines.show(state.step, state.loss)
            if validate_every is not None and state.step % validate_every == 0:
                note_validation(epoch)
        state.finish()
    if validate_every is None and epoch is not None:
        note_validation(epoch)
    return TrainingHistory(losses.read(), validations)


def _apply_to_first(model: Any, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise TypeError(
            f"a batch is a {type(batch).__name__} and no pair of inputs and targets: give prepare_training a "
            "forward_fn(model, batch) that returns output and target"
        )
    x, target = batch
    return (model(x) if callable(model) else model.forward(x)), target


def _check_settings(
    state: TrainingState, validation: Any, validate_every: int | None, schedule: Any, verbose: int | bool
) -> None:
    if validate_every is not None:
        if validation is None:
            raise ValueError(f"validate_every={validate_every} would be ignored: give the data as validation=")
        if not isinstance(validate_every, int) or validate_every < 1:
            raise ValueError(f"validate_every={validate_every!r}: choose at least 1 step, or None for every epoch")
    if schedule is not None and state.has_scheduler:
        raise ValueError("schedule and prepare_training's scheduler both set the learning rate: give one of them")
    if not isinstance(verbose, int) or verbose < 0:
        raise ValueError(f"verbose={verbose!r}: choose how many steps lie between two lines, or False for none")
    if verbose and state.loader.num_steps is None:
        raise ValueError(f"verbose={verbose} needs the number of steps, which a stream has not: give cycle, or False")


class _Losses:
    """The steps' losses, read from the device a few hundred at a time."""

    def __init__(self) -> None:
        self._read: list[float] = []
        self._unread: list[Numbers] = []

    def add(self, numbers: Numbers) -> None:
        self._unread.append(numbers)
        if len(self._unread) == READ_INTERVAL:
            self.read()

    def read(self) -> list[float]:
        self._read.extend(numbers.loss for numbers in self._unread)
        self._unread.clear()
        return self._read
