"""`Ddp`: you own the replicas and the loop, and decide when they exchange gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.run.manual.replicas import Replicas, connect_replicas
from paceline.run.settings import Runtime


class Ddp:
    """Replicas of one model for training loops that do not fit a trainer: GANs, reinforcement learning.

    Make one with `Ddp.wrap` for each model that is trained. Several of them, and a Trainer, can be used side by side.

        ddp = pl.Ddp.wrap([model0, model1])
        ddp.sync_params()                       # all start with replica 0's weights
        ...                                     # forward and backward of every replica, as you like
        ddp.all_reduce_gradients()              # every replica has the mean gradient now
        ...                                     # one optimizer step for every replica

    In a world of several processes all of them make the same calls in the same order.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
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
            `paceline.launch`) 1 or more in each, and "all replicas" are those of all processes. Parameters that are
            frozen now are never averaged: wrap again after unfreezing some.
        devices: one for each replica, which is moved there (an optimizer over its parameters stays valid); default,
            every replica stays on its device. "cuda" is the next GPU in turn.
        exact: the mean is bit for bit that of `Trainer.setup(exact=True)`, if replica i computes what is micro-batch i
            there. Its inputs should be separate tensors, not slices, since kernels round differently on unaligned
            memory. Until `close`, the process uses deterministic kernels and 1 CPU thread.
        timeout_s: seconds a process waits for the others.
        """
        return cls(connect_replicas(models, devices, exact=exact, runtime=Runtime(timeout_s=timeout_s)))

    @property
    def models(self) -> tuple[Any, ...]:
        """This process's replicas."""
        return self._replicas.models

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The replicas' devices."""
        return self._replicas.devices

    @property
    def ranks(self) -> range:
        """Their numbers among all replicas, for seeds and for dividing the data."""
        return self._replicas.ranks

    @property
    def world_size(self) -> int:
        """The number of replicas of all processes."""
        return self._replicas.gradients.num_replicas

    def sync_params(self) -> None:
        """Give all replicas the parameters, frozen ones too, and the buffers of replica 0."""
        self._check_open()
        self._replicas.broadcast(parameters=True)

    def sync_buffers(self) -> None:
        """Give all replicas the buffers of replica 0, such as BatchNorm's running statistics."""
        self._check_open()
        self._replicas.broadcast(parameters=False)

    def all_reduce_gradients(self) -> None:
        """Give all replicas the mean of their gradients; between backward and the optimizers' steps.

        A gradient that is missing on some replicas counts as zero there; missing on all, it stays None.
        """
        self._check_open()
        self._replicas.gradients.average([1] * self.world_size)

    def weighted_all_reduce_gradients(self, counts: Sequence[int]) -> None:
        """The weighted mean: over all samples, if replica i's gradient is a mean over `counts[i]` of them.

        counts: one for each of this process's replicas; the total is over all processes. With count 0 a replica's
        gradients are ignored.
        """
        self._check_open()
        weights = self._replicas.gradients.gather(self._checked(counts))
        if not any(weights):
            raise ValueError(
                f"the counts of all replicas are {weights}, with sum 0: leave the step out, or count at least 1 sample"
            )
        self._replicas.gradients.average(weights)

    def state_dict(self) -> dict[str, Any]:
        """The state of the exact mean. A loop that is resumed with it computes the same bits."""
        return self._replicas.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, on any number of replicas."""
        self._replicas.gradients.load_state_dict(state)

    def close(self) -> None:
        """Disconnect from the other processes. The replicas stay unchanged. Safe to call twice."""
        self._is_open = False
        self._replicas.cleanup.close()

    def __enter__(self) -> Ddp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise MisuseError("this Ddp is closed: wrap the models again")

    def _checked(self, counts: Sequence[int]) -> list[int]:
        if len(counts) != len(self.models):
            raise ValueError(
                f"counts={list(counts)} has {len(counts)} numbers for {len(self.models)} replicas in this process: "
                "give one for each"
            )
        try:
            weights = [index(count) for count in counts]
        except TypeError:
            raise TypeError(
                f"counts={list(counts)}: choose whole numbers, such as how many samples each took"
            ) from None
        if any(weight < 0 for weight in weights):
            raise ValueError(f"counts={weights} contains a negative number: choose counts >= 0")
        return weights
