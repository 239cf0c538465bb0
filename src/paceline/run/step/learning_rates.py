"""Learning rates that the user sets in an epoch's loop, on any worker."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import MisuseError
from paceline.core.world import World
from paceline.run.step.replica import Replica


class LearningRates:
    """A rate that is requested in the loop's body reaches all workers with the exchange of the current step.

    `requested` is (rate, group), sent with the step; group -1 means all. On several GPUs it would arrive too late, and
    with `Averaging` it is not exchanged: then it must be set in a hook.
    """

    def __init__(self, replica: Replica, *, is_averaging: bool) -> None:
        self._replica = replica
        self._is_averaging = is_averaging
        self.requested: tuple[float, int] | None = None

    def can_request(self, world: World) -> bool:
        return world.size == 1 or (world.device.type == "cpu" and not self._is_averaging)

    def set(self, rate: float, group: int, world: World, *, in_loop: bool) -> None:
        """in_loop: called in the loop's body, so one worker's request is enough. Else it applies immediately."""
        if not in_loop:
            self._replica.set_learning_rate(rate, group)
            return
        self._replica.groups_for(rate, group)  # raises for a wrong one
        if not self.can_request(world):
            raise MisuseError(
                "set_lr() was called in an epoch's loop, which a worker without a share skips: with several GPUs, or "
                "with Averaging, call it in a hook: trainer.every(1, lambda record: trainer.set_lr(...))"
            )
        self.requested = (rate, group)

    def apply(self, by_rank: Sequence[tuple[float, int] | None]) -> None:
        """Set the rate that workers requested in this step. Raises on all workers if requests differ."""
        requests = {rank: rate for rank, rate in enumerate(by_rank) if rate is not None}
        if not requests:
            return
        (first, (rate, group)), *others = requests.items()
        for rank, other in others:
            if other != (rate, group):
                raise MisuseError(
                    f"set_lr({rate:g}, group={group}) on rank {first} and set_lr({other[0]:g}, group={other[1]}) on "
                    f"rank {rank} in one step: compute the rate from what all workers know, such as "
                    "trainer.position.step"
                )
        self._replica.set_learning_rate(rate, group)
