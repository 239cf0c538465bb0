"""Who writes what: one worker's share of a checkpoint's files. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from paceline.checkpoint.manifest import COMPONENT_NAME, MANIFEST_NAME, WHOLE, Pattern
from paceline.checkpoint.tree import Flat, flatten
from paceline.core.world import World


class Disk(Enum):
    """Whether the workers see one run folder, or every node has one of its own.

    On disks of their own every node has all replicated state; GLOBAL state is only on rank 0's, PER_RANK and PER_NODE
    state only on the disk of the node it belongs to.
    """

    SHARED = "shared"
    PER_NODE = "per node"


@dataclass(frozen=True)
class Component:
    """State that takes part in a checkpoint under a name. Every worker passes the same components.

    `state` is what `state_dict()` returned: a tree of tensors and plain values (see `tree`). With `must_be_finite` a
    checkpoint with an inf or NaN in one of its floating-point tensors is not written.
    """

    name: str
    state: Any
    pattern: Pattern = Pattern.REPLICATED
    must_be_finite: bool = False

    def __post_init__(self) -> None:
        if not COMPONENT_NAME.fullmatch(self.name) or f"{self.name}.json" == MANIFEST_NAME:
            raise ValueError(
                f"component name {self.name!r} cannot be a file's: use letters, digits, - and _, at most 100, and not "
                "'manifest'"
            )


@dataclass(frozen=True)
class Piece:
    """What one worker writes of one component: file name -> JSON text or tensors. Complete but for the writing."""

    component: str
    pattern: Pattern
    part: str
    texts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    must_be_finite: bool = False


def writers(world: World, disk: Disk) -> range:
    """The ranks that write into the folder this worker sees; the first of them makes the checkpoint visible."""
    if disk is Disk.SHARED:
        return range(world.size)
    first = world.rank - world.local_rank
    return range(first, first + world.local_size)


def part_of(pattern: Pattern, world: World) -> str:
    """The part of a component that belongs to this worker. A node is named after the rank of its first worker."""
    if pattern is Pattern.PER_RANK:
        return f"rank-{world.rank}"
    if pattern is Pattern.PER_NODE:
        return f"node-{world.rank - world.local_rank}"
    return WHOLE


def pieces_of(components: Sequence[Component], world: World, disk: Disk, num_shards: int = 1) -> list[Piece]:
    """What this worker writes. Its tensors are the state's own: nothing is copied.

    With `num_shards` above 1 a replicated component's tensors are divided among as many of the writers.
    """
    names = [component.name for component in components]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several components are named {', '.join(repeated)}: give each a name of its own")
    ranks = writers(world, disk)
    place = world.rank - ranks.start
    num_shards = min(num_shards, len(ranks))
    pieces = []
    for component in components:
        if component.pattern is Pattern.REPLICATED:
            if place < num_shards:
                pieces.append(_piece(component, WHOLE, place, num_shards))
        elif _owns(component.pattern, world):
            pieces.append(_piece(component, part_of(component.pattern, world)))
    return pieces


def split(sizes: Mapping[str, int], num_shards: int) -> list[list[str]]:
    """The names in up to `num_shards` groups of about equal size: each name, largest first, to the smallest group."""
    groups: list[list[str]] = [[] for _ in range(min(num_shards, len(sizes)))]
    loads = [0] * len(groups)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = loads.index(min(loads))
        groups[smallest].append(name)
        loads[smallest] += sizes[name]
    return groups


def _owns(pattern: Pattern, world: World) -> bool:
    """Whether this worker holds a part of a component that is not replicated."""
    if pattern is Pattern.GLOBAL:
        return world.is_main
    return pattern is Pattern.PER_RANK or world.local_rank == 0


def _piece(component: Component, part: str, shard: int = 0, num_shards: int = 1) -> Piece:
    flat = flatten(component.state, component.name)
    stem = component.name if part == WHOLE else f"{component.name}.{part}"
    groups = split({name: tensor.nbytes for name, tensor in flat.tensors.items()}, num_shards)
    files = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        files = [f"{stem}.safetensors"]
    texts = {}
    if shard == 0:
        texts[f"{stem}.json"] = flat.structure
        if len(groups) > 1:
            texts[f"{stem}.safetensors.index.json"] = _index(flat, dict(zip(files, groups, strict=True)))
    own = {files[shard]: {name: flat.tensors[name] for name in groups[shard]}} if shard < len(groups) else {}
    return Piece(component.name, component.pattern, part, texts, own, component.must_be_finite)


def _index(flat: Flat, groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The index that tools of the Hugging Face world expect beside a model in several files."""
    places = {name: file for file, names in groups.items() for name in names}
    total = sum(tensor.nbytes for tensor in flat.tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": {name: places[name] for name in flat.tensors}}
