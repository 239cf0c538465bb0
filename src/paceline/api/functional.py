"""Training step by step: `prepare_training`, then `train`, or your own loop over the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.deferred import DeferredReader
from paceline.core.settings import check_value
from paceline.observe.progress import Progress
from paceline.run.evaluation.validation import Validation
from paceline.run.manual.training_state import LossFunction, TrainingState
from paceline.sync.numbers import Numbers
from paceline.sync.replica_gradients import Reduce

# Losses stay on the device until they are read, this many at a time.
LOSSES_PER_READ = 256


@dataclass(frozen=True)
class TrainingHistory:
    """The result of `train`: each step's mean loss, before its update, and the validations."""

    losses: list[float]
    validations: list[Validation]


def train_step(loss_fn: LossFunction, state: TrainingState, batch: Any, replica: int = 0) -> torch.Tensor | None:
    """Run forward and backward of one replica on its batch; the gradient is in its parameters' .grad.

    loss_fn(output, target): the mean over the batch's samples, on any device. A batch is weighted by its samples, the
    rows of its first tensor. With batch=None the replica takes no part in this step.

    A batch that does not fit in the device's memory is run in halves or smaller parts, with one warning. Where that
    would change the result, in exact mode and with BatchNorm in training mode, it is an error.

    Returns the loss, on its device; None without a batch.
    """
    return None if batch is None else state.compute(loss_fn, batch, replica)


def sync_buffer(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """Give every replica the mean of all replicas' gradients, weighted by their samples, in its parameters' .grad.

    BatchNorm's running statistics are those of running the replicas' batches one after another. Inside a world all
    processes must call it, and the mean is over the replicas of all.

    reduce(gradients, weights): replaces the mean, for example by a median. It is called for each parameter with a list
    of gradients, one per replica with a batch in this step, and a list of their sample counts, and returns the gradient
    for all replicas. The gradient of a replica that did not use the parameter is zero.
    """
    state.synchronize(reduce)


def syncgrads(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """The same as `sync_buffer`, which serves one node and several."""
    sync_buffer(state, reduce=reduce)


def update(state: TrainingState, *, lr: float | None = None) -> None:
    """Step the optimizer of every replica, then the scheduler. lr: the learning rate from this step on.

    The replicas and their optimizers are equal afterwards.
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

    validation: data to evaluate after every epoch or every `validate_every` steps, each sample once: the mean loss and,
        for class scores, the fraction of samples with the label among the k highest, for each k of topk up to the
        number of classes. Validation does not change training.
    schedule(step, epoch): the learning rate of a step, both counted from 0.
    reduce: see `sync_buffer`.
    verbose: print step 1, every `verbose`-th step and every validation; True: every step; False or 0: nothing.
    """
    if validate_every is not None and validation is None:
        raise ValueError(f"validate_every={validate_every} would be ignored: give the data as validation=")
    check_value("validate_every", validate_every, int | None, least=1)
    check_value("topk", tuple(topk), tuple[int, ...], least=1)
    check_value("verbose", verbose, int | bool, least=0)
    if schedule is not None and state.has_scheduler:
        raise ValueError("schedule and prepare_training's scheduler both set the learning rate: give one of them")
    if verbose and state.loader.num_steps is None:
        raise ValueError(f"verbose={verbose} needs the number of steps, unknown for a stream: give cycle, or False")
    losses: list[float] = []
    loss_reader = DeferredReader[Numbers](lambda numbers: losses.append(numbers.loss), batch=LOSSES_PER_READ)
    validate = None if validation is None else state.validator(loss_fn, validation, topk)
    validations: list[Validation] = []

    def note_validation(epoch: int) -> None:
        if validate is not None:
            validations.append(validate(epoch))
            if verbose and state.is_main:
                print(validations[-1], flush=True)

    epoch: int | None = None
    with verbose_lines(state.loader.num_steps, verbose, is_main=state.is_main) as lines:
        for batches in state.loader:
            if validate_every is None and epoch is not None and epoch != state.epoch:
                note_validation(epoch)
            epoch = state.epoch
            for replica, batch in enumerate(batches):
                train_step(loss_fn, state, batch, replica)
            sync_buffer(state, reduce=reduce)
            update(state, lr=None if schedule is None else schedule(state.step, epoch))
            loss_reader.add(state.numbers)
            if lines.is_due(state.step):
                lines.show(state.step, state.loss)
            if validate_every is not None and state.step % validate_every == 0:
                note_validation(epoch)
        state.finish()
    if validate_every is None and epoch is not None:
        note_validation(epoch)
    loss_reader.flush()
    return TrainingHistory(losses, validations)


def verbose_lines(num_steps: int | None, verbose: int | bool, *, is_main: bool, label: str = "step") -> Progress:
    """The lines that `verbose` asks for: of step 1 and every `verbose`-th; True: every step; False or 0: none."""
    is_quiet = not (verbose and is_main)
    return Progress(num_steps, every_steps=int(verbose) or None, label=label, keep_lines=True, quiet=is_quiet)
