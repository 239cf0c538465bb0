"""The state of a run that the user drives step by step: replicas, their optimizers, a loader, and the exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import MisuseError
from paceline.core.generators import seed_device
from paceline.core.seeding import Purpose, derive_seed
from paceline.core.world import World, choose_device
from paceline.core.world import devices as all_devices
from paceline.data.adopt import adopt_for_evaluation
from paceline.data.sources.batches import num_samples_of
from paceline.plan.shares import ranges
from paceline.run.batch_norm import batch_norm_in_training
from paceline.run.determinism import process_settings
from paceline.run.evaluation.validation import Validation, checked_topk, validate
from paceline.run.manual.halving import FittingBackward
from paceline.run.manual.peer_access import report_missing_peer_access
from paceline.run.manual.step_loader import DeviceFeed, Reading, StepLoader
from paceline.run.settings import Optimization, Runtime
from paceline.run.step.build import only_or_all
from paceline.run.step.checks import FiniteWatch
from paceline.run.step.replica import OptimizerFactory, Replica, SchedulerFactory
from paceline.sync.buffers import BufferWatch
from paceline.sync.numbers import Numbers
from paceline.sync.replica_gradients import Offer, Reduce, ReplicaGradients

# From model and batch to the model's output and its target, and from these to the loss.
Forward = Callable[[Any, Any], tuple[Any, Any]]
LossFunction = Callable[[Any, Any], torch.Tensor]


class TrainingState:
    """The result of `prepare_training`. Close it, or use it as a context manager, to end readers and restore settings.

    `models[i]`, `optimizers[i]` and `devices[i]` belong to replica i of this process; the replicas are equal after
    every `update`. `loader` gives the batches of each step.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        devices: Sequence[torch.device | str] | None,
        optimizer: OptimizerFactory,
        reading: Reading,
        *,
        epochs: int,
        cycle: int | None,
        scheduler: SchedulerFactory | None,
        forward_fn: Forward,
        exact: bool,
        optimization: Optimization,
        runtime: Runtime,
    ) -> None:
        world, self.devices = _places(devices)
        with ExitStack() as stack:
            stack.enter_context(process_settings(world, exact=exact, threads=runtime.threads))
            communicator = connect(world, runtime.backend, runtime.timeout_s)
            stack.callback(communicator.close)
            counts = [int(count) for count in gather(str(len(self.devices)), communicator)]
            feed = DeviceFeed(data, reading, self.devices, counts, communicator)
            stack.callback(feed.close)
            self.loader = StepLoader(feed, epochs, cycle)
            self._replicas = _replicas(
                model, self.devices, optimizer, scheduler, communicator, reading.seed, optimization
            )
            self._watches = [BufferWatch(replica.model) for replica in self._replicas]
            self._exchange = ReplicaGradients(
                [replica.parameters for replica in self._replicas],
                communicator,
                ranges(counts),
                exact=exact,
                model=self.models[0],
            )
            stack.callback(self._exchange.close)
            report_missing_peer_access(self.devices, _num_bytes(self._replicas[0]))
            self._cleanup = stack.pop_all()
        self._communicator = communicator
        self._forward_fn = forward_fn
        self._seed = reading.seed
        self.step = 0
        self._first = sum(counts[: world.rank])
        self._backward = FittingBackward(exact=exact)
        self._offers: list[Offer | None] = [None] * len(self._replicas)
        self._numbers: Numbers | None = None
        self._is_synchronized = False
        self._watch = FiniteWatch()

    @property
    def models(self) -> tuple[Any, ...]:
        return tuple(replica.model for replica in self._replicas)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizer of each replica; a list of them where it has several."""
        return tuple(only_or_all(replica.optimizers) for replica in self._replicas)

    @property
    def epoch(self) -> int:
        """The epoch of the last batches of the loader, from 0."""
        return self.loader.epoch

    @property
    def is_main(self) -> bool:
        return self._communicator.world.is_main

    @property
    def has_scheduler(self) -> bool:
        return bool(self._replicas[0].schedulers)

    @property
    def learning_rate(self) -> float:
        return self._replicas[0].learning_rate

    @property
    def numbers(self) -> Numbers:
        """The numbers of the last synchronized step. On a GPU, reading one may wait for the device."""
        if self._numbers is None:
            raise MisuseError("no step has been synchronized yet: call sync_buffer first")
        return self._numbers

    @property
    def loss(self) -> float:
        """The mean over all samples of the last step, on all replicas, before its update."""
        return self.numbers.loss

    def compute(self, loss_fn: LossFunction, batch: Any, index: int) -> torch.Tensor:
        """The gradient of one replica on its batch; returns the loss, on its device."""
        self._check_may_compute(index)
        replica, device = self._replicas[index], self.devices[index]
        num_samples = num_samples_of(batch)
        watch = self._watches[index]

        def loss_of(part: Any) -> torch.Tensor:
            return checked_loss(loss_fn(*self._forward_fn(replica.model, part)))

        def undo() -> None:
            _drop_gradients(replica)
            watch.take()

        _drop_gradients(replica)  # left by a backward of the user
        watch.begin()
        seed_device(device, derive_seed(self._seed, Purpose.MICRO_BATCH, self.step, self._first + index))
        try:
            loss = self._backward(loss_of, batch, num_samples, model=replica.model, device=device, undo=undo)
        except Exception as error:
            undo()
            if num_samples == 1 and isinstance(error, ValueError) and batch_norm_in_training(replica.model) is not None:
                error.add_note(
                    "this batch has 1 sample, and BatchNorm needs more than one value per channel: choose another "
                    f"nsamples than {self.loader.nsamples}, so that no epoch ends with one sample"
                )
            raise
        self._offers[index] = Offer(num_samples, loss, watch.take())
        return loss

    def synchronize(self, reduce: Reduce | None) -> None:
        """Give every replica of all processes the same gradient and the same buffers."""
        if self._is_synchronized:
            raise MisuseError("the gradients of this step are already synchronized: call update before the next step")
        plan, self._numbers = self._exchange.average_offers(self._offers, self._watches, reduce)
        self._offers = [None] * len(self._replicas)
        self._is_synchronized = True
        self._watch.check(self.step + 1, plan, self._numbers)

    def update(self, lr: float | None) -> None:
        """The optimizers' step on every replica."""
        if not self._is_synchronized:
            raise MisuseError("update was called before sync_buffer: the replicas' gradients still differ")
        if lr is not None and self.has_scheduler:
            raise MisuseError(f"lr={lr} contradicts the scheduler, which sets the learning rate too: give one of them")
        for replica, device in zip(self._replicas, self.devices, strict=True):
            if lr is not None:
                for group in (group for optimizer in replica.optimizers for group in optimizer.param_groups):
                    group["lr"] = lr
            # All replicas draw the same random numbers.
            seed_device(device, derive_seed(self._seed, Purpose.AFTER_STEP, self.step))
            replica.step_optimizers()
            replica.step_schedulers(lambda: self.loss)
            _drop_gradients(replica)
        self._is_synchronized = False
        self.step += 1

    def validator(self, loss_fn: LossFunction, data: Any, topk: Sequence[int]) -> Callable[[Any, int, int], Validation]:
        """A function that validates a model on `data`, which all processes divide among themselves."""
        source, batch_size = adopt_for_evaluation(data, None, self._seed)
        return partial(
            validate,
            source=source,
            forward_fn=self._forward_fn,
            loss_fn=loss_fn,
            topk=checked_topk(topk),
            communicator=self._communicator,
            micro_batch=batch_size or self.loader.nsamples,
            seed=self._seed,
        )

    def finish(self) -> None:
        """Wait for the losses that were not checked yet; one that is not finite is an error."""
        self._watch.flush()

    def close(self) -> None:
        """End the readers and the connection to other processes. Safe to call twice."""
        self._cleanup.close()

    def __enter__(self) -> TrainingState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_may_compute(self, index: int) -> None:
        count = len(self._replicas)
        if not 0 <= index < count:
            raise ValueError(f"replica={index} does not exist: this process has {count}, choose 0 <= replica < {count}")
        if self._is_synchronized:
            raise MisuseError("train_step was called between sync_buffer and update: call update first")
        if self._offers[index] is not None:
            raise MisuseError(
                f"replica {index} already has a gradient: one train_step per replica and step, then sync_buffer"
            )


