"""What the loop needs of a strategy, whatever it exchanges.

Lifecycle, once per step: `begin_step`, then for each micro-batch of this worker `begin_micro_batch`, `backward` and
`end_micro_batch`, then `send` and `finish`, and after the optimizer's step `complete`. A step may be given up before
`send` with `abandon` and begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from paceline.plan.shares import Plan
from paceline.sync.buffers import Buffers
from paceline.sync.numbers import SILENCE, Numbers, WorkerMessage

# From a step's numbers to whether the step counts.
Accept: TypeAlias = Callable[[Numbers], bool]
# Queues the step's update on the device, where a flag of 1.0 makes it a no-op.
UpdateUnless: TypeAlias = Callable[[torch.Tensor], None]


class GradientExchange(Protocol):
    """What the loop needs of it; see the module's docstring for the order of the calls."""

    def begin_step(self, plan: Plan, *, total_weight: int | None = None, loss_scale: float = 1.0) -> None:
        """`plan`: who runs which micro-batches. `total_weight`: what the step's weights will add up to, where that is
        known beforehand. `loss_scale`: what the losses are multiplied by before backward (fp16)."""

    def begin_micro_batch(self, number: int, weight: int, *, is_last: bool) -> None:
        """`is_last`: this worker has no further micro-batch in this step, so exchanging may start during backward."""

    def backward(self, run: Callable[[], None]) -> None:
        """Call `run()`, a backward of the open micro-batch. A backward() called directly by the user counts too."""

    def end_micro_batch(self, loss: torch.Tensor | None) -> None: ...

    def has_gradient(self) -> bool:
        """Whether this micro-batch has produced any gradient yet."""

    @property
    def hooks_per_parameter(self) -> int:
        """How many hooks on each parameter are the exchange's own."""

    def set_parameters(self, parameters: Mapping[str, torch.Tensor], buffers: Buffers) -> None:
        """Between two steps, on all workers: from now on these are trained, in a model with these buffers."""

    def send(self, message: WorkerMessage = SILENCE) -> None:
        """Start exchanging what has not left yet, and with it what this worker has to tell the others."""

    def finish(self, accept: Accept = lambda _: True, update_unless: UpdateUnless | None = None) -> Numbers | None:
        """Wait for the exchange: now every parameter has its mean gradient, and every worker the step's numbers.

        None: `accept` refused the numbers, on all workers alike, or the sums did not fit their grids, which are wider
        now. Nothing was published; begin the step again.

        `update_unless` may be called before the host knows whether the sums fit, so that the device has work
        meanwhile. Its flag is set if they do not.
        """

    def complete(self) -> None:
        """The optimizer has used the gradients."""

    def synchronize(self) -> None:
        """Make all replicas equal; they are already where every step exchanges. All workers call it together."""

    def abandon(self) -> None:
        """Drop the gradients and undo what the micro-batches did to the buffers."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs to know of earlier ones, between two steps of replicas that are equal."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of workers; the parameters already are those of then."""

    def close(self) -> None:
        """Leave the parameters as they were found."""
