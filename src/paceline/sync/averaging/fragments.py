"""Parts of a replica that are averaged one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.sync.compression.exchange import WeightedSum


class Fragment:
    """Some of a replica's values, and those that all replicas had at their last average.

    An average: `send`, `receive`, `apply`. Until `apply` nothing has changed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sizes = [tensor.numel() for tensor in tensors]
        # A parameter, because the outer optimizer updates it.
        self.common = torch.nn.Parameter(self._read())
        self.residual: torch.Tensor | None = None  # what this worker has not sent so far, if its encoding is biased

    @property
    def numel(self) -> int:
        return sum(self._sizes)

    def send(self, total: WeightedSum, weight: float, seed: int) -> float:
        """Start the exchange of the change since the last average. Returns the square of its length."""
        if total.keeps_residual and self.residual is None:
            self.residual = torch.zeros_like(self.common)
        self._change = self._read().sub_(self.common)
        total.start(self._change, weight, seed, self.residual)
        return float(self._change.norm(dtype=torch.float64).square())

    def receive(self, total: WeightedSum, weights: Sequence[float]) -> float:
        """Wait for the mean change. Returns the square of its length."""
        self._mean = total.finish(weights).div_(max(sum(weights), 1e-30))  # 0: no worker saw a sample
        return float(self._mean.norm(dtype=torch.float64).square())

    def apply(self, advance: Callable[[Fragment, torch.Tensor], None], *, has_moved_on: bool) -> None:
        """Move the common values with `advance`, and the replica to them.

        has_moved_on: the replica took steps since `send`, which are kept: the difference is added.
        """
        before = self.common.detach().clone() if has_moved_on else None
        advance(self, self._mean)
        if before is None:
            self._write(self.common.detach())
        else:
            self._write(self._read().add_(self.common).sub_(before).sub_(self._change))
        del self._mean, self._change

    def _read(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in self._tensors])

    def _write(self, values: torch.Tensor) -> None:
        for tensor, part in zip(self._tensors, torch.split(values, self._sizes), strict=True):
            part = part.view_as(tensor)
            tensor.copy_(part if tensor.is_floating_point() else part.round())


def cut(tensors: Sequence[torch.Tensor], count: int) -> list[Fragment]:
    """Fragments of equal size, fewer than `count` if there are fewer values.

    Large tensors are cut wherever a fragment ends, except those that are not contiguous (channels_last).
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
    return [Fragment(part) for part in parts if part]
