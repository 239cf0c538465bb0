"""Noticing gradients that somebody has changed between backward and step.

A gradient seen there is one micro-batch's, not the mean over the global batch: clipping or scaling it gives another
result for every number of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import MisuseError

# A parameter's number, its gradient, and how often that had been changed.
_Seen: TypeAlias = tuple[int, torch.Tensor | None, int]


# A model with fewer elements than this has steps so short that looking at every gradient would show.
SMALL_NUMEL = 1 << 17
# Of such a model every gradient is looked at in so many micro-batches; then one of them in each, in turn.
NUM_WHOLE_CHECKS = 64


class GradientWatch:
    """Remembers gradients as backward has left them. Torch counts the changes of each tensor.

    `trainer.backward` tells when it is done. A bare `loss.backward()` does not, so hooks watch every parameter until
    the first call of `trainer.backward`.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names = names
        self._parameters = parameters
        is_small = sum(parameter.numel() for parameter in parameters) < SMALL_NUMEL
        self._num_whole_left = NUM_WHOLE_CHECKS if is_small else sys.maxsize
        self._turn = -1
        self._seen: list[_Seen] = []  # what backward has left, since the micro-batch began
        self._by_hooks: dict[int, _Seen] = {}
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(parameters)
        ]

    @property
    def hooks_per_parameter(self) -> int:
        return 1 if self._hooks else 0

    def forget(self) -> None:
        """Nothing is expected of the gradients any more, until the next backward."""
        self._seen = []
        if self._by_hooks:
            self._by_hooks.clear()

    def run(self, backward: Callable[[], None]) -> None:
        """Call `backward()` for the trainer, and remember the gradients that it leaves."""
        if self._hooks:
            self.close()
        if self._seen:
            self.check()
        backward()
        parameters = self._parameters
        if self._num_whole_left:
            self._num_whole_left -= 1
            gradients = [parameter.grad for parameter in parameters]
            self._seen = [(i, g, -1 if g is None else g._version) for i, g in enumerate(gradients)]
        else:
            self._turn = turn = (self._turn + 1) % len(parameters)
            gradient = parameters[turn].grad
            self._seen = [(turn, gradient, -1 if gradient is None else gradient._version)]

    def check(self) -> None:
        """Raise if the gradients are not what backward has left."""
        for index, gradient, version in self._seen or self._by_hooks.values():
            if self._parameters[index].grad is not gradient or (gradient is not None and gradient._version != version):
                raise self._changed(index)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            # A sparse one is refused elsewhere, by name.
            if gradient is not None:
                self._by_hooks[index] = index, gradient, gradient._version

        return hook

    def _changed(self, index: int) -> MisuseError:
        return MisuseError(
            f"the gradient of {self._names[index]!r} was changed between backward() and step(). There it is one "
            "micro-batch's gradient, so the result would depend on the number of workers. To clip the gradient of the "
            "global batch, pass max_grad_norm= to the set-up; to change it otherwise, use trainer.on_gradients(fn). "
            "Where loss.backward() was called beside trainer.backward(loss): use trainer.backward for all"
        )
