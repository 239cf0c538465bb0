"""Parts of a replica that are averaged one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.errors import MisuseError
from paceline.sync.compression.exchange import WeightedSum


class Fragment:
    """Some of a replica's values, and the common values of all replicas after their last average.

    An average: `measure`, `send`, `receive`, `apply`. Nothing changes before `apply`. workspace: two rows of memory for
    an average in flight; fragments that are averaged in turn may share it. Changes are sent in float32, and float64
    weights are moved in float64.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], workspace: torch.Tensor | None = None) -> None:
        self._tensors = tensors
        self._sizes = [tensor.numel() for tensor in tensors]
        if workspace is None:
            workspace = _workspace(self.numel, tensors)
        self._sent, self._change = workspace[:, : self.numel]
        # A parameter, because the outer optimizer updates it.
        self.common = torch.nn.Parameter(self._read().clone())
        self.residual: torch.Tensor | None = None  # the part of changes not sent yet, if the encoding is biased

    @property
    def numel(self) -> int:
        return sum(self._sizes)

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """The same values in other memory."""
        if [tensor.numel() for tensor in tensors] != self._sizes:
            raise MisuseError(
                "a parameter has another memory layout than at the set-up (such as channels_last), which Averaging "
                "does not support: change it before the set-up"
            )
        self._tensors = tensors

    def measure(self) -> float:
        """Find the change since the last average. Returns the square of its length."""
        torch.sub(self._read(), self.common, out=self._change)
        return _square_length(self._change)

    def send(self, total: WeightedSum, weight: float, seed: int, message: Sequence[float] = ()) -> None:
        """Start the exchange of the measured change."""
        if total.keeps_residual and self.residual is None:
            self.residual = torch.zeros_like(self.common, dtype=torch.float32)
        total.start(self._change.to(torch.float32), weight, seed, self.residual, message)

    def receive(self, total: WeightedSum, weights: Sequence[float]) -> float:
        """Wait for the mean change. Returns the square of its length."""
        # Of the opposite sign: a gradient for the outer optimizer. A sum of 0: no worker saw a sample.
        self._gradient = total.finish(weights, -1 / max(sum(weights), 1e-30)).to(self.common.dtype)
        return _square_length(self._gradient)

    def apply(self, outer: torch.optim.Optimizer | None, *, has_moved_on: bool) -> None:
        """Move the common values by their mean change, or by a step of `outer`, and the replica to them.

        has_moved_on: the replica took steps since `measure`. They are kept: the difference is added.
        """
        if outer is None:
            self.common.sub_(self._gradient)
        else:
            self.common.grad = self._gradient
            outer.step()  # skips the other fragments, which have no gradient
            self.common.grad = None
        del self._gradient
        values = torch.sub(self.common, self._sent, out=self._sent) if has_moved_on else self.common.detach()
        for tensor, part in zip(self._tensors, torch.split(values, self._sizes), strict=True):
            part = part.view_as(tensor)
            if not tensor.is_floating_point():
                tensor.copy_((tensor + part if has_moved_on else part).round())
            elif has_moved_on:
                tensor.add_(part)
            else:
                tensor.copy_(part)

    @property
    def square_length(self) -> float:
        return _square_length(self.common)

    def _read(self) -> torch.Tensor:
        dtype = self._sent.dtype
        return torch.cat([tensor.reshape(-1).to(dtype) for tensor in self._tensors], out=self._sent)


def _workspace(numel: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """For fragments of these tensors. It is reused, because page faults take longer than an average."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    return torch.empty(2, numel, dtype=dtype, device=tensors[0].device)


def _square_length(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def cut(tensors: Sequence[torch.Tensor], count: int) -> list[Fragment]:
    """Fragments of these parts, see `parts_of`."""
    parts = parts_of(tensors, count)
    largest = max((sum(map(torch.numel, part)) for part in parts), default=0)
    workspace = _workspace(largest, tensors) if parts else None
    return [Fragment(part, workspace) for part in parts]


def parts_of(tensors: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Parts of equal size, fewer than `count` if there are fewer values.

    Tensors are cut where a part ends, unless they are not contiguous (channels_last).
    """
    total = sum(tensor.numel() for tensor in tensors)
    ends = [total * (number + 1) // count for number in range(count)]
    parts: list[list[torch.Tensor]] = [[] for _ in ends]
    number = position = 0
    for tensor in tensors:
        rest = tensor.view(-1) if tensor.is_contiguous() else tensor
        while rest.numel():
            while position >= ends[number]:
                number += 1
            room = ends[number] - position if tensor.is_contiguous() else tensor.numel()
            own, rest = (rest, rest[:0]) if room >= rest.numel() else (rest[:room], rest[room:])
            parts[number].append(own)
            position += own.numel()
    return [part for part in parts if part]