def _places(devices: Sequence[torch.device | str] | None) -> tuple[World, tuple[torch.device, ...]]:
    """This process's world, and the device of each of its replicas."""
    world = World.from_environment()
    if devices is None:
        devices = all_devices() if world.size == 1 else [world.device]
    elif isinstance(devices, str | torch.device):
        raise TypeError(f"devices={devices!r} is one device: give a list, such as [{str(devices)!r}]")
    places = tuple(choose_device(world.local_rank, device) for device in devices)
    if not places:
        raise ValueError("devices is empty: name at least one, or pass None for all of this machine")
    return World.from_environment(places[0]), places


def _replicas(
    model: Any,
    devices: Sequence[torch.device],
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    communicator: Communicator,
    seed: int,
    optimization: Optimization,
) -> list[Replica]:
    """The first replica is the user's model with rank 0's weights, the others are copies of it."""
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, but every replica needs its own: pass a function from "
            "parameters to a torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )

    def replica(model: Any, communicator: Communicator) -> Replica:
        return Replica(
            model,
            optimizer,
            scheduler,
            communicator,
            seed,
            fused=optimization.fused,
            train_mode=optimization.train_mode,
        )

    first = replica(model, communicator)
    alone = [SingleCommunicator(World(device=device)) for device in devices[1:]]
    return [first, *(replica(copy.deepcopy(first.model), single) for single in alone)]


def checked_loss(loss: Any, advice: str = "") -> torch.Tensor:
    """The loss as a scalar tensor that backward can start from."""
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


def _num_bytes(replica: Replica) -> int:
    return sum(p.numel() * p.element_size() for p in replica.parameters.values())
