"""What a worker has not sent yet, as a component of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HasResiduals(Protocol):
    def residuals(self) -> Any:
        """What this worker has not sent yet; None if there is nothing."""

    def load_residuals(self, saved: Any) -> None:
        """Restore what `residuals` returned; None to start without residuals."""


class Residuals:
    """The residuals of one worker, which are never passed on to another."""

    owner: HasResiduals | None = None  # None until this worker exchanges something

    def state_dict(self) -> dict[str, Any]:
        return {"unsent": None if self.owner is None else self.owner.residuals()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.owner is not None:
            self.owner.load_residuals(state["unsent"])
