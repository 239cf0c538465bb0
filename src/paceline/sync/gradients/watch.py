"""Noticing gradients that somebody has changed between backward and step.

A gradient seen there is one micro-batch's, not the mean over the global batch: clipping or scaling it gives another
result for every number of workers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import MisuseError


class GradientWatch:
    """Remembers gradients as backward has left them. Torch counts the changes of each tensor.

    `trainer.backward` tells when it is done. A bare `loss.backward()` does not, so hooks watch every parameter until
    the first call of `trainer.backward`.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names = names
        self._parameters = parameters
        self._gradients: list[torch.Tensor | None] | None = None
        self._versions: list[int] = []
        self._by_hooks: dict[int, tuple[torch.Tensor, int]] = {}
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(parameters)
        ]

    @property
    def hooks_per_parameter(self) -> int:
        return 1 if self._hooks else 0

    def forget(self) -> None:
        """Nothing is expected of the gradients any more, until the next backward."""
        self._gradients = None
        self._by_hooks.clear()

    def run(self, backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        """`backward(loss)` by the trainer: the gradients are what it leaves."""
        if self._hooks:
            self.close()
        if self._gradients is not None:
            self.check([parameter.grad for parameter in self._parameters])
        backward(loss)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._versions = [-1 if gradient is None else gradient._version for gradient in self._gradients]

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise if these, the parameters' gradients now, are not what backward has left."""
        if self._gradients is None:
            for index, (gradient, version) in self._by_hooks.items():
                if gradients[index] is not gradient or gradient._version != version:
                    raise self._changed(index)
            return
        versions = [-1 if gradient is None else gradient._version for gradient in gradients]
        if versions != self._versions or not all(map(operator.is_, gradients, self._gradients)):
            changed = [
                now is not then or version != version_then
                for now, then, version, version_then in zip(
                    gradients, self._gradients, versions, self._versions, strict=True
                )
            ]
            raise self._changed(changed.index(True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            # A sparse one is refused elsewhere, by name.
            if gradient is not None:
                self._by_hooks[index] = gradient, gradient._version

        return hook

    def _changed(self, index: int) -> MisuseError:
        return MisuseError(
            f"the gradient of {self._names[index]!r} was changed between backward() and step(). There it is one "
            "micro-batch's gradient, so the result would depend on the number of workers. To clip the gradient of the "
            "global batch, pass max_grad_norm= to the set-up; to change it otherwise, use trainer.on_gradients(fn). "
            "Where loss.backward() was called beside trainer.backward(loss): use trainer.backward for all"
        )
