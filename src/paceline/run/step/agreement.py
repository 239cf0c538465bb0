"""What must be the same on every worker, and whether it is.

A worker without a share in a step does not run the loop's body. So code there that changes an optimizer or the set of
trained parameters can leave replicas different without any error. Every exchange therefore carries a digest of both.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.comm.messages import gather
from paceline.core.errors import MisuseError
from paceline.run.step.replica import Replica
from paceline.sync.step_numbers import LocalNumbers, Numbers

_PLAIN = (bool, int, float, str, type(None))


class Agreement:
    """Compares hyper-parameters and trained parameters over the workers, as each step's exchange brings them."""

    def __init__(self, replica: Replica, communicator: Communicator) -> None:
        self._replica = replica
        self._communicator = communicator
        self._is_alone = communicator.world.size == 1
        self._values: list[Any] = []
        self._trained: tuple[str, ...] = ()
        self._digest = 0
        self._unread: deque[Numbers] = deque()

    def digest(self) -> int:
        """Of this worker, for the exchange."""
        if self._is_alone:
            return 0
        values = [
            value for optimizer in self._replica.optimizers for g in optimizer.param_groups for value in g.values()
        ]
        trained = self._replica.trained_names
        if trained is not self._trained or not _are_unchanged(values, self._values):
            self._values, self._trained = values, trained
            shapes = [f"{tuple(p.shape)} {p.dtype}" for p in self._replica.parameters.values()]
            groups = [g for optimizer in self._replica.optimizers for g in optimizer.param_groups]
            plain = [[_plain(value) for key, value in group.items() if key != "params"] for group in groups]
            text = json.dumps([trained, shapes, plain])
            self._digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
        return self._digest

    def check(self, numbers: Numbers, *, now: bool) -> None:
        """Raise on all workers if they differ. On a GPU the host looks when the numbers have arrived, or `now`."""
        if self._is_alone or isinstance(numbers, LocalNumbers):
            return
        if not self._unread and numbers.has_arrived:
            self._compare(numbers.digests)
            return
        self._unread.append(numbers)
        while self._unread and (now or self._unread[0].has_arrived):
            self._compare(self._unread.popleft().digests)

    def _compare(self, digests: Sequence[int]) -> None:
        if digests.count(digests[0]) != len(digests):
            self._explain()

    def _explain(self) -> None:
        """All workers have seen the same difference, and all are here."""
        own = {"hyper-parameters": self._hyper_parameters(), "trained": list(self._replica.trained_names)}
        everybody = [json.loads(text) for text in gather(json.dumps(own), self._communicator)]
        first = everybody[0]
        for rank, other in enumerate(everybody):
            if other["trained"] != first["trained"]:
                names = set(other["trained"]) ^ set(first["trained"])
                name = next((n for n in [*first["trained"], *other["trained"]] if n in names), first["trained"][0])
                here, elsewhere = (rank, 0) if name in other["trained"] else (0, rank)
                raise MisuseError(
                    f"parameter {name!r} is trained on rank {here} and not on rank {elsewhere}: a worker without a "
                    "share in a step skips the loop's body. Freeze, unfreeze, add and remove parameters on all "
                    "workers alike: in a hook of "
                    "trainer.every or trainer.every_epoch, or between epochs"
                )
            for field, value in first["hyper-parameters"].items():
                found = other["hyper-parameters"].get(field, "missing")
                if found != value:
                    raise MisuseError(
                        f"{field} is {found} on rank {rank} and {value} on rank 0: a worker without a share in a step "
                        "skips the loop's body. Give schedulers to the set-up (scheduler=), call trainer.set_lr, or "
                        "change hyper-parameters in a hook of trainer.every, which all workers reach"
                    )
        raise MisuseError("the workers' optimizers differ in number or kind: every worker must build the same")

    def _hyper_parameters(self) -> dict[str, str]:
        fields = {}
        for optimizer in self._replica.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        fields[f"{key!r} in group {number} of {type(optimizer).__name__}"] = str(_plain(value))
        return fields


def _are_unchanged(values: list[Any], before: list[Any]) -> bool:
    if len(values) != len(before) or not all(map(operator.is_, values, before)):
        return False
    return torch.Tensor not in map(type, values)  # which may change in place


def _plain(value: Any) -> Any:
    """The value where two processes would write it alike; else its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor) and value.is_cpu:
        return value.tolist()
    return type(value).__name__
