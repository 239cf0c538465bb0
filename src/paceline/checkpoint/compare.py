"""Checks that state that must be equal on all workers is equal.

Every worker calls `check_replication` at the same point. It compares each worker's state with rank 0's:

- "none": not at all.
- "quick": the structure (names, shapes, dtypes and all plain values), and a few values of each tensor.
- "tensor": the structure, and a checksum of each tensor.
- "full": the structure, and every value of each tensor; reports the largest difference.

If any worker differs, all raise the same `ReplicationError`, which names the tensors and the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.checkpoint.errors import ReplicationError
from paceline.checkpoint.files import bytes_of
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.policy import Level as Level
from paceline.comm.base import Communicator
from paceline.comm.messages import from_rank_0, gather
from paceline.core.tree import flatten

if TYPE_CHECKING:
    from paceline.checkpoint.writer import Component

SAMPLES_PER_TENSOR = 16
_MAX_NAMED = 3
_FINGERPRINT_BYTES = 16


def check_components(
    components: Iterable[Component], levels: Level | Mapping[str, Level], communicator: Communicator
) -> None:
    """Check the replicated ones of these components, each at its level; with levels by name, no others.

    Divided ones are skipped: each worker has another part.
    """
    replicated = {each.name: each for each in components if each.pattern is Pattern.REPLICATED}
    by_name = dict.fromkeys(replicated, levels) if isinstance(levels, str) else levels
    for name, level in by_name.items():
        if name not in replicated:
            raise ValueError(
                f"check_replicas[{name!r}]: this run has no such component that must be the same on every worker; "
                f"choose from {', '.join(replicated)}"
            )
        if not replicated[name].is_divided:
            check_replication(name, replicated[name].state, level, communicator)


def check_replication(name: str, state: Any, level: Level, communicator: Communicator) -> None:
    """Raise on all workers if any worker's `state` differs from rank 0's. `name` is its name in messages."""
    if level == "none" or communicator.world.size == 1:
        return
    tensors = flatten(state, name).tensors
    # Everything except the tensors' values, as lines.
    outline = [f"tensor {name} is {tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in tensors.items()]
    outline += _plain_values(state, name)
    theirs = from_rank_0("\n".join(outline).encode(), communicator).decode().split("\n")
    pairs = zip_longest(outline, theirs, fillvalue="nothing more")
    difference = next((f"{mine}, on rank 0 {other}" for mine, other in pairs if mine != other), "")
    _raise_on_all_workers(name, difference, communicator)
    compare = _compare_values if level == "full" else partial(_compare_fingerprints, is_quick=level == "quick")
    _raise_on_all_workers(name, compare(tensors, communicator), communicator)


def _raise_on_all_workers(name: str, difference: str, communicator: Communicator) -> None:
    found = {rank: text for rank, text in enumerate(gather(difference, communicator)) if text}
    if found:
        details = "; ".join(f"on rank {rank} {text}" for rank, text in found.items())
        raise ReplicationError(
            f"{name} must be the same on every worker, but differs from rank 0's: {details}", ranks=tuple(found)
        )


def _plain_values(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict | list | tuple):
        yield f"{path} is a {type(node).__name__} of {len(node)}"
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _plain_values(value, f"{path}[{key!r}]")
    elif not isinstance(node, torch.Tensor | np.ndarray):
        yield f"{path} is {node!r}"


def _compare_fingerprints(tensors: Mapping[str, torch.Tensor], communicator: Communicator, *, is_quick: bool) -> str:
    """The tensors whose fingerprints, of some or all values, differ from rank 0's."""
    own = [_fingerprint(tensor, is_quick) for tensor in tensors.values()]
    theirs = from_rank_0(b"".join(own), communicator)
    parts = [theirs[start : start + _FINGERPRINT_BYTES] for start in range(0, len(theirs), _FINGERPRINT_BYTES)]
    return _named([repr(name) for name, mine, other in zip(tensors, own, parts, strict=True) if mine != other])


def _fingerprint(tensor: torch.Tensor, is_quick: bool) -> bytes:
    values = tensor.reshape(-1)
    if is_quick and values.numel() > SAMPLES_PER_TENSOR:
        values = values[torch.linspace(0, values.numel() - 1, SAMPLES_PER_TENSOR, dtype=torch.float64).long()]
    return hashlib.blake2b(bytes_of(values.cpu().contiguous()), digest_size=_FINGERPRINT_BYTES).digest()


def _compare_values(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> str:
    """The tensors that are not bitwise equal to rank 0's, largest difference first. Copies one tensor at a time."""
    differences = {}
    for name, tensor in tensors.items():
        own = tensor.to(communicator.world.device).contiguous()
        if own.numel() == 0:
            continue
        theirs = own.clone()
        communicator.broadcast(theirs.reshape(-1).view(torch.uint8), 0).wait()
        if not torch.equal(own.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            differences[name] = (own.double() - theirs.double()).abs().max().item()
    largest_first = sorted(differences, key=lambda name: -differences[name])
    return _named([f"{name!r} (by up to {differences[name]:.3g})" for name in largest_first])


def _named(differing: list[str]) -> str:
    if not differing:
        return ""
    more = len(differing) - _MAX_NAMED
    return f"in tensor {', '.join(differing[:_MAX_NAMED])}" + (f" and {more} more" if more > 0 else "")
