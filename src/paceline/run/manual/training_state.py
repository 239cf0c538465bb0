"""The state of a run that the user drives step by step: replicas, their optimizers, a loader, and the exchange."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from typing import Any

import torch

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import MisuseError
from paceline.core.seeding import Purpose, derive_seed, seed_device
from paceline.core.world import World, choose_device
from paceline.core.world import devices as all_devices
from paceline.data.sources.batches import num_samples_of
from paceline.run.batch_norm import batch_norm_in_training
from paceline.run.determinism import process_settings
from paceline.run.evaluation.division import Division
from paceline.run.evaluation.evaluate import evaluate
from paceline.run.evaluation.validation import Validation, loss_and_accuracy
from paceline.run.manual.halving import FittingBackward
from paceline.run.manual.step_loader import StepLoader
from paceline.run.settings import Optimization, Runtime
from paceline.run.step.checks import FiniteWatch
from paceline.run.step.replica import OptimizerFactory, Replica, SchedulerFactory, only_or_all
from paceline.sync.averaging.replica_steps import BufferWatch, Offer, ReplicaSteps
from paceline.sync.numbers import Numbers
from paceline.sync.replica_gradients import Reduce

# From model and batch to the model's output and its target, and from these to the loss.
Forward = Callable[[Any, Any], tuple[Any, Any]]
LossFunction = Callable[[Any, Any], torch.Tensor]
# From this process's devices, the number of devices of each process, and the communicator.
MakeLoader = Callable[[Sequence[torch.device], Sequence[int], Communicator], StepLoader]


class TrainingState:
    """The result of `prepare_training`. Close it, or use it as a context manager, to end readers and restore settings.

    `models[i]`, `optimizers[i]` and `devices[i]` belong to replica i of this process; the replicas are equal after
    every `update`. `loader` gives the batches of each step, `step` counts the completed ones.
    """

    def __init__(
        self,
        model: Any,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        devices: Sequence[torch.device | str] | None,
        make_loader: MakeLoader,
        forward_fn: Forward,
        *,
        seed: int,
        exact: bool,
        optimization: Optimization,
        runtime: Runtime,
    ) -> None:
        world, self.devices = _choose_devices(devices)
        with ExitStack() as stack:
            stack.enter_context(process_settings(world, exact=exact, threads=runtime.threads))
            self._communicator = communicator = connect(world, runtime.backend, runtime.timeout_s)
            stack.callback(communicator.close)
            counts = [int(count) for count in gather(str(len(self.devices)), communicator)]
            self.loader = make_loader(self.devices, counts, communicator)
            stack.callback(self.loader.close)
            make_replica = partial(
                Replica,
                optimizer=optimizer,
                scheduler=scheduler,
                seed=seed,
                fused=optimization.fused,
                train_mode=optimization.train_mode,
            )
            # The first replica is the user's model with rank 0's weights, the others are copies of it.
            self._replicas = [make_replica(model, communicator=communicator)]
            for device in self.devices[1:]:
                alone = SingleCommunicator(World(device=device))
                self._replicas.append(make_replica(copy.deepcopy(self.models[0]), communicator=alone))
            self._buffers = [BufferWatch(replica.model) for replica in self._replicas]
            parameters = [replica.parameters for replica in self._replicas]
            self._exchange = ReplicaSteps(self.models[0], parameters, self._buffers, communicator, counts, exact=exact)
            stack.callback(self._exchange.close)
            report_missing_peer_access(self.devices)
            self._cleanup = stack.pop_all()
        self._forward_fn = forward_fn
        self._seed = seed
        self._first = sum(counts[: world.rank])
        self._backward = FittingBackward(exact=exact)
        self._finite_watch = FiniteWatch()
        self._offers: list[Offer | None] = [None] * len(self._replicas)
        self._numbers: Numbers | None = None
        self._is_synchronized = False
        self.step = 0

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
        replica, device, buffers = self._replicas[index], self.devices[index], self._buffers[index]
        num_samples = num_samples_of(batch)

        def loss_of(part: Any) -> torch.Tensor:
            return checked_loss(loss_fn(*self._forward_fn(replica.model, part)))

        def undo() -> None:
            _drop_gradients(replica)
            buffers.take()

        _drop_gradients(replica)  # left by a backward of the user
        buffers.begin()
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
        self._offers[index] = Offer(num_samples, loss, buffers.take())
        return loss

    def synchronize(self, reduce: Reduce | None) -> None:
        """Give every replica of all processes the same gradient and the same buffers."""
        if self._is_synchronized:
            raise MisuseError("the gradients of this step are already synchronized: call update before the next step")
        plan, self._numbers = self._exchange.exchange(self._offers, reduce)
        self._offers = [None] * len(self._replicas)
        self._is_synchronized = True
        self._finite_watch.check(self.step + 1, plan, self._numbers)

    def update(self, lr: float | None) -> None:
        """The optimizers' step on every replica."""
        if not self._is_synchronized:
            raise MisuseError("update was called before sync_buffer: the replicas' gradients still differ")
        if lr is not None and self.has_scheduler:
            raise MisuseError(f"lr={lr} contradicts the scheduler, which sets the learning rate too: give one of them")
        for replica, device in zip(self._replicas, self.devices, strict=True):
            if lr is not None:
                replica.set_learning_rate(lr)
            # All replicas draw the same random numbers.
            seed_device(device, derive_seed(self._seed, Purpose.AFTER_STEP, self.step))
            replica.step_optimizers()
            replica.step_schedulers(lambda: self.loss)
            _drop_gradients(replica)
        self._is_synchronized = False
        self.step += 1

    def validator(self, loss_fn: LossFunction, data: Any, topk: Sequence[int]) -> Callable[[int], Validation]:
        """A function that validates the model in an epoch on `data`, which all processes divide among themselves."""
        division = Division(data, self._communicator, self._seed, self.loader.nsamples)
        measure = partial(loss_and_accuracy, forward_fn=self._forward_fn, loss_fn=loss_fn, topk=topk)
        return lambda epoch: Validation.of(self.step, epoch, evaluate(self.models[0], division, measure, None))

    def finish(self) -> None:
        """Wait for the losses that were not checked yet; one that is not finite is an error."""
        self._finite_watch.flush()

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


def _choose_devices(devices: Sequence[torch.device | str] | None) -> tuple[World, tuple[torch.device, ...]]:
    """This process's world, and the device of each of its replicas."""
    world = World.from_environment()
    if devices is None:
        devices = all_devices() if world.size == 1 else [world.device]
    elif isinstance(devices, str | torch.device):
        raise TypeError(f"devices={devices!r} is one device: give a list, such as [{str(devices)!r}]")
    chosen = tuple(choose_device(world.local_rank, device) for device in devices)
    if not chosen:
        raise ValueError("devices is empty: name at least one, or pass None for all of this machine")
    return World.from_environment(chosen[0]), chosen


def report_missing_peer_access(devices: Sequence[torch.device]) -> None:
    gpus = sorted({device for device in devices if device.type == "cuda"}, key=str)
    can_reach = torch.cuda.can_device_access_peer
    apart = [f"{a} and {b}" for a, b in combinations(gpus, 2) if not (can_reach(a, b) and can_reach(b, a))]
    if apart:
        print(
            f"paceline: no direct access between {', '.join(apart)}: gradients go through the host in every step. "
            "`paceline devices` measures how fast",
            file=sys.stderr,
        )


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
