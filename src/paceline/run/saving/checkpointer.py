"""Decides between two steps whether a run continues, is saved or stops, and carries it out."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from paceline.checkpoint.compare import check_components
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import new_token, step_folder, step_of
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.policy import Decision, Retention
from paceline.checkpoint.reader import inspect
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.writer import AsyncWriter, Component
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, gather, wait_for_all
from paceline.core.deferred import DeferredReader
from paceline.core.errors import CommunicationError, MisuseError
from paceline.core.events import Events
from paceline.core.notice import notice
from paceline.core.private_folder import private_folder
from paceline.observe.formats import short_path
from paceline.observe.timeline.recorder import Recorder
from paceline.plan.epoch import Position
from paceline.run.membership.communicator import ElasticCommunicator
from paceline.run.saving.options import DEFAULT_MINUTES, Checkpoints
from paceline.run.saving.resuming import OWN, Resumption, load_weights
from paceline.run.saving.state import HasState, has_state, random_state, replica_states
from paceline.run.saving.stopping import StopSignals
from paceline.run.step import loop_state
from paceline.run.step.ema import PieceAverage
from paceline.run.step.loop import Loop
from paceline.run.step.planner import GPU_LAG_STEPS
from paceline.run.step.replica import Replica
from paceline.sync.numbers import Numbers, check_not_abandoned

logger = logging.getLogger("paceline")

# After an error, rank 0 waits this long for the others' parts of a checkpoint. They come, unless a worker is dead.
# Below the time that workers have between SIGTERM and SIGKILL.
PATIENCE_S = 2.0


@dataclass(frozen=True)
class RunParts:
    """The run that is saved. `has_own_optimizers`: optimizer states differ between workers."""

    replica: Replica
    identity: Mapping[str, Any]
    communicator: Communicator
    events: Events
    has_own_optimizers: bool
    timeline: Recorder
    is_quiet: bool = False  # prints nothing when the run is stopped


class Checkpointer:
    """Stops a run on request and, with `settings`, saves and resumes it.

    Lifecycle: created with the replica, which it loads; `load_loop` when the loop exists; `register` for the user's own
    state. Each worker sends `requested` with every step, and `observe` receives the requests of all workers. Before the
    next step the loop calls `decide`, if `is_active`, and then `save_due` or `stop`. At the end `save_last`, `finish`
    and `close`; `close` without `finish` is for errors and does not wait for other workers.
    """

    def __init__(self, settings: Checkpoints | None, init_from: str | os.PathLike[str] | None, run: RunParts) -> None:
        self._settings = settings
        self._run = run
        self._world = run.communicator.world
        self.is_active = settings is not None  # otherwise until a request to stop
        self.requested = Decision.CONTINUE  # this worker's request to all workers; the largest request counts
        self._must_stop = False  # requested, and not done yet
        self._agreed = Decision.CONTINUE
        self._reader = self._make_reader()
        self._registered: dict[str, tuple[HasState, Pattern]] = {}
        self._metrics: dict[str, float] | None = None  # of a save requested by `save`
        self._has_saved = self._is_prepared = self._has_failed = self._is_finished = False
        self._writers: list[AsyncWriter] = []  # of checkpoints, and of snapshots in memory
        self._signals: StopSignals | None = None
        self._resumption: Resumption | None = None
        self.resumed_from: Path | None = None
        self._step_on_disk = 0  # the newest, or the one at which the run started
        self._last_saved: tuple[int, Mapping[str, float]] = (0, {})  # step and metrics of the last checkpoint begun
        self._next_step = self._next_epoch = self._next_snapshot = self._next_time_s = math.inf
        with ExitStack() as stack:
            if settings is not None:
                self._open(settings, init_from, stack)
            elif init_from is not None:
                load_weights(run.replica.model, Path(init_from))
            self._resources = stack.pop_all()

    def _open(self, settings: Checkpoints, init_from: str | os.PathLike[str] | None, stack: ExitStack) -> None:
        run = self._run
        shared_disk, has_snapshots = settings.disk == "shared", settings.snapshot_every is not None
        root = Path(settings.folder).absolute()
        self._folder = RunFolder(root, run.communicator, shared_disk=shared_disk, with_memory=has_snapshots)
        stack.callback(lambda: self._folder.close(is_abandoned=self._has_saved and not self._is_finished))
        stack.callback(self._close_writers)
        if not self._world.is_joining:  # else the state comes from another worker
            self._resumption = Resumption(
                settings, init_from, self._folder, run.communicator, run.replica, run.identity
            )
            self.resumed_from, position = self._resumption.folder, self._resumption.position
            self._schedule(position)
            is_snapshot = self.resumed_from is not None and self.resumed_from.parent == self._folder.memory
            self._note_on_disk(position.step - is_snapshot)
            if has_snapshots:
                self._folder.make_memory()
            self._open_writers(settings)
        if settings.handle_signals:
            self._signals = StopSignals(lambda: self.request(Decision.STOP))
            stack.callback(self._signals.close)

    def _open_writers(self, settings: Checkpoints) -> None:
        run, shared_disk = self._run, settings.disk == "shared"
        token = decided_by_rank_0(new_token, run.communicator)
        make_writer = partial(
            AsyncWriter, world=self._world, token=token, record=partial(run.timeline.during, "writing")
        )
        keep, num_shards = settings.retention, settings.num_writers
        if keep != Retention() and not shared_disk and self._world.local_size < self._world.size:
            # Not all nodes finish a checkpoint at once: the newest that all of them have may be the one before.
            keep = keep._replace(last=max(2, keep.last or 0))
        self._writers.append(
            make_writer(self._folder.root, shared_disk=shared_disk, num_shards=num_shards, retention=keep)
        )
        if settings.snapshot_every is not None:
            keep = Retention(last=1)
            self._writers.append(make_writer(self._folder.memory, shared_disk=False, retention=keep, flush=False))
        if isinstance(run.communicator, ElasticCommunicator):
            for writer in self._writers:  # otherwise rank 0 waits for the part of a lost worker
                run.communicator.abort_with(writer.abandon)

    def _make_reader(self) -> DeferredReader[Numbers]:
        """Reads the numbers of completed steps, from a GPU with a delay that is the same on all workers."""
        is_delayed = self._world.device.type == "cuda" and self._world.size > 1
        return DeferredReader(self._agree, GPU_LAG_STEPS if is_delayed else 0)

    def reconnect(self, loop: Loop) -> None:
        """Save with the workers of the new world from now on. They call this together.

        A checkpoint that the previous workers did not complete is due before the next step.
        """
        communicator = self._run.communicator
        self._world = communicator.world
        self._reader = self._make_reader()  # a newcomer's was for a world of one
        if self._agreed is Decision.CHANGE:
            self._agreed = Decision.CONTINUE
        self._set_request(Decision.CONTINUE if self.requested is Decision.CHANGE else self.requested)
        # A worker that took over another one's state may not know the requests of that step.
        self._agreed = Decision(max(int(own) for own in gather(str(int(self._agreed)), communicator)))
        self.is_active |= self._agreed > Decision.CONTINUE
        if self._settings is None:
            return
        self._close_writers(logging.INFO)  # an interrupted save is repeated
        self._writers.clear()
        self._folder.reconnect()
        if self._settings.snapshot_every is not None:
            self._folder.make_memory()
        self._open_writers(self._settings)
        newest, on_disk, is_lost, metrics = decided_by_rank_0(lambda: self._find_last(loop.position.step), communicator)
        next_time_s = self._next_time_s
        self._schedule(Position.from_dict(newest))
        self._note_on_disk(on_disk)
        self._next_time_s = min(self._next_time_s, next_time_s)  # workers may change more often than the run is saved
        self._is_prepared = self._has_failed = False
        if is_lost:
            self._metrics, self._agreed = metrics, max(self._agreed, Decision.SAVE)

    def _find_last(self, step: int) -> tuple[dict[str, Any], int, bool, dict[str, float]]:
        """The position of the newest checkpoint or snapshot, and the step of the newest checkpoint.

        Also whether the last checkpoint is incomplete, and its metrics, empty if the run is no longer at that step.
        """
        found = sorted(self._folder.found(), key=lambda path: step_of(path) or 0)
        newest: dict[str, Any] = Position().to_dict()
        for path in reversed(found):
            with suppress(CheckpointError, OSError):  # damaged, or deleted meanwhile: the run needs none of them
                newest = dict(inspect(path).position)
                break
        on_disk = max((step_of(path) or 0 for path in found if path.parent == self._folder.root), default=0)
        begun, metrics = self._last_saved
        return newest, on_disk, begun > on_disk, dict(metrics) if begun == step else {}

    # What is saved

    @property
    def registered(self) -> Mapping[str, HasState]:
        """The user's own state, by name."""
        return {name: thing for name, (thing, _) in self._registered.items()}

    @property
    def components(self) -> Mapping[str, Pattern]:
        """The components of a checkpoint, and how they are distributed over the workers."""
        if self._settings is None:
            return {}
        patterns = dict.fromkeys(OWN, Pattern.REPLICATED) | {"random": Pattern.PER_RANK}
        if self._run.has_own_optimizers:
            patterns["optimizer"] = Pattern.PER_RANK
        if not self._run.replica.schedulers:
            del patterns["scheduler"]
        patterns |= {name: pattern for name, (_, pattern) in self._registered.items()}
        return {name: pattern for name, pattern in patterns.items() if name not in self._settings.leave_out}

    def load_loop(self, loop: Loop) -> None:
        """Load the loop's state in a resumed run."""
        if self._resumption is not None:
            self._resumption.load_loop(loop)

    def register(self, name: str, thing: HasState, pattern: Pattern) -> None:
        """Save this object too, and load its state in a resumed run. A run without checkpoints only checks it."""
        if self._settings is not None and self._resumption is None and not self._world.is_joining:
            raise MisuseError(f"register({name!r}) was called after the first step: call it before the first epoch")
        if name in self._registered or name in OWN:
            raise ValueError(f"{name!r} is taken: choose another name than {', '.join([*OWN, *self._registered])}")
        if not has_state(thing):
            raise TypeError(f"{name!r} is a {type(thing).__name__}: it needs state_dict and load_state_dict")
        Component(name, None)  # validates the name
        if self._resumption is not None:
            self._resumption.load(name, thing, pattern)
        self._registered[name] = (thing, pattern)

    def _states(self, loop: Loop, writer: AsyncWriter) -> list[Component]:
        keeps, pieces = None, self._run.replica.pieces
        divided = set()  # the components of which each worker has a part
        if pieces is not None:
            writer_of = pieces.shards.division.divided_among(writer.ranks)
            keeps = lambda parameter: writer_of[id(parameter)] == self._world.rank  # noqa: E731
            divided.add("optimizer")
        states = replica_states(self._run.replica, keeps)
        states |= {"engine": loop_state.state_of(loop), "random": random_state(self._world.device)}
        for name, (thing, _) in self._registered.items():
            if isinstance(thing, PieceAverage) and keeps is not None:
                states[name] = thing.divided_state(keeps)
                divided.add(name)
            else:
                states[name] = thing.state_dict()
        return [
            Component(name, states[name], pattern, must_be_finite=name == "model", is_divided=name in divided)
            for name, pattern in self.components.items()
        ]

    # When

    def request(self, decision: Decision) -> None:
        """Request that all workers save, or save and stop, after one of the next steps. Any worker, any thread."""
        if decision is Decision.SAVE:
            self._check_has_folder("request_save()")
        self._must_stop |= decision is Decision.STOP
        self._set_request(decision)

    def request_change(self) -> None:
        """Request that all workers enter the next generation after this step, unless this one has another request."""
        if self.requested is Decision.CONTINUE:
            self._set_request(Decision.CHANGE)

    def _set_request(self, decision: Decision) -> None:
        self.requested = decision
        if self._must_stop:  # second: a signal may arrive between the two
            self.requested = Decision.STOP

    def observe(self, numbers: Numbers) -> None:
        """The numbers of a completed step; called in order, on a CPU only for steps with a request."""
        self._reader.add(numbers)

    def _agree(self, numbers: Numbers) -> None:
        # A single worker knows its own request: reading it from a GPU would wait.
        requests = numbers.requests if self._world.size > 1 else (self.requested,)
        check_not_abandoned(requests)
        self._agreed = max(self._agreed, Decision(int(max(requests))))
        self.is_active |= self._agreed > Decision.CONTINUE

    def _complete_resumption(self, resumption: Resumption) -> None:
        """All components are registered."""
        resumption.complete()
        self._resumption = None
        self._warn_of_unknown_names(resumption.saved)

    def _warn_of_unknown_names(self, saved: Collection[str]) -> None:
        """saved: the components of the checkpoint, if the run was resumed."""
        if self._settings is None or not self._world.is_main:
            return
        own = [*OWN, *self._registered]
        for setting, names, known in (
            ("leave_out", self._settings.leave_out, own),
            ("skip", self._settings.skip if saved else (), [*own, *saved]),
        ):
            if unknown := [name for name in names if name not in known]:
                logger.warning(
                    "%s=%s has no effect: there is no such component; there are %s",
                    *(setting, unknown, ", ".join(dict.fromkeys(known))),
                )

    def decide(self, loop: Loop) -> Decision:
        """What to do before the next step, equal on all workers. Raises if an earlier save failed."""
        position = loop.position
        if self._resumption is not None:
            self._complete_resumption(self._resumption)
        for writer in self._writers:
            if writer.pending is not None or self._has_failed:
                self._poll(writer)
        if self._writers and not self._is_prepared and position.step > self._step_on_disk:
            # Optimizers have their state by now: allocate the memory for copies before a save needs it.
            self._is_prepared = True
            if self._run.replica.pieces is None:  # else a save begins with collecting the state
                for writer in self._writers:
                    writer.reserve(self._states(loop, writer))
        if monotonic() >= self._next_time_s and self._world.is_main and not self.requested:
            self._set_request(Decision.SAVE)
        is_save_due = position.step >= self._next_step or position.epoch >= self._next_epoch
        if self._agreed or not (is_save_due or position.step >= self._next_snapshot):
            return self._agreed
        return Decision.SAVE

    def _schedule(self, now: Position) -> None:
        """Set after which step and epoch to save next. Called at the start of a run and after each save or snapshot.

        They are counted from the start of the run: a resumed run saves at the same steps as an uninterrupted one.
        """
        settings = self._settings
        assert settings is not None
        self._next_step = _next_multiple(settings.every_steps, now.step)
        self._next_epoch = _next_multiple(settings.every_epochs, now.epoch)
        self._next_snapshot = _next_multiple(settings.snapshot_every, now.step)

    def _note_on_disk(self, step: int) -> None:
        """Later steps are not on disk, and the next save is due some minutes from now.

        Clocks differ, so rank 0 decides by its own, and sends a request with the step's exchange. All workers keep the
        time, since another one may become rank 0.
        """
        settings = self._settings
        assert settings is not None
        has_count = settings.every_steps is not None or settings.every_epochs is not None
        minutes = settings.every_minutes or (math.inf if has_count else DEFAULT_MINUTES)
        self._next_time_s = monotonic() + 60 * minutes
        self._step_on_disk = step

    # How

    def save_due(self, loop: Loop) -> None:
        """Carry out `Decision.SAVE`."""
        position = loop.position
        is_snapshot_due = position.step >= self._next_snapshot
        if self._agreed or position.step >= self._next_step or position.epoch >= self._next_epoch:
            self._save(loop)
        if is_snapshot_due:
            private_folder(self._folder.memory)  # systemd removes it when the user logs out (RemoveIPC)
            self._write(self._writers[1], loop, {})
            self._schedule(position)

    def stop(self, loop: Loop) -> None:
        """Carry out `Decision.STOP`: save the step, if the run has a folder. The loop then ends."""
        if not self._writers:
            self.is_active = self._must_stop = False
            self._forget_requests()
            loop.exchange.synchronize()
            return
        self.request(Decision.STOP)  # the worker that requested it may be lost during the save
        self._has_failed |= self._outcome(self._writers[0], wait=True) is not None
        if self._metrics is not None or loop.position.step > self._step_on_disk or self._has_failed_on_rank_0():
            self._save(loop)
        if error := self._outcome(self._writers[0], wait=True):
            raise error
        self._leave_together()
        if self._world.is_main and not self._run.is_quiet:
            folder = short_path(step_folder(self._folder.root, loop.position.step))
            notice(f"stopped after step {loop.position.step}, saved as {folder}")

    def save(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        """Save now; from a hook, before the next step."""
        self._check_has_folder("save()")
        self._metrics = (self._metrics or {}) | {name: float(value) for name, value in metrics.items()}
        if loop.hooks.is_running:
            self._agreed = max(self._agreed, Decision.SAVE)  # all workers run hooks
        else:
            self._save(loop)

    def save_last(self, loop: Loop, *, again: bool = False) -> None:
        """Save if the run ends here and has unsaved steps, or `again`."""
        is_wanted = self._settings is not None and self._settings.final
        if self._metrics is not None or (is_wanted and (again or loop.position.step > self._step_on_disk)):
            self._save(loop)

    def finish(self, loop: Loop) -> None:
        """The run ended without an error: return when everything is on disk, on all workers."""
        if self._is_finished or not self._writers:
            return
        begin = perf_counter()
        self._poll(self._writers[0], wait=True)
        self.save_last(loop, again=self._has_failed_on_rank_0())  # the disk may have recovered
        self._poll(self._writers[0], wait=True)
        self._run.timeline.took("saving", begin)
        self._leave_together()

    def leave(self) -> None:
        """This worker leaves the run, which continues: another one may own its folder from now on."""
        if self._settings is not None:
            self._close_writers(logging.INFO)
            self._writers.clear()
            self._folder.close()
        self._is_finished = True

    def close(self) -> None:
        is_interrupted = self._signals is not None and self._signals.is_requested and not self._is_finished
        self._resources.close()
        if is_interrupted:  # another worker failed, so the step could not be completed
            newest = max(self._folder.found(), key=lambda path: step_of(path) or 0, default=None)
            path = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
            notice(f"rank {self._world.rank} ended without saving: not all workers completed its step; {path}")

    def _check_has_folder(self, call: str) -> None:
        if self._settings is None:
            raise MisuseError(f"{call} needs a folder: give checkpoints=Checkpoints(folder) to the run")

    def _save(self, loop: Loop) -> None:
        if self._resumption is not None:
            self._complete_resumption(self._resumption)
        metrics, self._metrics = self._metrics or {}, None
        self._last_saved = loop.position.step, metrics
        self._write(self._writers[0], loop, metrics)
        self._schedule(loop.position)
        self._note_on_disk(loop.position.step)
        self._has_failed = False
        self._forget_requests()
        self._run.events.emit("save", folder=str(step_folder(self._folder.root, loop.position.step)))

    def _forget_requests(self) -> None:
        """Requests sent so far are fulfilled, except one to stop that was not agreed on yet."""
        self._agreed = Decision.CONTINUE
        self._reader.clear()
        self._set_request(Decision.CONTINUE)

    def _write(self, writer: AsyncWriter, loop: Loop, metrics: Mapping[str, float]) -> None:
        assert self._settings is not None
        with self._run.timeline.during("checkpoint"):
            loop.exchange.synchronize()
            loop.replica_check.compare(loop.position.step)
            components = self._states(loop, writer)
            check_components(components, self._settings.check_replicas, self._run.communicator)
            self._poll(writer, wait=True)
            step, position = loop.position.step, loop.position.to_dict()
            manifest = Manifest(step, configuration=self._run.identity, position=position, metrics=metrics)
            writer.save(manifest, components)
        self._has_saved = True

    def _leave_together(self) -> None:
        """Wait until all workers are done. Remove snapshots if the newest state is on disk."""
        is_on_disk = not self._has_failed_on_rank_0()
        wait_for_all(self._run.communicator)
        for snapshots in self._writers[1:]:
            self._outcome(snapshots, wait=True)
            if is_on_disk:
                self._folder.remove_memory()
        self._is_finished = True

    def _has_failed_on_rank_0(self) -> bool:
        """Whether the last checkpoint failed on rank 0, which publishes it. All workers must act alike."""
        begin = perf_counter()
        has_failed = bool(decided_by_rank_0(lambda: self._has_failed, self._run.communicator))
        self._run.timeline.took("wait", begin)
        return has_failed

    def complete_writing(self) -> None:
        """Wait for the checkpoint in progress, so that this worker may leave."""
        for writer in self._writers:
            self._poll(writer, wait=True)

    def _outcome(self, writer: AsyncWriter, *, wait: bool = False) -> CheckpointError | None:
        """See `AsyncWriter.poll`. Raises CommunicationError if the save failed because a worker was lost."""
        error = writer.poll(wait=wait)
        if error is not None and writer.is_abandoned:
            raise CommunicationError(f"a worker was lost while a checkpoint was written: {error}")
        return error

    def _poll(self, writer: AsyncWriter, *, wait: bool = False) -> None:
        """Handle a failed save according to `on_error`."""
        if (error := self._outcome(writer, wait=wait)) is None:
            return
        self._has_failed = True
        if self._settings is not None and self._settings.on_error == "stop":
            raise error
        logger.warning("training continues without a checkpoint: %s", error)

    def _close_writers(self, level: int = logging.WARNING) -> None:
        for writer in self._writers:
            if not self._is_finished:
                writer.abandon(PATIENCE_S)
            try:
                writer.close()
            except CheckpointError as error:
                logger.log(level, "%s", error)


def _next_multiple(interval: int | None, last: int) -> float:
    return math.inf if interval is None else (last // interval + 1) * interval
