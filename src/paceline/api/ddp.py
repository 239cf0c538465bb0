"""`Ddp`: you own the replicas and the loop, and decide when they exchange gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from paceline.comm import connect
from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.core.world import World
from paceline.run.determinism import process_settings
from paceline.run.manual.replicas import agree, check_models, move_models, tensors_of
from paceline.run.settings import Runtime
from paceline.run.step.build import named_parameters
from paceline.sync.replica_gradients import ReplicaGradients


class Ddp:
    """Replicas of one model for training loops that do not fit a trainer: GANs, reinforcement learning.

    Make one with `Ddp.wrap` for each model that is trained. Several of them, and a Trainer, can be used side by side.

        ddp = pl.Ddp.wrap([model0, model1])
        ddp.sync_params()                       # all start with replica 0's weights
        ...                                     # forward and backward of every replica, as you like
        ddp.all_reduce_gradients()              # every replica has the mean gradient now
        ...                                     # one optimizer step for every replica

    In a world of several processes all of them make the same calls in the same order.

    models, devices: this process's replicas and their devices. ranks: their numbers among all replicas, for seeds and
    for dividing the data. world_size: the number of replicas of all processes.
    """

    def __init__(
        self, models: Sequence[Any], devices: Sequence[torch.device | str] | None, *, exact: bool, timeout_s: float
    ) -> None:
        runtime = Runtime(timeout_s=timeout_s)
        check_models(models)
        self.models = tuple(models)
        self.devices = move_models(models, devices)
        world = World.from_environment(self.devices[0])
        with ExitStack() as stack:
            if exact:
                stack.enter_context(process_settings(world, exact=True, threads=None))
            self._communicator = connect(world, runtime.backend, runtime.timeout_s)
            stack.callback(self._communicator.close)
            ranks = agree(models, self._communicator, exact=exact)
            parameters = [named_parameters(model) for model in models]
            self._gradients = ReplicaGradients(parameters, self._communicator, ranks, exact=exact)
            stack.callback(self._gradients.close)
            self._cleanup = stack.pop_all()
        self.ranks = ranks[world.rank]
        self.world_size = self._gradients.num_replicas
        self._is_open = True

    @classmethod
    def wrap(
        cls,
        models: Sequence[Any],
        devices: Sequence[torch.device | str] | None = None,
        *,
        exact: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Ddp:
        """Connect replicas that are built alike. Their weights and training mode stay unchanged.

        models: this process's replicas, at least 2; in a world of several processes (torchrun, `paceline run`,
            `paceline.launch`) 1 or more in each, and "all replicas" means the replicas of all processes. Parameters
            that are frozen now are never averaged: wrap again after unfreezing some.
        devices: one for each replica, which is moved there (an optimizer over its parameters stays valid); default,
            every replica stays on its device. "cuda" is the next GPU in turn.
        exact: the mean is bit for bit the same as with `Trainer.setup(exact=True)`, if replica i computes micro-batch
            i. Its inputs should be separate tensors, not slices, since kernels round differently on unaligned memory.
            Until `close`, the process uses deterministic kernels and 1 CPU thread.
        timeout_s: seconds a process waits for the others.
        """
        return cls(models, devices, exact=exact, timeout_s=timeout_s)

    def sync_params(self) -> None:
        """Give all replicas the parameters, frozen ones too, and the buffers of replica 0."""
        self._broadcast([tensors_of(model) for model in self.models])

    def sync_buffers(self) -> None:
        """Give all replicas the buffers of replica 0, such as BatchNorm's running statistics."""
        self._broadcast([tensors_of(model, "buffer") for model in self.models])

    def all_reduce_gradients(self) -> None:
        """Give all replicas the mean of their gradients; between backward and the optimizers' steps.

        A gradient that is missing on some replicas counts as zero there; missing on all, it stays None.
        """
        self._check_open()
        self._gradients.average([1] * self.world_size)

    def weighted_all_reduce_gradients(self, counts: Sequence[int]) -> None:
        """The weighted mean: over all samples, if replica i's gradient is a mean over `counts[i]` of them.

        counts: one for each of this process's replicas; the total is over all processes. With count 0 a replica's
        gradients are ignored.
        """
        self._check_open()
        if len(counts) != len(self.models) or not all(hasattr(n, "__index__") and n >= 0 for n in counts):
            raise ValueError(
                f"counts={list(counts)}: give a number of samples, an int >= 0, for each of the {len(self.models)} "
                "replicas in this process"
            )
        weights = self._gradients.gather([int(n) for n in counts])
        if not any(weights):
            raise ValueError(
                f"the counts of all replicas are {weights}, with sum 0: leave the step out, or count at least 1 sample"
            )
        self._gradients.average(weights)

    def state_dict(self) -> dict[str, Any]:
        """The state of the exact mean. A loop that is resumed with it computes the same bits."""
        return self._gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, on any number of replicas."""
        self._gradients.load_state_dict(state)

    def close(self) -> None:
        """Disconnect from the other processes. The replicas stay unchanged. Safe to call twice."""
        self._is_open = False
        self._cleanup.close()

    def __enter__(self) -> Ddp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise MisuseError("this Ddp is closed: wrap the models again")

    @torch.no_grad()
    def _broadcast(self, tensors: list[list[torch.Tensor]]) -> None:
        """tensors: of each replica. All get replica 0's values."""
        self._check_open()
        first, others = tensors[0], tensors[1:]
        if self._communicator.world.size > 1:
            # Not every backend carries booleans.
            first = [t.to(torch.uint8) if t.dtype == torch.bool else t.detach().contiguous() for t in first]
            for pending in [self._communicator.broadcast(tensor, 0) for tensor in first]:
                pending.wait()
            others = tensors
        for replica in others:
            for target, source in zip(replica, first, strict=True):
                target.copy_(source)
