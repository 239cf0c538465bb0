"""Backward of one loss, straight to autograd's engine.

Around the engine torch looks at many ways of calling it: some 30 microseconds, a tenth of a small model's step. A loss
that is a plain number needs none of that. Any other goes torch's own way, which comes to the same.
"""

from __future__ import annotations

import torch
from torch.autograd import graph

# Not public: without it, every loss goes torch's own way.
_run_engine = getattr(graph, "_engine_run_backward", None)


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()` of a loss with one number."""
    if _run_engine is None or type(loss) is not torch.Tensor or not (loss.requires_grad and loss.is_floating_point()):
        loss.backward()
        return
    keep_graph = create_graph = False
    _run_engine(
        (loss,), (torch.ones_like(loss),), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
    )
