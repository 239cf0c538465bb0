"""The mean gradient over replicas whose loop belongs to somebody else, one or several in each process.

To the exchange a replica that counts is a micro-batch: its gradients are offered after its own backward, in the order
of all replicas. So the mean is the engine's, plain or exact, whichever process a replica lives in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import GradientError, MisuseError
from paceline.plan.shares import Plan, ranges
from paceline.sync.buffers import Buffers
from paceline.sync.gradients.exchange import MeanGradients
from paceline.sync.step_numbers import StepNumbers

# From the gradients of one parameter, one per replica that counts, and their weights, to the one gradient of all.
Reduce = Callable[[list[torch.Tensor], list[int]], torch.Tensor]


class ReplicaGradients:
    """`replicas`: the parameters of this process's replicas, alike in names, order, shapes and types.

    `ranks`: the numbers of all replicas, by process. `model`: the first of them, if buffers are combined as well.
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
        # The exchange fills and empties .grad as it goes. It does so on aliases of the parameters (no memory of their
        # own but a .grad of their own), so that the user's gradients change only when all is well, and then at once.
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
        """Over all processes."""
        return self._all_ranks[-1].stop

    def gather(self, weights: Sequence[int]) -> list[int]:
        """The weights of all replicas, from those of this process's."""
        if len(self._all_ranks) == 1:
            return list(weights)
        with self._on_device():
            self._weights.zero_()
            self._weights[self._ranks.start : self._ranks.stop] = torch.tensor(weights, device=self._device)
            self._communicator.all_reduce(self._weights).wait()
            everybody: list[int] = self._weights.tolist()
        return everybody

    @torch.no_grad()
    def average(
        self,
        weights: Sequence[int],
        end: Callable[[int], torch.Tensor | None] = lambda _: None,
        reduce: Reduce | None = None,
    ) -> tuple[Plan, StepNumbers]:
        """Give every replica the mean of all replicas' gradients, by these weights of all, or what `reduce` makes of
        them. Returns who computed what, by process, and the step's numbers.

        `end` is called for each replica of this process that counts: it puts what the replica's forward has left into
        the first one's buffers, and returns its loss.

        A parameter that has a gradient on some replicas only has a gradient of zero on the others; one that has none
        anywhere, or only where the weight is 0, is left without. A frozen one is passed over.
        """
        self._check_frozen()
        gradients = [self._gradients(i) for i in range(len(self._replicas))]
        with self._on_device():
            plan = ranges([sum(weights[rank] > 0 for rank in ranks) for ranks in self._all_ranks])
            while (numbers := self._exchange_all(plan, gradients, weights, end)) is None:
                pass  # the sums did not fit their grid; it is wider now
            means = [alias.grad for alias in self._aliases]
            if reduce is not None:
                own = [g for rank, g in zip(self._ranks, gradients, strict=True) if weights[rank]]
                means = self._reduced(reduce, means, own, plan, [weight for weight in weights if weight])
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

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise MisuseError(
                    f"parameter {name!r} was frozen when the replicas were wrapped and requires a gradient now: wrap "
                    "them again after unfreezing"
                )

    def _gradients(self, index: int) -> list[torch.Tensor | None]:
        """What a replica of this process offers, once it is known that all of it can be averaged."""
        parameters = self._replicas[index]
        gradients = [parameter.grad if parameter.requires_grad else None for parameter in parameters]
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise GradientError(
                    f"parameter {name!r} of replica {self._ranks[index]} has a sparse gradient, which cannot be "
                    "averaged in a flat buffer: build its layer with sparse=False"
                )
        return gradients

    def _exchange_all(
        self,
        plan: Plan,
        gradients: Sequence[Sequence[torch.Tensor | None]],
        weights: Sequence[int],
        end: Callable[[int], torch.Tensor | None],
    ) -> StepNumbers | None:
        """The step's numbers once the aliases have the mean; None if the same gradients are to be offered again."""
        numbers = iter(plan[self._communicator.world.rank])
        self._exchange.begin_step(plan, total_weight=sum(weights))
        for index, (rank, offered) in enumerate(zip(self._ranks, gradients, strict=True)):
            if not weights[rank]:
                continue
            self._exchange.begin_micro_batch(next(numbers), weights[rank], is_last=False)
            for alias, gradient in zip(self._aliases, offered, strict=True):
                alias.grad = None if gradient is None else gradient.to(self._device)
            self._exchange.end_micro_batch(end(index))
        self._exchange.send()
        return self._exchange.finish()

    def _reduced(
        self,
        reduce: Reduce,
        means: Sequence[torch.Tensor | None],
        own: Sequence[Sequence[torch.Tensor | None]],
        plan: Plan,
        weights: list[int],
    ) -> list[torch.Tensor | None]:
        """What `reduce` makes of each parameter that any replica has a gradient of."""
        reduced: list[torch.Tensor | None] = []
        for index, (name, parameter, mean) in enumerate(zip(self._names, self._replicas[0], means, strict=True)):
            if mean is None:
                reduced.append(None)
                continue
            result = reduce(self._from_all([g[index] for g in own], parameter, plan), list(weights))
            if not isinstance(result, torch.Tensor) or result.shape != parameter.shape:
                what = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(
                    f"reduce returned {what} for parameter {name!r}: it must return one gradient, a tensor of shape "
                    f"{tuple(parameter.shape)}"
                )
            reduced.append(result.to(device=self._device, dtype=parameter.dtype))
        return reduced

    def _from_all(self, own: Sequence[torch.Tensor | None], parameter: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
        """One parameter's gradients from every replica that takes part; zeros where one did not use it."""
        here = [torch.zeros_like(parameter) if gradient is None else gradient.to(self._device) for gradient in own]
        if len(plan) == 1:
            return [gradient.clone() for gradient in here]
        rows = torch.zeros(plan[-1].stop, *parameter.shape, dtype=parameter.dtype, device=self._device)
        for number, gradient in zip(plan[self._communicator.world.rank], here, strict=True):
            rows[number] = gradient
        self._communicator.all_reduce(rows).wait()
        return list(rows)

    def _on_device(self) -> AbstractContextManager[Any]:
        """The exchange queues its work on the current device's stream, which is the user's to choose outside."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _hand_over(mean: torch.Tensor | None, parameter: torch.Tensor) -> None:
    """Into the gradient the parameter has, if that lies in memory like the parameter itself; never the buffer's own."""
    own = parameter.grad
    if mean is not None and own is not None and own.stride() == mean.stride():
        own.copy_(mean)
    else:
        parameter.grad = None if mean is None else mean.to(parameter.device, copy=True)
