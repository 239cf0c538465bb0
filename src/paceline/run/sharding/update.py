"""The update if the optimizer's state is divided: each worker updates its pieces, then all get all weights."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import CommunicationError, GenerationEnded
from paceline.run.sharding.optimizers import PieceOptimizers
from paceline.run.step.grad_norm import combined, num_segments, segment_norms
from paceline.run.step.replica import Number, Replica, Update

if TYPE_CHECKING:
    from paceline.run.membership.rejoining import Rejoining


class Phase(IntEnum):
    """How far a worker is with the update of the open step.

    READY: it has all data for its update. AGREED: so have all others, and some may have changed their weights.
    """

    NONE = 0
    READY = 1
    AGREED = 2


class ShardedUpdate(Update):
    """Clips and steps this worker's pieces.

    If pieces have several holders, the workers that remain after a loss either all complete the step or all repeat it:
    no worker updates its pieces before all have the data for it. Until then nothing has changed; after that, the update
    needs no other worker.
    """

    def __init__(self, replica: Replica, max_norm: float | None, pieces: PieceOptimizers) -> None:
        super().__init__(replica, max_norm)
        self._pieces = pieces
        self._shards = pieces.shards
        self._total_norm: torch.Tensor | None = None
        self.phase = Phase.NONE
        self.resolver: Rejoining | None = None
        self._must_rejoin = False

    @property
    def can_be_voided(self) -> bool:
        return False  # new weights are sent to the others immediately

    def agree(self) -> None:
        """Exchange the data that the update needs besides gradients. When one worker returns, all have it."""
        self.phase = Phase.NONE
        if self._max_norm is not None:
            self._total_norm = self._norm()
        if self.resolver is None:
            return
        self.phase = Phase.READY
        try:
            self._wait_for_all()
        except (GenerationEnded, CommunicationError) as error:
            if not self.resolver.resolve_step(error):
                self.phase = Phase.NONE
                raise GenerationEnded("the step is repeated") from error
            self._must_rejoin = True
        self._pieces.forget_division()
        self.phase = Phase.AGREED

    def void(self) -> None:
        """The step is repeated: its sums did not fit their grids."""
        self.phase = Phase.NONE

    def _wait_for_all(self) -> None:
        communicator = self._shards.communicator
        communicator.all_reduce(torch.zeros(1, device=communicator.world.device)).wait()

    def clip(self) -> Number | None:
        if self._total_norm is not None:
            own = [piece.updated for p in self._used() for piece in self._shards.division.own_pieces(p)]
            torch.nn.utils.clip_grads_with_norm_(own, self._max_norm or 0.0, self._total_norm)
        return self._total_norm

    def step(self) -> None:
        self._pieces.step(self._replica.step_optimizers)

    def share(self) -> GenerationEnded | CommunicationError | None:
        """Send every worker's new weights to all others. Returns the error if a worker was lost.

        The step is complete in both cases: after a loss the others get the weights when they rejoin.
        """
        must_rejoin, self._must_rejoin = self._must_rejoin, False
        try:
            if must_rejoin:
                return GenerationEnded("a worker was lost before the update")
            self._shards.gather_weights()
        except (GenerationEnded, CommunicationError) as error:
            return error
        finally:
            self.phase = Phase.NONE
        return None

    def _used(self) -> list[torch.Tensor]:
        return [p for p in self._replica.parameters.values() if id(p) in self._shards.used]

    def _norm(self) -> torch.Tensor:
        """The norm of the whole gradient: the owner of a piece contributes the norms of its segments."""
        used, division, world = self._used(), self._shards.division, self._shards.communicator.world
        is_double = any(p.dtype == torch.float64 for p in used)
        counts = [num_segments(p.numel()) for p in used]
        norms = torch.zeros(sum(counts), dtype=torch.float64 if is_double else torch.float32, device=world.device)
        first = 0
        places: list[int] = []
        gradients: list[torch.Tensor] = []
        for parameter, count in zip(used, counts, strict=True):
            for piece in division.own_pieces(parameter):
                gradient, numel = piece.updated.grad, piece.updated.numel()
                if piece.is_owner and gradient is not None and (numel or not parameter.numel()):
                    offset = num_segments(piece.start + 1) - 1
                    places += range(first + offset, first + offset + num_segments(numel))
                    gradients.append(gradient)
            first += count
        if gradients:
            norms[torch.tensor(places, device=world.device)] = torch.stack(segment_norms(gradients)).to(norms.dtype)
        self._shards.communicator.all_reduce(norms).wait()
        if not used:
            return norms.sum()
        return combined(norms, counts)
