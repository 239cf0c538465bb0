"""The state of a run driven by the user, step by step: replicas, their optimizers, a loader, and the exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm import connect
from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.comm.single import SingleCommunicator
from paceline.core.errors import MisuseError
from paceline.core.notice import notice
from paceline.core.settings import check_value
from paceline.core.world import World, choose_device, choose_devices, unconnected_gpus
from paceline.core.world import devices as all_devices
from paceline.data.adopt import LoadingOptions
from paceline.plan.shares import ranges
from paceline.run.determinism import process_settings
from paceline.run.manual.halving import FittingBackward
from paceline.run.manual.step_loader import StepLoader
from paceline.run.settings import Loading, Optimization, Runtime, check_unused
from paceline.run.step.build import only_or_all
from paceline.run.step.checks import FiniteWatch
from paceline.run.step.replica import OptimizerFactory, Replica, SchedulerFactory
from paceline.sync.buffers import BufferWatch
from paceline.sync.numbers import Numbers
from paceline.sync.replica_gradients import Offer, ReplicaGradients

# From model and batch to the model's output and its target.
Forward = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(eq=False)
class TrainingState:
    """The result of `prepare_training`. Close it, or use it as a context manager, to end readers and restore settings.

    `models[i]`, `optimizers[i]` (a list if it has several) and `devices[i]` belong to replica i of this process; the
    replicas are equal after every `update`. `loader` gives the batches of each step, `step` counts completed steps. All
    other attributes are internal.
    """

    devices: tuple[torch.device, ...]
    loader: StepLoader
    replicas: list[Replica]
    buffers: list[BufferWatch]
    exchange: ReplicaGradients
    communicator: Communicator
    first_number: int  # of this process's replicas among all
    forward_fn: Forward
    seed: int
    backward: FittingBackward
    _cleanup: ExitStack
    step: int = 0

    def __post_init__(self) -> None:
        self.models = tuple(replica.model for replica in self.replicas)
        self.optimizers = tuple(only_or_all(replica.optimizers) for replica in self.replicas)
        self.finite_watch = FiniteWatch()
        self.offers: list[Offer | None] = [None] * len(self.replicas)
        self.newest_numbers: Numbers | None = None
        self.is_synchronized = self._is_closed = False

    @property
    def epoch(self) -> int:
        """The epoch of the last batches of the loader, from 0."""
        return self.loader.epoch

    @property
    def is_main(self) -> bool:
        return self.communicator.world.is_main

    @property
    def has_scheduler(self) -> bool:
        return bool(self.replicas[0].schedulers)

    @property
    def numbers(self) -> Numbers:
        """The numbers of the last synchronized step. On a GPU, reading one may wait for the device."""
        if self.newest_numbers is None:
            raise MisuseError("no step has been synchronized yet: call sync_buffer first")
        return self.newest_numbers

    @property
    def loss(self) -> float:
        """The mean over all samples of the last step, on all replicas, before its update."""
        return self.numbers.loss

    def check_open(self) -> None:
        if self._is_closed:
            raise MisuseError("this training state is closed: call prepare_training again")

    def close(self) -> None:
        """End the readers and the connection to other processes. Safe to call twice."""
        self._is_closed = True
        self._cleanup.close()

    def __enter__(self) -> TrainingState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Make a replica and an optimizer for each device, a loader that feeds them, and the buffers of the exchange.

        with prepare_training(model, dataset, devices, optimizer, nsamples=32, epochs=3) as state:
            train(loss_fn, state)

    is the same as the loop

        with prepare_training(model, dataset, devices, optimizer, nsamples=32, epochs=3) as state:
            for batches in state.loader:
                for replica, batch in enumerate(batches):
                    train_step(loss_fn, state, batch, replica)
                sync_buffer(state)
                update(state)

    Inside a world (torchrun, `paceline run`, `paceline.launch`) every process calls it with its own devices, and a step
    covers the replicas of all processes.

    model: an nn.Module, which becomes the first replica, or a function that builds one; the others are copies.
    dataset: as `data` of `Trainer.setup`.
    devices: one replica each; a device may be repeated, and "cuda" is the next GPU in turn. None: all of this machine;
        in a world, the process's own.
    optimizer: a function from parameters to a torch optimizer. scheduler: from that to a torch scheduler, which is
        stepped by every `update`.
    nsamples: samples per replica and step; leave it out if a DataLoader has a batch size. At an epoch's end batches may
        be smaller and the last replicas may have none: no sample is dropped, and each counts the same in the mean.
    epochs: passes over the data. cycle: steps instead, for which the data is repeated as often as needed.
    buffersize: number of steps that the readers read ahead (default: two batches per reader).
    forward_fn(model, batch): returns the output and the target that loss_fn takes (default: for pairs, the model
        applied to the first element, and the second).
    shuffle, seed: as in `Trainer.setup`.
    exact: the weights are bit for bit the same as with `Trainer.setup(exact=True)`, micro_batch=nsamples and
        global_batch=nsamples * replicas, on any number of processes.
    loading: `readers` (default: one process; none for arrays and tensors, which are in memory) and `collate_fn`.
    optimization: `fused` and `train_mode`. runtime: `backend`, `timeout_s` and `threads`.
    """
    for name, value in (("nsamples", nsamples), ("cycle", cycle), ("buffersize", buffersize)):
        check_value(name, value, int | None, least=1)
    check_value("epochs", epochs, int, least=1)
    if cycle is not None and epochs != 1:
        raise ValueError(
            f"epochs={epochs} and cycle={cycle} both limit the run: give epochs (passes over the data) or cycle (steps)"
        )
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, but every replica needs its own: pass a function from "
            "parameters to a torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    check_unused(loading, ("readers", "collate_fn"), "prepare_training")
    check_unused(optimization, ("fused", "train_mode"), "prepare_training")
    check_unused(runtime, ("backend", "timeout_s", "threads"), "prepare_training")
    world, chosen = _choose_devices(devices)
    with ExitStack() as stack:
        stack.enter_context(process_settings(world, exact=exact, threads=runtime.threads))
        communicator = connect(world, runtime.backend, runtime.timeout_s)
        stack.callback(communicator.close)
        counts = [int(count) for count in gather(str(len(chosen)), communicator)]
        loader = StepLoader(
            dataset,
            LoadingOptions(
                micro_batch=nsamples, shuffle=shuffle, readers=loading.readers, collate_fn=loading.collate_fn
            ),
            seed,
            chosen,
            counts,
            communicator,
            epochs=epochs,
            cycle=cycle,
            buffersize=buffersize,
            size_name="nsamples",
        )
        stack.callback(loader.close)

        def make_replica(model: Any, communicator: Communicator) -> Replica:
            fused, train_mode = optimization.fused, optimization.train_mode
            made = Replica(model, optimizer, scheduler, communicator, seed, fused=fused, train_mode=train_mode)
            stack.callback(made.close)
            return made

        # The first replica is the user's model with rank 0's weights, the others are copies of it.
        replicas = [make_replica(model, communicator)]
        for device in chosen[1:]:
            alone = SingleCommunicator(World(device=device))
            replicas.append(make_replica(copy.deepcopy(replicas[0].model), alone))
        buffers = [BufferWatch(replica.model) for replica in replicas]
        parameters = [replica.parameters for replica in replicas]
        exchange = ReplicaGradients(parameters, communicator, ranges(counts), exact=exact, model=replicas[0].model)
        stack.callback(exchange.close)
        report_missing_peer_access(chosen)
        return TrainingState(
            chosen,
            loader,
            replicas,
            buffers,
            exchange,
            communicator,
            sum(counts[: world.rank]),
            forward_fn or _apply_to_first,
            seed,
            FittingBackward(exact=exact),
            stack.pop_all(),
        )


def _apply_to_first(model: Any, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise TypeError(
            f"a batch is a {type(batch).__name__}, not a pair of inputs and targets: give prepare_training a "
            "forward_fn(model, batch) that returns output and target"
        )
    x, target = batch
    return (model(x) if callable(model) else model.forward(x)), target


def _choose_devices(devices: Sequence[torch.device | str] | None) -> tuple[World, tuple[torch.device, ...]]:
    """This process's world, and the device of each of its replicas."""
    world = World.from_environment("cpu")
    if devices is None:
        devices = all_devices() if world.size == 1 else [choose_device(world.local_rank)]
    chosen = choose_devices(devices, world.local_rank)
    if not chosen:
        raise ValueError("devices is empty: name at least one, or pass None for all of this machine")
    return World.from_environment(chosen[0]), chosen


def report_missing_peer_access(devices: Sequence[torch.device]) -> None:
    if apart := unconnected_gpus(sorted((device for device in devices if device.type == "cuda"), key=str)):
        notice(
            f"no direct access between {', '.join(apart)}: gradients go through the host in every step. `paceline "
            "devices` measures how fast"
        )
