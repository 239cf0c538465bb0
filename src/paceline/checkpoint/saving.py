"""Writing a checkpoint: every worker its pieces, into a folder that becomes visible when all is on the disk.

Workers that share a folder meet in it. Each leaves a record of what it wrote, the first waits for the records of the
others, writes the manifest and renames the folder: no message is exchanged, so saving can go on beside the training.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import torch

from paceline.checkpoint import safetensors_file
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import make_visible, move_aside, new_token, partial_folder, step_folder
from paceline.checkpoint.hashed_file import flush_folder, write_file
from paceline.checkpoint.manifest import MANIFEST_NAME, ComponentFiles, Contents, Manifest, joined
from paceline.checkpoint.pieces import Component, Disk, Piece, pieces_of, writers
from paceline.checkpoint.reading import inspect, newest_intact
from paceline.checkpoint.tree import flatten, unflatten
from paceline.core.world import World

logger = logging.getLogger("paceline")

DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. `token` names the attempt and must be the same on all workers: rank 0's.

    `configuration`, `position` and `metrics` are plain values that go into the manifest, as they are now: the job
    has copies of its own.
    """

    step: int
    components: Sequence[Component]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    token: str = field(default_factory=new_token)

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step={self.step!r} is not a count: choose an integer >= 0")
        for name in ("configuration", "position", "metrics"):
            flat = flatten(dict(getattr(self, name)), name)
            if flat.tensors:
                raise TypeError(f"{name} has tensors in {', '.join(flat.tensors)}: the manifest takes plain values")
            object.__setattr__(self, name, unflatten(flat.structure, {}))


@dataclass(frozen=True)
class Manner:
    """How a worker takes part in writing.

    `flush`: wait for the disk; not for a folder in memory. `give_up`: set when nobody waits for the save any more, so
    that this worker does not wait for another's part, which may never come.
    """

    world: World
    disk: Disk = Disk.SHARED
    timeout_s: float = DEFAULT_TIMEOUT_S
    flush: bool = True
    give_up: Event = field(default_factory=Event)

    @property
    def is_first(self) -> bool:
        """Whether this worker makes the checkpoint visible, and waits for the others' parts."""
        return self.world.rank == writers(self.world, self.disk)[0]


def save(
    root: Path,
    job: Job,
    world: World | None = None,
    *,
    disk: Disk = Disk.SHARED,
    num_shards: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Path | None:
    """Write a checkpoint into the run folder `root`, which exists, and return when it is on the disk.

    Called by every worker. Returns the checkpoint's folder to the worker that made it visible, None to the others.
    An error leaves older checkpoints as they are and nothing of this one, but for what a worker writes that does not
    know yet that the first has failed: `AsyncWriter` removes that too.
    """
    world = world or World()
    return save_pieces(root, job, pieces_of(job.components, world, disk, num_shards), Manner(world, disk, timeout_s))


def save_pieces(root: Path, job: Job, pieces: Iterable[Piece], manner: Manner) -> Path | None:
    """As `save`, with what this worker writes already laid out. All tensors are on the CPU."""
    world = manner.world
    partial = partial_folder(root, job.step, job.token)
    first, *others = writers(world, manner.disk)
    pieces = list(pieces)
    try:
        # Not with its parents: a run folder that vanished may be a disk that is no longer mounted.
        partial.mkdir(exist_ok=True)
        own = _write(partial, pieces, flush=manner.flush)
        if world.rank != first:
            _leave(partial, world.rank, own.to_json())
            return None
        deadline = monotonic() + manner.timeout_s
        contents = joined([own, *(_record_of(partial, rank, deadline, manner.give_up) for rank in others)])
        return _publish(root, partial, job, contents, manner)
    except BaseException as error:
        if world.rank == first:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            _leave_error(partial, world.rank, pieces, error)
        if isinstance(error, OSError | CheckpointError):
            raise CheckpointError(_not_saved(root, job.step, error)) from error
        raise


def _write(partial: Path, pieces: Iterable[Piece], *, flush: bool) -> Contents:
    shares = []
    for piece in pieces:
        if piece.must_be_finite:
            _check_finite(piece)
        files = {name: write_file(partial / name, _dump(text), flush=flush) for name, text in piece.texts.items()}
        for name, tensors in piece.tensors.items():
            files[name] = safetensors_file.write(partial / name, tensors, flush=flush)
        shares.append(Contents({piece.component: ComponentFiles(piece.pattern, {piece.part: tuple(files)})}, files))
    return joined(shares)


def _check_finite(piece: Piece) -> None:
    for tensors in piece.tensors.values():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"tensor {name!r} of component {piece.component!r} has values that are inf or NaN"
                )


