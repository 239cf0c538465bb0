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
from paceline.run.sharding.states import AVERAGE, WEIGHT, part_of, shaped_like, whole_states
from paceline.sync.gradients.division import Division
from paceline.sync.gradients.shards import Shards

# The update of an element depends on that element only, so any piece of a parameter may be updated separately.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
# The update of a parameter depends on that whole parameter only.
BY_PARAMETER = ("Muon",)
# The class attribute by which other optimizers declare one of these kinds.
DECLARATION = "paceline_shard"
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
    raise ValueError(
        f"the state of {kind.__name__} cannot be divided among the workers: it is not known whether its parts are "
        f"independent. Leave shard= out, choose one of torch.optim's {', '.join((*ELEMENTWISE, *BY_PARAMETER))}, or, "
        f"in your own optimizer, set the class attribute {DECLARATION} = 'elements' if elements are updated "
        "independently, or 'parameters' if parameters are"
    )


class PieceOptimizers:
    """The optimizers of a replica, over this worker's pieces. Takes over their existing state."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor], shards: Shards
    ) -> None:
        self._optimizers = optimizers
        self.shards = shards
        self._states: list[Any] = []
        self.averages: dict[torch.Tensor, torch.Tensor] = {}  # of weights, by this worker's view of a parameter
        self.note_groups()
        self._division.cover(parameters)
        # Of parameters that are frozen now.
        with_state = [p for optimizer in optimizers for p in optimizer.state]
        self._division.cover({str(number): p for number, p in enumerate(with_state)})
        for optimizer in optimizers:
            self._states.append(defaultdict(dict, self._parts_of(optimizer.state)))
            optimizer.state = defaultdict(dict)
        self._hooks = [each.register_state_dict_pre_hook(self._refuse_saving) for each in optimizers]
        self._hooks += [each.register_load_state_dict_pre_hook(self._refuse_loading) for each in optimizers]
        self._is_inside = False
        self._has_masters = False
        self._before: tuple[Division, list[Any], dict[torch.Tensor, torch.Tensor]] | None = None  # the last `move`

    @property
    def _division(self) -> Division:
        return self.shards.division

    def note_groups(self) -> None:
        """Called for new groups: some optimizers need whole parameters."""
        for optimizer in self._optimizers:
            if needs_whole_parameters(optimizer):
                self._division.whole |= {id(p) for group in optimizer.param_groups for p in group["params"]}

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
                group["params"] = [piece.updated for p in group["params"] for piece in self._division.own_pieces(p)]
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
            self._division.copy_masters(to_weights=False)
            self._has_masters = True
        with self.over_pieces():
            step_optimizers()
        self._division.copy_masters(to_weights=True)

    def state_dicts(self, keeps: Callable[[torch.Tensor], bool]) -> list[dict[str, Any]]:
        """The optimizers' states as if they were not divided, on the CPU. Called by all workers together.

        keeps: whether this worker keeps the state of a parameter. Other states are on the meta device.
        """
        found = self._whole(self._state_of, keeps)
        return [_packed(optimizer, found) for optimizer in self._optimizers]

    def whole_averages(self, keeps: Callable[[torch.Tensor], bool]) -> dict[int, torch.Tensor]:
        """The averages of whole parameters, by id. See `state_dicts`."""
        return {number: state[AVERAGE] for number, state in self._whole(self._average_of, keeps).items()}

    def _whole(
        self, state_of: Callable[[torch.Tensor], dict[str, Any]], keeps: Callable[[torch.Tensor], bool]
    ) -> dict[int, dict[str, Any]]:
        """The states of whole parameters that have one, by id."""
        division = self._division
        numbers = {id(p): str(number) for number, p in enumerate(division.parameters)}
        sources = [chunk.owner for chunk in division.chunks]
        found = {}
        for name, state in whole_states(numbers, self.shards.communicator, division, sources, state_of):
            parameter = division.parameters[int(name)]
            if state:
                found[id(parameter)] = shaped_like(parameter, state, keep=keeps(parameter))
        return found

    def settings(self) -> list[dict[str, Any]]:
        """The optimizers' states without the divided part."""
        return [_packed(optimizer, {}) for optimizer in self._optimizers]

    def load(self, number: int, state: Mapping[str, Any]) -> None:
        """Load the state of one optimizer that is not divided: this worker takes its pieces of it."""
        groups = self._optimizers[number].param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._division.cover({str(index): parameters[index] for index in state["state"]})
        parts = self._parts_of({parameters[index]: values for index, values in state["state"].items()})
        self._load_parts(number, state["param_groups"], parts)

    @torch.no_grad()
    def move(self, division: Division, sources: Sequence[int], parameters: Mapping[str, torch.Tensor]) -> None:
        """Take over this worker's part of a new division, and all weights. Called by all workers together.

        sources: by chunk of the previous division, a rank that holds its pieces. parameters: all divided parameters,
        with the same order and names on all workers. Workers that join do not have the previous division.
        """
        division.whole = self._division.whole
        division.cover(parameters)
        averages: dict[torch.Tensor, torch.Tensor] = {}
        parts: dict[torch.Tensor, dict[str, Any]] = {}
        names = {id(p): name for name, p in parameters.items()}
        for name, state in whole_states(names, self.shards.communicator, self._division, sources, self._all_of):
            parameter = parameters[name]
            parameter.detach().copy_(shaped_like(parameter, {WEIGHT: state.pop(WEIGHT)}, keep=True)[WEIGHT])
            for piece in division.own_pieces(parameter) if state else ():
                parts[piece.updated] = part = part_of(state, parameter, piece, division)
                if (average := part.pop(AVERAGE, None)) is not None:
                    averages[piece.weights] = average.to(piece.weights.device)
        # If another worker is lost, some workers may not get to this point: see `revert`.
        before = self._division, self._states, self.averages
        self.shards.divide_again(division)
        self._before = before
        self._states, self.averages = [defaultdict(dict) for _ in self._optimizers], averages
        for number, settings in enumerate(self.settings()):
            self._load_parts(number, settings["param_groups"], parts)

    def revert(self) -> None:
        """Undo `move`. Possible until the next update."""
        assert self._before is not None, "no worker is behind after an update"
        division, self._states, self.averages = self._before
        self.shards.divide_again(division)
        self._before = None

    def forget_division(self) -> None:
        """All workers have completed `move`."""
        self._before = None

    def _load_parts(
        self, number: int, saved: Sequence[Mapping[str, Any]], parts: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Load saved settings of an optimizer's groups, and the states of this worker's pieces."""
        from paceline.run.saving.state import load_optimizer  # imports this module

        optimizer = self._optimizers[number]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if number == 0:  # the weights were loaded before
            self._division.copy_masters(to_weights=False)
            self._has_masters = True
        states: dict[int, Any] = {}
        groups, count = [], 0
        for group in saved:
            first = count
            for index in group["params"]:
                for piece in self._division.own_pieces(parameters[index]):
                    if state := parts.get(piece.updated):
                        states[count] = state
                        if (master := state.pop(MASTER, None)) is not None:
                            piece.updated.copy_(master)
                    count += 1
            groups.append({**group, "params": list(range(first, count))})
        with self.over_pieces():
            load_optimizer(optimizer, {"state": states, "param_groups": groups})

    def _state_of(self, view: torch.Tensor) -> dict[str, Any]:
        """The state of a piece of this worker, with its master."""
        piece = self._division.updated(view)
        for state in self._states:
            if piece in state:
                return {**state[piece], **({MASTER: piece} if piece is not view else {})}
        return {}

    def _average_of(self, view: torch.Tensor) -> dict[str, Any]:
        return {AVERAGE: self.averages[view]} if view in self.averages else {}

    def _all_of(self, view: torch.Tensor) -> dict[str, Any]:
        return {**self._state_of(view), **self._average_of(view), WEIGHT: view}

    def _parts_of(self, whole: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """This worker's pieces of the states of whole parameters."""
        return {
            piece.updated: part_of(values, parameter, piece, self._division)
            for parameter, values in whole.items()
            for piece in self._division.own_pieces(parameter)
        }

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


def _packed(optimizer: torch.optim.Optimizer, found: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """In the format of `state_dict`, which numbers parameters through all groups. found: states by parameter id."""
    states: dict[int, Any] = {}
    groups, count = [], 0
    for group in optimizer.param_groups:
        numbers = range(count, count + len(group["params"]))
        count = numbers.stop
        settings = {name: value for name, value in group.items() if name != "params"}
        groups.append({**settings, "params": list(numbers)})
        pairs = zip(numbers, group["params"], strict=True)
        states |= {number: found[id(parameter)] for number, parameter in pairs if id(parameter) in found}
    return {"state": states, "param_groups": groups}
