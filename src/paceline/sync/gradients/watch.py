"""Detects gradients that were changed between backward and step.

At that point a gradient belongs to one micro-batch. Clipping or scaling it would make the result depend on the number
of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import MisuseError

# A parameter's index, its gradient, and the gradient's version.
_Seen: TypeAlias = tuple[int, torch.Tensor | None, int]


# In smaller models the steps are so short that checking every gradient would be noticeable.
SMALL_NUMEL = 1 << 17
# There all gradients are checked in this many micro-batches, then one of them per micro-batch, in turn.
NUM_WHOLE_CHECKS = 64


class GradientWatch:
    """Remembers the gradients that backward left, by identity and version.

    After a bare `loss.backward()` there is no call to remember them in. So hooks note every gradient until the first
    `trainer.backward`.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names = names
        self._parameters = parameters
        is_small = sum(parameter.numel() for parameter in parameters) < SMALL_NUMEL
        self._num_whole_left = NUM_WHOLE_CHECKS if is_small else sys.maxsize
        self._turns = cycle(enumerate(parameters))
        self._seen: list[_Seen] = []  # since the micro-batch began
        self._by_hooks: dict[int, _Seen] = {}
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(parameters)
        ]

    @property
    def hooks_per_parameter(self) -> int:
        return 1 if self._hooks else 0

    def forget(self) -> None:
        """Forget the gradients until the next backward."""
        self._seen, self._by_hooks = [], {}

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """Run the trainer's backward, and remember the gradients that it leaves."""
        if self._hooks:
            self.close()
        if self._seen:
            self.check()
        loss.backward(retain_graph=retain_graph)
        if self._num_whole_left:
            self._num_whole_left -= 1
            gradients = [parameter.grad for parameter in self._parameters]
            self._seen = [(i, g, -1 if g is None else g._version) for i, g in enumerate(gradients)]
        else:
            index, parameter = next(self._turns)
            gradient = parameter.grad
            self._seen = [(index, gradient, -1 if gradient is None else gradient._version)]

    def check(self) -> None:
        """Raise if a gradient is not the one that backward left. Forgets them."""
        seen = self._seen or self._by_hooks.values()
        self._seen, self._by_hooks = [], {}
        for index, gradient, version in seen:
            if self._parameters[index].grad is not gradient or (gradient is not None and gradient._version != version):
                raise self._changed(index)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                self._by_hooks[index] = index, gradient, gradient._version

        return hook

    def _changed(self, index: int) -> MisuseError:
        return MisuseError(
            f"the gradient of {self._names[index]!r} was changed between backward() and step(). It still belongs to "
            "one micro-batch there, so the result would depend on the number of workers. To clip the gradient of the "
            "global batch, pass max_grad_norm= to the set-up; to change it otherwise, use trainer.on_gradients(fn). If "
            "loss.backward() was called besides trainer.backward(loss), call trainer.backward for every loss"
        )
