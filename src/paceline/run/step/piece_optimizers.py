"""Optimizers whose state is divided among the workers: each steps its own pieces of the parameters.

During a step the parameter groups hold this worker's pieces, which are views of the parameters, instead of the
parameters. So the optimizer's own code and kernels update them, with the settings that schedulers and users see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.errors import MisuseError
from paceline.run.evaluation.collect import broadcast
from paceline.sync.gradients.shards import Shards, flat

# Each element's update depends on that element alone, so any piece of a parameter may be updated separately.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
# Each parameter's update depends on that whole parameter and no other.
BY_PARAMETER = ("Muon",)
# How the class of another optimizer says which of these it is.
DECLARATION = "paceline_shard"
# What torch's optimizers keep once per parameter, also for one that is a single number itself.
SCALARS = ("step", "eta", "mu", "mu_product")
# The name in the state of a parameter under which its float32 master is saved.
MASTER = "master_weight"


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can update whole parameters only. Raises for one that cannot be divided."""
    kind = type(optimizer)
    declared = getattr(kind, DECLARATION, None)
    is_torchs = f"{kind.__module__}.".startswith("torch.optim.")
    if declared == "elements" or (is_torchs and kind.__name__ in ELEMENTWISE):
        return False
    if declared == "parameters" or (is_torchs and kind.__name__ in BY_PARAMETER):
        return True
    why = "it is not known whether its parts are independent"
    raise ValueError(
        f"the state of {kind.__name__} cannot be divided among the workers: {why}. Leave shard= out, choose one of "
        f"torch.optim's {', '.join((*ELEMENTWISE, *BY_PARAMETER))}, or, for an optimizer of your own, set the class "
        f"attribute {DECLARATION} = 'elements' if each element is updated by itself, or 'parameters' if each parameter "
        "is"
    )


