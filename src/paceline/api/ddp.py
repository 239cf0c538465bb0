"""`Ddp`: you own the replicas and the loop, and say when they exchange what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.core.errors import MisuseError
from paceline.run.manual.replicas import Replicas, join


class Ddp:
    """Replicas of one model that are trained together, for loops that no trainer fits: GANs, reinforcement learning.

    Make one with `Ddp.wrap`, one for each model that is trained. They do not disturb each other, nor a Trainer.

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
        """Take replicas that are built alike. Nothing about them changes until you ask for it, nor their training mode.

        models: this process's replicas, at least 2; in a world of several processes (torchrun, `paceline run`,
            `paceline.launch`) 1 or more in each, and "all replicas" are those of all processes. Parameters that are
            frozen now are never averaged: wrap again after unfreezing some.
        devices: one for each replica, to which it is moved (its optimizer, made before or after, stays valid); without,
            every replica stays where it is. "cuda" is the next GPU in turn.
        exact: the mean is that of `Trainer.setup(exact=True)`, bit for bit, if replica i computes what is micro-batch
            i there; its inputs should be tensors of their own, not slices, since kernels round differently on
            unaligned memory. Until `close` the process has the settings that this needs: deterministic kernels, 1
            CPU thread.
        timeout_s: how long a process waits for the others before it gives up.
        """
        return cls(join(models, devices, exact=exact, timeout_s=timeout_s))

    @property
    def models(self) -> tuple[Any, ...]:
        """This process's replicas."""
        return self._replicas.models

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where they are."""
        return self._replicas.devices

    @property
    def ranks(self) -> range:
        """Their numbers among all replicas: what to derive seeds and shares of the data from."""
        return self._replicas.ranks

    @property
    def world_size(self) -> int:
        """How many replicas there are, over all processes."""
        return self._replicas.gradients.num_replicas

    def sync_params(self) -> None:
        """Give all replicas the parameters, frozen ones too, and the buffers of replica 0."""
        self._check_open()
        self._replicas.broadcast_state()

    def sync_buffers(self) -> None:
        """Give all replicas the buffers of replica 0: BatchNorm's running statistics, say."""
        self._check_open()
        self._replicas.broadcast_buffers()

    def all_reduce_gradients(self) -> None:
        """Give all replicas the mean of their gradients; between backward and the optimizers' steps.

        Where a parameter has a gradient on some replicas only, it counts as zero on the others. What has none anywhere
        stays without.
        """
        self._check_open()
        self._replicas.gradients.average([1] * self.world_size)

    def weighted_all_reduce_gradients(self, counts: Sequence[int]) -> None:
        """The same, weighted: the mean over all samples, if replica i's gradient is a mean over `counts[i]` of them.

        counts: for this process's replicas, one each; the total is taken over all processes. A replica that counts 0
        contributes nothing, whatever is in its gradients.
        """
        self._check_open()
        weights = self._replicas.gradients.gather(self._checked(counts))
        if not any(weights):
            raise ValueError(
                f"the counts of all replicas are {weights} and add up to 0, which nothing can be divided by: "
                "leave the step out, or count at least 1 sample"
            )
        self._replicas.gradients.average(weights)

    def state_dict(self) -> dict[str, Any]:
        """What an exact mean depends on beside the gradients: with it a loop that is resumed has the same bits."""
        return self._replicas.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of replicas."""
        self._replicas.gradients.load_state_dict(state)

    def close(self) -> None:
        """Let go of the replicas, which stay as they are, and of the other processes. Safe to call twice."""
        self._is_open = False
        self._replicas.cleanup.close()

    def __enter__(self) -> Ddp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise MisuseError("this Ddp is closed: wrap the models again to go on exchanging")

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