def _leave(partial: Path, rank: int, record: Mapping[str, Any]) -> None:
    """Tell the first worker what this one wrote, or that it failed. Renamed into place: it is seen whole or not."""
    path = _record_path(partial, rank)
    hidden = path.with_suffix(".new")
    hidden.write_bytes(_dump(record))
    hidden.rename(path)


def _leave_error(partial: Path, rank: int, pieces: Iterable[Piece], error: BaseException) -> None:
    """Tell the first worker that this one failed. What it wrote goes first: the disk may be full."""
    for piece in pieces:
        for name in (*piece.texts, *piece.tensors):
            with suppress(OSError):
                (partial / name).unlink()
    try:
        _leave(partial, rank, {"error": _cause(error)})
    except OSError:
        with suppress(OSError):
            _record_path(partial, rank).touch()  # there may be room for a name


def _record_of(partial: Path, rank: int, deadline: float, give_up: Event) -> Contents:
    path = _record_path(partial, rank)
    while not path.exists():
        if not partial.is_dir():
            raise CheckpointError(f"{partial} vanished while rank {rank} was writing its part")
        if monotonic() > deadline:
            raise CheckpointError(f"rank {rank} did not finish its part in time: {path} did not appear")
        if give_up.wait(_POLL_S):
            raise CheckpointError(f"the run ended before rank {rank} had written its part")
    content = path.read_bytes()
    record = json.loads(content) if content else {"error": "there is no room to say why"}
    if "error" in record:
        raise CheckpointError(f"rank {rank} could not write its part: {record['error']}")
    path.unlink()
    return Contents.from_json(record)


def _record_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank}.written.json"


def _publish(root: Path, partial: Path, job: Job, contents: Contents, manner: Manner) -> Path:
    manifest = Manifest(job.step, manner.world.size, contents, job.configuration, job.position, job.metrics)
    write_file(partial / MANIFEST_NAME, manifest.render(), flush=manner.flush)
    if manner.flush:
        flush_folder(partial)
    final = step_folder(root, job.step)
    _make_way(final)
    make_visible(partial, final, flush=manner.flush)
    return final


def _make_way(final: Path) -> None:
    """A checkpoint that has this name is replaced; what has the name and cannot be used is the user's, and kept."""
    if not os.path.lexists(final):
        return
    try:
        inspect(final)
        flaw = "it is a symbolic link" if final.is_symlink() else ""
    except (CheckpointError, OSError) as error:
        flaw = str(error)
    if flaw:
        aside = move_aside(final.parent, [final])
        logger.warning("%s was moved to %s, since it is not a checkpoint that can be used: %s", final, aside, flaw)


def _not_saved(root: Path, step: int, error: OSError | CheckpointError) -> str:
    cause = _cause(error)
    with suppress(OSError):
        if intact := newest_intact(root):
            return f"the checkpoint of step {step} was not saved in {root}: {cause}. Intact is still {intact}"
    return f"the checkpoint of step {step} was not saved in {root}: {cause}. There is no older one"


def _cause(error: BaseException) -> str:
    return f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)


def _dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
