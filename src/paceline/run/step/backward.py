"""Backward of a run's losses, straight to autograd's engine.

Around the engine torch looks at many ways of calling it: some 30 microseconds, a tenth of a small model's step. A loss
that is a plain number needs none of that. Any other goes torch's own way, which comes to the same.

PACELINE_BACKWARD=0 sends all of them there.
"""

from __future__ import annotations

import logging
import os

import torch
from torch.autograd import graph

logger = logging.getLogger("paceline")

SWITCH = "PACELINE_BACKWARD"
_run_engine = getattr(graph, "_engine_run_backward", None)  # not public


class Backward:
    """`loss.backward()` of losses with one number each. The log says, once, why one goes torch's own way."""

    def __init__(self) -> None:
        self._obstacle = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else None
        if _run_engine is None:
            self._obstacle = f"torch {torch.__version__} has no _engine_run_backward"
        self._is_explained = False

    def __call__(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        reason = self._obstacle or _oddity(loss)
        if reason is not None:
            self._explain(reason)
            loss.backward(retain_graph=retain_graph)
            return
        assert _run_engine is not None
        create_graph = False
        ones = torch.ones_like(loss)
        _run_engine((loss,), (ones,), retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)

    def _explain(self, reason: str) -> None:
        if not self._is_explained:
            self._is_explained = True
            logger.info("backward is called as torch calls it, not straight: %s", reason)


def _oddity(loss: torch.Tensor) -> str | None:
    if type(loss) is not torch.Tensor:
        return f"the loss is a {type(loss).__name__}"
    if not (loss.requires_grad and loss.is_floating_point()):
        return "the loss has no gradient, or is no real number"
    return None
