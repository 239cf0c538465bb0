"""Writes checkpoints in the background: training waits for a copy of the state in host memory, not for the disk.

Each worker writes its share of a checkpoint into one hidden folder and leaves a record of it there. The first worker
waits for the others' records, writes the manifest and renames the folder. No message is exchanged, so writing overlaps
with training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from paceline.checkpoint.errors import CheckpointError, cause_of
from paceline.checkpoint.files import flush_folder, replacing, write_file, write_tensors
from paceline.checkpoint.folders import complete_steps, delete, make_visible, move_aside, partial_folder, step_folder
from paceline.checkpoint.manifest import (
    COMPONENT_NAME,
    MANIFEST_NAME,
    ComponentFiles,
    Contents,
    Manifest,
    Pattern,
    stem_of,
)
from paceline.checkpoint.policy import Retention, steps_to_delete
from paceline.checkpoint.reader import inspect, newest_intact
from paceline.checkpoint.run_folder import writer_ranks
from paceline.checkpoint.staging import HostStaging
from paceline.core.timing import DEFAULT_TIMEOUT_S, ActiveTimer
from paceline.core.tree import flatten
from paceline.core.world import World

logger = logging.getLogger("paceline")

_POLL_S = 0.02
_TENSORS = ".safetensors"


@dataclass(frozen=True)
class Component:
    """State that is saved under a name. Every worker passes the same components.

    `state` is a tree of tensors and plain values (see `core.tree`), such as a `state_dict()`. With `must_be_finite`, a
    checkpoint with an inf or NaN in one of its floating-point tensors is not written. With `is_divided`, each tensor is
    on one of the workers that write into a folder, and on the meta device of the others.
    """

    name: str
    state: Any
    pattern: Pattern = Pattern.REPLICATED
    must_be_finite: bool = False
    is_divided: bool = False

    def __post_init__(self) -> None:
        if not COMPONENT_NAME.fullmatch(self.name) or f"{self.name}.json" == MANIFEST_NAME:
            raise ValueError(
                f"component name {self.name!r} cannot be a file name: use at most 100 letters, digits, - and _, and "
                "not 'manifest'"
            )


class PlannedFile(NamedTuple):
    """A file that this worker writes. `content`: a JSON value, or tensors by name (in files named .safetensors)."""

    component: Component
    part: str
    content: Any


@dataclass(eq=False)
class AsyncWriter:
    """Writes one worker's share of checkpoints into the run folder `root`. Every worker of the world has one.

    `save` copies the state and returns; a thread writes it, publishes the checkpoint and deletes those that `retention`
    does not keep. One save runs at a time: the next one waits for it. A failure is reported once: returned by `poll`,
    or raised by the next `save`, `wait` or `close`. After an error elsewhere, call `abandon` before `close`.

    `token` must be equal on all workers. `shared_disk`: all workers write into one folder; otherwise each node has its
    own, which holds all replicated state and what belongs to that node. `num_shards`: how many workers write the
    tensors of replicated components. `flush`: wait for the disk. `record`: entered in the thread for each save.
    """

    root: Path
    world: World = field(default_factory=World)
    _: KW_ONLY
    token: str = "0"
    shared_disk: bool = True
    num_shards: int = 1
    retention: Retention = field(default_factory=Retention)
    timeout_s: float = DEFAULT_TIMEOUT_S
    flush: bool = True
    record: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self._num_saves = 0
        self.ranks = writer_ranks(self.world, shared_disk=self.shared_disk)
        self._gives_up_at = math.inf  # on the monotonic clock
        self._staging = HostStaging()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="paceline-checkpoint")
        self.pending: futures.Future[None] | None = None  # what the thread does, until its outcome is reported
        # Folders of failed saves, into which another worker may still write.
        self._failed: list[Path] = []
        self.root.mkdir(parents=True, exist_ok=True)

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self.pending is not None and not self.pending.done()

    def reserve(self, components: Sequence[Component]) -> None:
        """Allocate host memory for these components in the background. Without it, the first save takes longer."""
        self.wait()
        files = files_of(components, self.world, self.ranks, self.num_shards)
        self.pending = self._thread.submit(self._staging.reserve, list(_tensors_of(files).values()))

    def save(self, manifest: Manifest, components: Sequence[Component]) -> None:
        """Copy the state and write it in the background. Returns when the state may change. `manifest`: no contents."""
        self._num_saves += 1  # first: it must be equal on all workers, also if one of them raises
        self.wait()
        files = files_of(components, self.world, self.ranks, self.num_shards)
        tensors = _tensors_of(files)
        copies, wait_for_copies = self._staging.copy(list(tensors.values()))
        copy_of = dict(zip(tensors, copies, strict=True))
        for held in (file.content for name, file in files.items() if name.endswith(_TENSORS)):
            held.update({name: copy_of[id(tensor)] for name, tensor in held.items()})
        partial = partial_folder(self.root, manifest.step, f"{self.token}{self._num_saves:x}")
        manifest = replace(manifest, world_size=self.world.size)

        def write() -> None:
            with self.record():
                wait_for_copies()
                self._write(manifest, files, partial)

        self.pending = self._thread.submit(write)

    def poll(self, *, wait: bool = False) -> CheckpointError | None:
        """The error of the last save, once; None if it succeeded or, without `wait`, is being written."""
        if wait and self.pending is not None:
            futures.wait([self.pending])
        if self.is_busy:
            return None
        self._remove_failed()
        done, self.pending = self.pending, None
        error = None if done is None else done.exception()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error

    def wait(self) -> None:
        """Wait until nothing is being written, and raise the error of the last save if it was not reported yet."""
        if error := self.poll(wait=True):
            raise error

    @property
    def is_abandoned(self) -> bool:
        return self._gives_up_at < math.inf

    def abandon(self, wait_s: float = 0.0) -> None:
        """Wait for other workers' shares no longer than this: they may never come. Called from any thread."""
        self._gives_up_at = min(self._gives_up_at, monotonic() + wait_s)

    def close(self) -> None:
        """Finish the current save and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._remove_failed()

    # In the background

    def _write(self, manifest: Manifest, files: Mapping[str, PlannedFile], partial: Path) -> None:
        is_first = self.world.rank == self.ranks[0]
        try:
            # Without parents: if the run folder vanished, its disk may no longer be mounted.
            partial.mkdir(exist_ok=True)
            own = Contents.merge(self._write_file(partial / name, file) for name, file in files.items())
            if not is_first:
                _leave_record(partial, self.world.rank, asdict(own))
                return
            waited = ActiveTimer()
            contents = [own, *(self._record_of(partial, rank, waited) for rank in self.ranks[1:])]
            self._publish(partial, replace(manifest, contents=Contents.merge(contents)))
        except BaseException as error:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                # No worker is further behind than the previous save.
                self._failed = [*self._failed[-1:], partial]
            else:
                _leave_error(partial, self.world.rank, files, error)
            if isinstance(error, OSError | CheckpointError):
                raise CheckpointError(_not_saved(self.root, manifest.step, error)) from error
            raise
        self._remove_failed()
        self._failed.clear()  # all workers have reached this save, so they have finished the earlier ones
        _delete_unneeded(self.root, manifest.step, self.retention)

    def _write_file(self, path: Path, file: PlannedFile) -> Contents:
        component, part, content = file
        if path.name.endswith(_TENSORS):
            for name, tensor in content.items() if component.must_be_finite else ():
                # Not all kinds of float8 have isfinite. Their values fit float16.
                values = tensor.half() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
                if values.is_floating_point() and not values.isfinite().all():
                    raise CheckpointError(f"tensor {name!r} of component {component.name!r} contains inf or NaN")
            record = write_tensors(path, content, flush=self.flush)
        else:
            record = write_file(path, [_dump(content)], flush=self.flush)
        files = ComponentFiles(component.pattern, {part: (path.name,)})
        return Contents({component.name: files}, {path.name: record})

    def _record_of(self, partial: Path, rank: int, waited: ActiveTimer) -> Contents:
        """Wait for what another worker writes, and return it."""
        path = _record_path(partial, rank)
        while not path.exists():
            if not partial.is_dir():
                raise CheckpointError(f"{partial} vanished while rank {rank} was writing its part")
            if waited.update() > self.timeout_s:
                raise CheckpointError(f"rank {rank} did not finish its part in time: {path} did not appear")
            if monotonic() > self._gives_up_at:
                raise CheckpointError(f"the run ended before rank {rank} had written its part")
            sleep(_POLL_S)
        content = path.read_bytes()
        record = json.loads(content) if content else {"error": "the cause is unknown, the disk may be full"}
        if "error" in record:
            raise CheckpointError(f"rank {rank} could not write its part: {record['error']}")
        path.unlink()
        return Contents.from_json(record)

    def _publish(self, partial: Path, manifest: Manifest) -> None:
        write_file(partial / MANIFEST_NAME, [manifest.render()], flush=self.flush)
        if self.flush:
            flush_folder(partial)
        final = step_folder(self.root, manifest.step)
        # An intact checkpoint of this name is replaced. Anything else of this name belongs to the user and is kept.
        if os.path.lexists(final) and (flaw := _flaw(final)):
            aside = move_aside(self.root, [final])
            logger.warning("%s is not a usable checkpoint and was moved to %s: %s", final, aside, flaw)
        make_visible(partial, final, flush=self.flush)

    def _remove_failed(self) -> None:
        for partial in self._failed:
            shutil.rmtree(partial, ignore_errors=True)


def files_of(
    components: Sequence[Component], world: World, ranks: range, num_shards: int = 1
) -> dict[str, PlannedFile]:
    """What this worker writes, by file name, when `ranks` write into its folder. Tensors are not copied.

    The tensors of a replicated component are divided among the first `num_shards` of the ranks.
    """
    names = [component.name for component in components]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several components are named {', '.join(repeated)}: names must be unique")
    index = world.rank - ranks.start
    # Of each pattern: which shard this worker writes, if there is one, and how many there are.
    shards = {
        Pattern.REPLICATED: (index, min(num_shards, len(ranks))),
        Pattern.GLOBAL: (world.rank, 1),
        Pattern.PER_RANK: (0, 1),
        Pattern.PER_NODE: (world.local_rank, 1),
    }
    files = {}
    for component in components:
        part = component.pattern.part_of(world)
        shard, count = (index, len(ranks)) if component.is_divided else shards[component.pattern]
        for name, content in _contents(component, part, shard, count) if shard < count else ():
            files[name] = PlannedFile(component, part, content)
    return files


def _contents(component: Component, part: str, shard: int, num_shards: int) -> Iterator[tuple[str, Any]]:
    """Names and contents of the files of one of several shards. File names are those that Hugging Face tools expect."""
    flat = flatten(component.state, component.name, is_partial=component.is_divided)
    stem = stem_of(component.name, part)
    sizes = {name: tensor.nbytes for name, tensor in flat.tensors.items()}
    if component.is_divided:
        own = [name for name, tensor in flat.tensors.items() if not tensor.is_meta]
        groups = [own if i == shard else [] for i in range(num_shards)]
    else:
        groups = split(sizes, num_shards)
    count = len(groups)
    names = [
        f"{stem}-{i:05d}-of-{count:05d}{_TENSORS}" if count > 1 else f"{stem}{_TENSORS}" for i in range(1, count + 1)
    ]
    if shard == 0:
        yield f"{stem}.json", flat.structure
        if count > 1 and not component.is_divided:  # the index that these tools expect beside a model in several files
            file_of = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
            weight_map = {tensor: file_of[tensor] for tensor in sizes}
            metadata = {"total_size": sum(sizes.values())}
            yield f"{stem}{_TENSORS}.index.json", {"metadata": metadata, "weight_map": weight_map}
    if shard < count and groups[shard]:
        yield names[shard], {name: flat.tensors[name] for name in groups[shard]}


def split(sizes: Mapping[str, int], num_groups: int) -> list[list[str]]:
    """The names in up to `num_groups` groups of similar size: each name, largest first, to the smallest group."""
    groups: list[list[str]] = [[] for _ in range(min(num_groups, len(sizes)))]
    loads = [0] * len(groups)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = loads.index(min(loads))
        groups[smallest].append(name)
        loads[smallest] += sizes[name]
    return groups


def _tensors_of(files: Mapping[str, PlannedFile]) -> dict[int, torch.Tensor]:
    """Every tensor once, also if it has several names, by its id."""
    held = (file.content for name, file in files.items() if name.endswith(_TENSORS))
    return {id(tensor): tensor for tensors in held for tensor in tensors.values()}


def _record_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank}.written.json"


def _leave_record(partial: Path, rank: int, record: Mapping[str, Any]) -> None:
    """Tell the first worker what this one wrote, or that it failed."""
    with replacing(_record_path(partial, rank), flush=False) as unfinished:
        unfinished.write_bytes(_dump(record))


def _leave_error(partial: Path, rank: int, files: Iterable[str], error: BaseException) -> None:
    """Tell the first worker that this one failed. Its files are removed before: the disk may be full."""
    for name in files:
        with suppress(OSError):
            (partial / name).unlink()
    try:
        _leave_record(partial, rank, {"error": cause_of(error)})
    except OSError:
        with suppress(OSError):
            _record_path(partial, rank).touch()  # an empty file may still fit


def _flaw(final: Path) -> str:
    """Why this is not an intact checkpoint; empty if it is."""
    try:
        inspect(final)
    except (CheckpointError, OSError) as error:
        return str(error)
    return "it is a symbolic link" if final.is_symlink() else ""


def _delete_unneeded(root: Path, just_written: int, retention: Retention) -> None:
    """A failure is a warning: the run can continue, and on NFS it is normal while a process has one of them open."""
    if retention == Retention():
        return
    saved, what = {}, "outdated ones"
    try:
        for step in complete_steps(root):
            with suppress(CheckpointError):
                saved[step] = inspect(step_folder(root, step)).metrics
        for step in steps_to_delete(saved, just_written, retention):
            what = str(step_folder(root, step))
            delete(step_folder(root, step))
    except OSError as error:
        text = "the checkpoint of step %d was saved, but %s could not be deleted: %s"
        logger.warning(text, just_written, what, cause_of(error))


def _not_saved(root: Path, step: int, error: OSError | CheckpointError) -> str:
    older = "There is no older one"
    with suppress(OSError):
        if intact := newest_intact(root):
            older = f"The newest intact checkpoint is {intact}"
    return f"the checkpoint of step {step} was not saved in {root}: {cause_of(error)}. {older}"


def _dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
