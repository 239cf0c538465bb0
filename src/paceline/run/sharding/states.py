"""The optimizer's states of pieces: sends them between workers, joins them for whole parameters, and cuts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.plan.sharding import Piece
from paceline.run.evaluation.collect import broadcast
from paceline.sync.gradients.division import Division, OwnPiece, flat

# State that torch's optimizers keep once per parameter, also for a parameter with a single element.
SCALARS = ("step", "eta", "mu", "mu_product")
# Entries in the state of a piece while it is sent: the weights, and their average.
WEIGHT, AVERAGE = "weight", "average"


@torch.no_grad()
def whole_states(
    names: Mapping[int, str],
    communicator: Communicator,
    division: Division,
    sources: Sequence[int],
    state_of: Callable[[torch.Tensor], dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The states of whole parameters, from pieces that are on one or a few workers. All workers call this together.

    Yields the name and state, on the CPU, of each parameter.

    names: of the divided parameters, by id; the same on all workers. A worker that joins does not have `division`.
    sources: by chunk, the rank that sends its pieces. state_of: from a piece's view of its parameter to its state.
    """
    pieces: dict[str, list[dict[str, Any]]] = {}

    def sent(piece: Piece) -> tuple[Any, ...]:
        parameter, view = division.parameter(piece), division.tensor(piece)
        is_whole, is_last = id(parameter) in division.whole, piece.stop == parameter.numel()
        return names[id(parameter)], view.shape, is_whole, is_last, state_of(view)

    for number, source in enumerate(sources):
        chunk = division.chunks[number].pieces if source == communicator.world.rank else ()
        for name, shape, is_whole, is_last, state in broadcast(list(map(sent, chunk)), source, communicator):
            pieces.setdefault(name, []).append(state)
            if is_last:
                yield name, _joined(pieces.pop(name), torch.Size(shape), is_whole=is_whole)


def _joined(pieces: Sequence[dict[str, Any]], last: torch.Size, *, is_whole: bool) -> dict[str, Any]:
    """The state of a parameter. Tensors of its size are flat, in the order of its memory, unless `is_whole`.

    last: the shape of the last piece.
    """
    if is_whole:
        return pieces[0]
    return {
        name: torch.cat([piece[name] for piece in pieces]) if _is_by_element(name, value, last) else value
        for name, value in pieces[-1].items()
    }


def _is_by_element(name: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and name not in SCALARS


def part_of(state: Mapping[str, Any], parameter: torch.Tensor, piece: OwnPiece, division: Division) -> dict[str, Any]:
    """The part of a parameter's state that belongs to a piece."""
    if id(parameter) in division.whole:
        return dict(state)
    own = slice(piece.start, piece.start + piece.updated.numel())
    parts = {}
    for name, value in state.items():
        if _is_by_element(name, value, parameter.shape):
            parts[name] = flat(value, like=parameter)[own].clone()
        elif _is_by_element(name, value, torch.Size([parameter.numel()])):
            parts[name] = value[own].clone()
        else:
            parts[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return parts


def shaped_like(parameter: torch.Tensor, state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """A whole state with the parameter's shape. keep=False: its tensors are on the meta device, without memory."""
    shaped = {}
    for name, value in state.items():
        shaped[name] = value
        if _is_by_element(name, value, torch.Size([parameter.numel()])) and parameter.ndim != 1:
            shaped[name] = like = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
            flat(like).copy_(value)
        if isinstance(value, torch.Tensor) and not keep:
            shaped[name] = shaped[name].to("meta")
    return shaped