class PieceOptimizers:
    """The optimizers of a replica, over this worker's pieces. Takes over state that they have already."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor], shards: Shards
    ) -> None:
        self._optimizers = optimizers
        self.shards = self._shards = shards
        self._states: list[Any] = []
        self.note_groups()
        shards.cover(parameters)
        # Of parameters that are frozen now.
        with_state = [p for optimizer in optimizers for p in optimizer.state]
        shards.cover({str(number): p for number, p in enumerate(with_state)})
        for optimizer in optimizers:
            whole, optimizer.state = optimizer.state, defaultdict(dict)
            self._states.append(defaultdict(dict))
            self._take(len(self._states) - 1, whole)
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_state_dict_pre_hook(self._refuse_saving),
                optimizer.register_load_state_dict_pre_hook(self._refuse_loading),
            )
        ]
        self._is_inside = False
        self._has_masters = False

    def note_groups(self) -> None:
        """Groups were added, or are new: some optimizers need whole parameters."""
        for optimizer in self._optimizers:
            if needs_whole_parameters(optimizer):
                self._shards.whole |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def over_pieces(self) -> Iterator[None]:
        """Inside the block the optimizers are over this worker's pieces, with their state."""
        whole = [[group["params"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._is_inside = True
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.state = state
            for group in optimizer.param_groups:
                group["params"] = [piece for p in group["params"] for piece in self._shards.own_pieces(p)]
        try:
            yield
        finally:
            for number, (optimizer, parameters) in enumerate(zip(self._optimizers, whole, strict=True)):
                self._states[number], optimizer.state = optimizer.state, defaultdict(dict)
                # Loading a state replaces the groups, not their order.
                for group, own in zip(optimizer.param_groups, parameters, strict=True):
                    group["params"] = own
            self._is_inside = False

    def step(self, step_optimizers: Callable[[], None]) -> None:
        """Update this worker's pieces."""
        if not self._has_masters:  # the weights may have been loaded after the set-up
            self._shards.copy_masters(to_weights=False)
            self._has_masters = True
        with self.over_pieces():
            step_optimizers()
        self._shards.copy_masters(to_weights=True)

    def state_dicts(self, *, keep: bool) -> list[dict[str, Any]]:
        """The optimizers' states as if they were not divided, on the CPU. Called by all workers together.

        keep: on this worker. Elsewhere the tensors have the right shapes and no memory.
        """
        found: dict[int, list[Any]] = {}  # the states of a parameter's pieces, by id
        for chunk in self._shards.chunks:
            own = [self._state_of(self._shards.tensor(piece)) for piece in chunk.pieces]
            received = broadcast(own, chunk.owner, self._shards.communicator)
            for piece, state in zip(chunk.pieces, received, strict=True):
                parameter = self._shards.parameter(piece)
                shape = self._shards.tensor(piece).shape
                found.setdefault(id(parameter), []).append((shape, state if keep else _without_memory(state)))
        return [self._packed(optimizer, found, keep=keep) for optimizer in self._optimizers]

    def load(self, number: int, state: Mapping[str, Any]) -> None:
        """Load the state of one optimizer that is not divided: this worker takes its pieces of it."""
        from paceline.run.saving.state import load_optimizer  # imports this package

        optimizer = self._optimizers[number]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._shards.cover({str(index): parameters[index] for index in state["state"]})
        pieces: dict[int, Any] = {}
        groups, count = [], 0
        if number == 0:  # the weights were loaded before
            self._shards.copy_masters(to_weights=False)
            self._has_masters = True
        for saved in state["param_groups"]:
            first = count
            for index in saved["params"]:
                for piece in self._shards.own_pieces(parameters[index]):
                    if index in state["state"]:
                        pieces[count] = self._part(state["state"][index], parameters[index], piece)
                        if (master := pieces[count].pop(MASTER, None)) is not None:
                            piece.copy_(master)
                    count += 1
            groups.append({**saved, "params": list(range(first, count))})
        with self.over_pieces():
            load_optimizer(optimizer, {**state, "state": pieces, "param_groups": groups})

    def _state_of(self, view: torch.Tensor) -> Any:
        """The state of a piece of this worker, with its master."""
        piece = self._shards.updated(view)
        for state in self._states:
            if piece in state:
                return {**state[piece], **({MASTER: piece} if piece is not view else {})}
        return None

    def _take(self, number: int, whole: Mapping[torch.Tensor, Any]) -> None:
        """Keep this worker's pieces of a state."""
        for parameter, values in whole.items():
            for piece in self._shards.own_pieces(parameter):
                self._states[number][piece] = self._part(values, parameter, piece)

    def _part(self, values: Mapping[str, Any], parameter: torch.Tensor, piece: torch.Tensor) -> dict[str, Any]:
        """What belongs to a piece of the state of a parameter."""
        if piece.shape == parameter.shape and id(parameter) in self._shards.whole:
            return dict(values)
        start = self._shards.start_of(piece)
        part = slice(start, start + piece.numel())
        pieces = {}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                pieces[name] = value
            elif value.shape == parameter.shape and name not in SCALARS:
                pieces[name] = flat(value, like=parameter)[part].clone()
            else:
                pieces[name] = value.clone()
        return pieces

    def _packed(self, optimizer: torch.optim.Optimizer, found: Mapping[int, Any], *, keep: bool) -> dict[str, Any]:
        """In the format of `state_dict`, whose numbers of parameters count through all groups."""
        states, groups, count = {}, [], 0
        for group in optimizer.param_groups:
            numbers = list(range(count, count + len(group["params"])))
            count += len(numbers)
            groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": numbers})
            for number, parameter in zip(numbers, group["params"], strict=True):
                pieces = found.get(id(parameter), [])
                if pieces and pieces[0][1] is not None:
                    states[number] = self._joined(parameter, pieces, keep=keep)
        return {"state": states, "param_groups": groups}

    def _joined(self, parameter: torch.Tensor, pieces: Sequence[Any], *, keep: bool) -> dict[str, Any]:
        shape, first = pieces[0]
        if id(parameter) in self._shards.whole:
            return dict(first)
        joined = {}
        for name, value in first.items():
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                joined[name] = value
            elif not keep:
                joined[name] = value.new_empty(()).expand(parameter.shape)
            else:
                like = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
                flat(like).copy_(torch.cat([state[name] for _, state in pieces]))
                joined[name] = like
        return joined

    def _refuse_saving(self, *_: Any) -> None:
        if not self._is_inside:
            raise MisuseError(
                "optimizer.state_dict() has no state: it is divided among the workers (shard=). Save the run with "
                "checkpoints=, whose files hold the whole state"
            )

    def _refuse_loading(self, *_: Any) -> None:
        if not self._is_inside:
            raise MisuseError(
                "optimizer.load_state_dict() cannot be used while the state is divided among the workers (shard=): "
                "resume from a checkpoint, or load it before the set-up"
            )


def _without_memory(state: Any) -> Any:
    if state is None:
        return None
    return {
        name: torch.empty((), dtype=value.dtype).expand(value.shape) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
