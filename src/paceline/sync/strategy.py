"""The interface between the loop and a strategy.

Lifecycle, once per step: `begin_step`, then for each micro-batch of this worker `begin_micro_batch`, `backward` and
`end_micro_batch`, then `send` and `finish`, and after the optimizer's step `complete`. Before `send` a step may be
dropped with `abandon` and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from paceline.plan.shares import Plan
from paceline.sync.numbers import NO_MESSAGE, Numbers, WorkerMessage

if TYPE_CHECKING:
    from paceline.sync.averaging.strategy import AveragedReplicas

# From a step's numbers to whether the step counts.
Accept: TypeAlias = Callable[[Numbers], bool]
# Queues the step's update on the device, where a flag of 1.0 makes it a no-op.
UpdateUnless: TypeAlias = Callable[[torch.Tensor], None]


class GradientExchange(Protocol):
    """Exchanges gradients or parameters between workers. See the module's docstring for the order of the calls."""

    @property
    def averages(self) -> AveragedReplicas | None:
        """None if replicas are equal after every step."""

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        """total_weight: the sum of the step's weights, if known in advance. loss_scale: factor of the losses (fp16)."""

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        """is_last: this worker's last micro-batch of the step, so that the exchange may start during backward."""

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward of the open micro-batch. A backward() called directly by the user counts too."""

    def end_micro_batch(self, loss: torch.Tensor | None) -> None: ...

    def has_gradient(self) -> bool:
        """Whether this micro-batch has any gradient."""

    @property
    def hooks_per_parameter(self) -> int:
        """The number of hooks that the exchange has on each parameter."""

    def set_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Train these parameters from now on. Called between two steps, on all workers."""

    def send(self, message: WorkerMessage = NO_MESSAGE) -> None:
        """Start the exchange of everything not sent yet, with this worker's message."""

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> Numbers | None:
        """Wait for the exchange: now every parameter has its mean gradient, and every worker the step's numbers.

        None: `accept` refused the numbers, on all workers alike, or the sums did not fit their grids, which are wider
        now. Nothing was published; begin the step again.

        `update_unless` may be called before the host knows whether the sums fit, so that the device has work
        meanwhile. Its flag is set if they do not.
        """

    def complete(self) -> None:
        """The optimizer has used the gradients: drop them."""

    def synchronize(self) -> None:
        """Make all replicas equal. A no-op if every step exchanges gradients. Called by all workers together."""

    def abandon(self) -> None:
        """Give up the step: drop its gradients and restore the buffers."""

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, taken between two steps while replicas are equal."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on any number of workers. The parameters are already restored."""

    def close(self) -> None:
        """Remove all hooks from the parameters."""
