"""Training step by step: `prepare_training`, then `train`, or your own loop over the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.deferred import DeferredReader
from paceline.core.errors import MisuseError
from paceline.core.generators import seed_device
from paceline.core.seeding import Purpose, derive_seed
from paceline.core.settings import check_value
from paceline.data.sources.batches import num_samples_of
from paceline.observe.progress import Progress
from paceline.run.batch_norm import batch_norm_in_training
from paceline.run.evaluation.evaluate import EvaluationData, evaluate
from paceline.run.manual.training_state import TrainingState
from paceline.run.step.replica import Replica
from paceline.sync.numbers import Numbers
from paceline.sync.replica_gradients import Offer, Reduce

# From a model's output and its target to the loss.
LossFunction = Callable[[Any, Any], torch.Tensor]

# Losses stay on the device until they are read, this many at a time.
LOSSES_PER_READ = 256


@dataclass(frozen=True)
class Validation:
    """After `step` steps, in `epoch` (from 0): the mean loss and, by k, the fraction of samples in the top k.

    `accuracy` is empty if outputs and targets are not a classifier's.
    """

    step: int
    epoch: int
    loss: float
    accuracy: Mapping[int, float]

    def __str__(self) -> str:
        shown = "".join(f"  top-{k} {part:.1%}" for k, part in self.accuracy.items())
        return f"step {self.step}  validation loss {self.loss:.6g}{shown}"


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
    state.check_open()
    if batch is None:
        return None
    check_value("replica", replica, int, least=0, most=len(state.replicas) - 1)
    if state.is_synchronized:
        raise MisuseError("train_step was called between sync_buffer and update: call update first")
    if state.offers[replica] is not None:
        raise MisuseError(
            f"replica {replica} already has a gradient: one train_step per replica and step, then sync_buffer"
        )
    own, device, buffers = state.replicas[replica], state.devices[replica], state.buffers[replica]
    num_samples = num_samples_of(batch)

    def loss_of(part: Any) -> torch.Tensor:
        return checked_loss(loss_fn(*state.forward_fn(own.model, part)))

    def undo() -> None:
        _drop_gradients(own)
        buffers.take()

    _drop_gradients(own)  # of the user's own backward
    buffers.begin()
    seed_device(device, derive_seed(state.seed, Purpose.MICRO_BATCH, state.step, state.first_number + replica))
    try:
        loss = state.backward(loss_of, batch, num_samples, own.model, device, undo)
    except Exception as error:
        undo()
        if num_samples == 1 and isinstance(error, ValueError) and batch_norm_in_training(own.model) is not None:
            error.add_note(
                "this batch has 1 sample, and BatchNorm needs more than one value per channel: choose another "
                f"nsamples than {state.loader.nsamples}, so that no epoch ends with one sample"
            )
        raise
    state.offers[replica] = Offer(num_samples, loss, buffers.take())
    return loss


def sync_buffer(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """Give every replica the mean of all replicas' gradients, weighted by their samples, in its parameters' .grad.

    BatchNorm's running statistics change as if the replicas' batches had run one after another. Inside a world all
    processes must call it, and the mean is over the replicas of all.

    reduce(gradients, weights): replaces the mean, for example by a median. It is called for each parameter with a list
    of gradients, one per replica with a batch in this step, and a list of their sample counts, and returns the gradient
    for all replicas. The gradient of a replica that did not use the parameter is zero.
    """
    state.check_open()
    if state.is_synchronized:
        raise MisuseError("the gradients of this step are already synchronized: call update before the next step")
    plan, numbers = state.exchange.average_offers(state.offers, state.buffers, reduce)
    state.newest_numbers = numbers
    state.offers = [None] * len(state.replicas)
    state.is_synchronized = True
    state.finite_watch.check(state.step + 1, plan, numbers)


def syncgrads(state: TrainingState, *, reduce: Reduce | None = None) -> None:
    """The same as `sync_buffer`, which serves one node and several."""
    sync_buffer(state, reduce=reduce)


def update(state: TrainingState, *, lr: float | None = None) -> None:
    """Step the optimizer of every replica, then the scheduler. lr: the learning rate from this step on.

    The replicas and their optimizers are equal afterwards.
    """
    if not state.is_synchronized:
        raise MisuseError("update was called before sync_buffer: the replicas' gradients still differ")
    if lr is not None and state.has_scheduler:
        raise MisuseError(f"lr={lr} contradicts the scheduler, which sets the learning rate too: give one of them")
    for replica, device in zip(state.replicas, state.devices, strict=True):
        if lr is not None:
            replica.set_learning_rate(lr)
        # All replicas draw the same random numbers.
        seed_device(device, derive_seed(state.seed, Purpose.AFTER_STEP, state.step))
        replica.step_optimizers()
        replica.step_schedulers(lambda: state.loss)
        _drop_gradients(replica)
    state.is_synchronized = False
    state.step += 1


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
    check_value("topk", topk if isinstance(topk, int) else tuple(topk), tuple[int, ...], least=1)
    check_value("verbose", verbose, int | bool, least=0)
    if schedule is not None and state.has_scheduler:
        raise ValueError("schedule and prepare_training's scheduler both set the learning rate: give one of them")
    if verbose and state.loader.num_steps is None:
        raise ValueError(f"verbose={verbose} needs the number of steps, unknown for a stream: give cycle, or False")
    losses: list[float] = []
    loss_reader = DeferredReader[Numbers](lambda numbers: losses.append(numbers.loss), batch=LOSSES_PER_READ)
    validations: list[Validation] = []
    nsamples = state.loader.nsamples
    evaluation_data = (
        None if validation is None else EvaluationData(validation, state.communicator, state.seed, nsamples)
    )

    def measure(model: Any, batch: Any) -> dict[Any, torch.Tensor]:
        output, target = state.forward_fn(model, batch)
        return {"loss": loss_fn(output, target), **topk_accuracy(output, target, topk)}

    def note_validation(epoch: int) -> None:
        if evaluation_data is not None:
            means: Any = evaluate(state.models[0], evaluation_data, measure, None)
            validations.append(Validation(state.step, epoch, means.pop("loss"), means))
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
        state.finite_watch.flush()
    if validate_every is None and epoch is not None:
        note_validation(epoch)
    loss_reader.flush()
    return TrainingHistory(losses, validations)


def topk_accuracy(output: Any, target: Any, topk: Sequence[int]) -> dict[int, torch.Tensor]:
    """By k, the fraction of samples whose class is among the k highest scores, for each k up to the number of classes.

    output: (samples, classes). target: (samples,) class numbers; a number out of range is a miss. For other outputs and
    targets the result is empty. Equal scores and NaN count as higher than the sample's own, so that a constant model
    has accuracy 0.
    """
    are_tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not are_tensors or output.ndim != 2 or target.shape != output.shape[:1] or target.is_floating_point():
        return {}
    num_classes, target = output.shape[1], target.to(output.device)
    own = output.gather(1, target.clamp(0, num_classes - 1).unsqueeze(1))
    num_higher = (~(output < own)).sum(1) - 1
    is_class = (target >= 0) & (target < num_classes)
    return {k: (is_class & (num_higher < k)).double().mean() for k in topk if k <= num_classes}


def verbose_lines(num_steps: int | None, verbose: int | bool, *, is_main: bool, label: str = "step") -> Progress:
    """Progress lines for step 1 and every `verbose`-th step; True: every step; False or 0: none."""
    is_quiet = not (verbose and is_main)
    return Progress(num_steps, every_steps=int(verbose) or None, label=label, keep_lines=True, quiet=is_quiet)


def checked_loss(loss: Any, advice: str = "") -> torch.Tensor:
    """The loss as a scalar tensor with a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor with one number")
    if loss.numel() != 1:
        end = f". {advice}" if advice else ""
        raise ValueError(f"the loss has shape {tuple(loss.shape)}: it must be one number, such as loss.mean(){end}")
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: it must be computed from the model's parameters, by torch")
    return loss.reshape(())


def _drop_gradients(replica: Replica) -> None:
    for parameter in replica.parameters.values():
        parameter.grad = None
