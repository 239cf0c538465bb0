"""The update where the optimizer's state is divided: each worker updates its pieces, then all get all weights."""

from __future__ import annotations

import torch

from paceline.run.step.grad_norm import combined, num_segments, segment_norms
from paceline.run.step.piece_optimizers import PieceOptimizers
from paceline.run.step.replica import Number, Replica, Update


class ShardedUpdate(Update):
    """Clips and steps this worker's pieces."""

    def __init__(self, replica: Replica, max_norm: float | None, pieces: PieceOptimizers) -> None:
        super().__init__(replica, max_norm)
        self._pieces = pieces
        self._shards = pieces.shards

    @property
    def can_be_voided(self) -> bool:
        return False  # the new weights are sent to the others at once

    def step(self) -> None:
        self._pieces.step(self._replica.step_optimizers)
        self._shards.gather_weights()

    def clip(self) -> Number | None:
        if self._max_norm is None:
            return None
        used = [p for p in self._replica.parameters.values() if id(p) in self._shards.used]
        own = [piece for p in used for piece in self._shards.own_pieces(p)]
        norm = self._norm(used)
        torch.nn.utils.clip_grads_with_norm_(own, self._max_norm, norm)
        return norm

    def _norm(self, used: list[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient: every worker contributes those of its segments."""
        world = self._shards.communicator.world
        is_double = any(p.dtype == torch.float64 for p in used)
        counts = [num_segments(p.numel()) for p in used]
        norms = torch.zeros(sum(counts), dtype=torch.float64 if is_double else torch.float32, device=world.device)
        first = 0
        places: list[int] = []
        gradients: list[torch.Tensor] = []
        for parameter, count in zip(used, counts, strict=True):
            for piece in self._shards.own_pieces(parameter):
                if piece.grad is not None and (piece.numel() or not parameter.numel()):
                    offset = num_segments(self._shards.start_of(piece) + 1) - 1
                    places += range(first + offset, first + offset + num_segments(piece.numel()))
                    gradients.append(piece.grad)
            first += count
        if gradients:
            norms[torch.tensor(places, device=world.device)] = torch.stack(segment_norms(gradients)).to(norms.dtype)
        self._shards.communicator.all_reduce(norms).wait()
        if not used:
            return norms.sum()
        return combined(norms, counts)
