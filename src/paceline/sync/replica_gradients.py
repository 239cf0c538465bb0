"""The mean gradient over replicas in a loop owned by the user, one or several per process.

The exchange treats each replica with weight as a micro-batch: gradients, buffers and loss are handed over after its
backward, in global order. So the mean, plain or exact, does not depend on the process that holds a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import GradientError, MisuseError
from paceline.plan.shares import Plan, ranges
from paceline.sync.buffers import Buffers, BufferWatch
from paceline.sync.gradients.exchange import MeanGradients
from paceline.sync.step_numbers import StepNumbers

# From the gradients of one parameter, one per replica with weight, and these weights, to the common gradient.
Reduce = Callable[[list[torch.Tensor], list[int]], torch.Tensor]


@dataclass(frozen=True)
class Offer:
    """The result of one replica: the mean loss of `weight` samples, and the buffers that its forward changed.

    Gradients stay in `.grad`.
    """

    weight: int
    loss: torch.Tensor
    buffers: Mapping[str, torch.Tensor]


class ReplicaGradients:
    """Averages gradients over the replicas of all processes.

    replicas: the parameters of this process's replicas, with equal names, order, shapes and dtypes. ranks: the numbers
    of all replicas, by process. model: the first replica, if buffers are combined too.
    """

    def __init__(
        self,
        replicas: Sequence[Mapping[str, torch.Tensor]],
        communicator: Communicator,
        ranks: Plan,
        *,
        exact: bool,
        model: Any = None,
    ) -> None:
        self._names = [name for name, parameter in replicas[0].items() if parameter.requires_grad]
        self._replicas = [[parameters[name] for name in self._names] for parameters in replicas]
        self._frozen = [(name, p) for own in replicas for name, p in own.items() if not p.requires_grad]
        self._all_ranks = ranks
        self._ranks = ranks[communicator.world.rank]
        self._communicator = communicator
        self._device = self._replicas[0][0].device
        # The exchange works on aliases of the parameters, which share their memory but have their own .grad: the
        # user's gradients change only once the exchange has succeeded.
        self._aliases = [parameter.detach().requires_grad_() for parameter in self._replicas[0]]
        with self._on_device():
            self._weights = communicator.empty(self.num_replicas, torch.int64, self._device)
            self._exchange = MeanGradients(
                dict(zip(self._names, self._aliases, strict=True)),
                communicator,
                Buffers(model, communicator),
                max_micro_batches=self.num_replicas,
                exact=exact,
                overlap=False,
            )

    @property
    def num_replicas(self) -> int:
        """The number of replicas in all processes."""
        return self._all_ranks[-1].stop

    def gather(self, weights: Sequence[int]) -> list[int]:
        """The weights of all replicas, from the weights of this process's replicas."""
        if len(self._all_ranks) == 1:
            return list(weights)
        with self._on_device():
            self._weights.zero_()
            self._weights[self._ranks.start : self._ranks.stop] = torch.tensor(weights, device=self._device)
            self._communicator.all_reduce(self._weights).wait()
            everybody: list[int] = self._weights.tolist()
        return everybody

    def average_offers(
        self, offers: Sequence[Offer | None], watches: Sequence[BufferWatch], reduce: Reduce | None
    ) -> tuple[Plan, StepNumbers]:
        """`average` over the offers of this process's replicas; also gives all replicas the same buffers.

        A replica without an offer has no batch in this step. watches: one per replica.
        """
        weights = self.gather([0 if offer is None else offer.weight for offer in offers])
        if not any(weights):
            raise MisuseError("no replica has a gradient to share: call train_step for at least one of them first")
        first, *others = watches
        result = self.average(weights, offers, first, reduce)
        combined = first.changed()
        for other in others:
            other.put(combined)
        return result

    @torch.no_grad()
    def average(
        self,
        weights: Sequence[int],
        offers: Sequence[Offer | None] | None = None,
        first: BufferWatch | None = None,
        reduce: Reduce | None = None,
    ) -> tuple[Plan, StepNumbers]:
        """Set the gradient of every replica to the weighted mean over all replicas, or to the result of `reduce`.

        A parameter with a gradient on some replicas counts as zero on the others. Without a gradient on any replica
        with weight it gets None. Frozen parameters are skipped. Returns the plan, by process, and the step's numbers.

        offers: losses, and buffers to be combined in the first replica.
        """
        gradients = self._checked_gradients()
        own = [index for index, rank in enumerate(self._ranks) if weights[rank]]
        with self._on_device():
            plan = ranges([sum(weights[rank] > 0 for rank in ranks) for ranks in self._all_ranks])
            numbers = None
            while numbers is None:  # else repeated on wider grids
                self._exchange.begin_step(plan, total_weight=sum(weights))
                for number, index in zip(plan[self._communicator.world.rank], own, strict=True):
                    self._exchange.begin_micro_batch(number, weights[self._ranks[index]], is_last=False)
                    for alias, gradient in zip(self._aliases, gradients[index], strict=True):
                        alias.grad = None if gradient is None else gradient.to(self._device)
                    offer = None if offers is None else offers[index]
                    if offer is not None and first is not None:
                        first.put(offer.buffers)
                    self._exchange.end_micro_batch(None if offer is None else offer.loss)
                self._exchange.send()
                numbers = self._exchange.finish()
            means = [alias.grad for alias in self._aliases]
            if reduce is not None:
                reduced = partial(self._reduced, reduce, plan, [weight for weight in weights if weight])
                means = [
                    None if mean is None else reduced(index, [gradients[replica][index] for replica in own])
                    for index, mean in enumerate(means)
                ]
            for parameters in self._replicas:
                for mean, parameter in zip(means, parameters, strict=True):
                    if parameter.requires_grad:
                        _hand_over(mean, parameter)
            self._exchange.complete()
        return plan, numbers

    def state_dict(self) -> dict[str, Any]:
        return self._exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._exchange.load_state_dict(state)

    def close(self) -> None:
        self._exchange.close()

    def _checked_gradients(self) -> list[list[torch.Tensor | None]]:
        """The gradients of each replica of this process."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise MisuseError(
                    f"parameter {name!r} was frozen when the replicas were wrapped and requires a gradient now: wrap "
                    "the replicas again after unfreezing"
                )
        gradients = [[p.grad if p.requires_grad else None for p in parameters] for parameters in self._replicas]
        for rank, of_replica in zip(self._ranks, gradients, strict=True):
            for name, gradient in zip(self._names, of_replica, strict=True):
                if gradient is not None and gradient.layout != torch.strided:
                    raise GradientError(
                        f"parameter {name!r} of replica {rank} has a sparse gradient, which cannot be averaged in a "
                        "flat buffer: build its layer with sparse=False"
                    )
        return gradients

    def _reduced(
        self, reduce: Reduce, plan: Plan, weights: list[int], index: int, own: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """The result of `reduce` for one parameter. own: its gradients on this process's replicas with weight."""
        name, parameter = self._names[index], self._replicas[0][index]
        # From every replica with weight; zeros from those that did not use the parameter.
        rows = torch.zeros(plan[-1].stop, *parameter.shape, dtype=parameter.dtype, device=self._device)
        for number, gradient in zip(plan[self._communicator.world.rank], own, strict=True):
            if gradient is not None:
                rows[number] = gradient.to(self._device)
        self._communicator.all_reduce(rows).wait()
        result = reduce(list(rows), list(weights))
        if not isinstance(result, torch.Tensor) or result.shape != parameter.shape:
            what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(
                f"reduce returned {what} for parameter {name!r}: it must return one gradient, a tensor of shape "
                f"{tuple(parameter.shape)}"
            )
        return result.to(device=self._device, dtype=parameter.dtype)

    def _on_device(self) -> AbstractContextManager[Any]:
        """The exchange uses the current device's stream; outside of this block the user chooses the device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _hand_over(mean: torch.Tensor | None, parameter: torch.Tensor) -> None:
    """Copy into the existing gradient if its layout matches; never hand out the exchange's own buffer."""
    own = parameter.grad
    if mean is not None and own is not None and own.stride() == mean.stride():
        own.copy_(mean)
    else:
        parameter.grad = None if mean is None else mean.to(parameter.device, copy=True)
