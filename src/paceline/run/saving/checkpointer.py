"""Saving and stopping a run: what happens between two of its steps."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from paceline.checkpoint.compare import check_replication
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import new_token, step_folder
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.manifest import Pattern
from paceline.checkpoint.pieces import Component, Disk
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.saving import Job
from paceline.checkpoint.schedule import Moment
from paceline.checkpoint.writer import AsyncWriter
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, wait_for_all
from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.observe.timeline.recorder import Recorder
from paceline.run.saving.options import Checkpoints
from paceline.run.saving.recovery import Start
from paceline.run.saving.resuming import OWN, Beginning, HasState
from paceline.run.saving.state import has_state, random_state, replica_states
from paceline.run.saving.stopping import Stopped, StopSignals
from paceline.run.step.loop import Loop
from paceline.run.step.planner import GPU_LAG_STEPS
from paceline.run.step.replica import Replica
from paceline.sync.numbers import Numbers, check_nobody_left

logger = logging.getLogger("paceline")

# What a worker asks of all; the largest is done.
NOTHING, SAVE, STOP = 0.0, 1.0, 2.0


class Agreement:
    """What all workers do before the next step, from what each of them wished in the exchange of an earlier one."""

    def __init__(self, device: torch.device) -> None:
        # On a GPU the numbers take a while to arrive: all workers read them equally late.
        self._lag_steps = GPU_LAG_STEPS if device.type == "cuda" else 0
        self.forget()

    def observe(self, numbers: Numbers) -> None:
        self._unread.append(numbers)
        if len(self._unread) > self._lag_steps:
            wishes = self._unread.popleft().wishes
            check_nobody_left(wishes)
            self.wish = max(wishes)

    def forget(self) -> None:
        """Whatever was wished for until now is done."""
        self.wish = NOTHING
        self._unread: deque[Numbers] = deque()


def check_registration(name: str, thing: HasState, taken: Collection[str]) -> None:
    if name in taken or name in OWN:
        raise ValueError(f"{name!r} is taken: choose another name than {', '.join([*OWN, *taken])}")
    if not has_state(thing):
        raise TypeError(f"{name!r} is a {type(thing).__name__} without state_dict and load_state_dict: give both")
    Component(name, None)  # checks the name


class Unsaved:
    """A run that nobody asked to save: all that may happen between its steps is that it ends."""

    resumed_from: Path | None = None
    components: Mapping[str, Pattern] = {}

    def __init__(self, device: torch.device) -> None:
        self.wish = NOTHING
        self._agreement = Agreement(device)
        self._registered: list[str] = []  # the same script runs with checkpoints and without

    def observe(self, numbers: Numbers) -> None:
        self._agreement.observe(numbers)

    def between_steps(self, loop: Loop) -> None:
        if self._agreement.wish == STOP:
            self._agreement.forget()
            self.wish = NOTHING
            loop.synchronize()
            raise Stopped(loop.position.step)

    def load_loop(self, loop: Loop) -> None:
        return

    def register(self, name: str, thing: HasState, pattern: Pattern) -> None:
        check_registration(name, thing, self._registered)
        self._registered.append(name)

    def save(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        raise MisuseError("save() needs a place: give checkpoints=Checkpoints(folder) to the run")

    def ask(self, wish: float) -> None:
        if wish == SAVE:
            raise MisuseError("there is nowhere to save to: give checkpoints=Checkpoints(folder) to the run")
        self.wish = wish

    def save_last(self, loop: Loop) -> None:
        return

    def finish(self, loop: Loop) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Subject:
    """The run that is saved. `has_own_optimizers`: each worker's optimizer has a state of its own."""

    replica: Replica
    identity: Mapping[str, Any]
    communicator: Communicator
    events: Events
    has_own_optimizers: bool
    timeline: Recorder


class Checkpointing:
    """Saves a run and lets it go on from where it was.

    Lifecycle. Made when the replica is, which it loads; `load_loop` when the loop is, `register` for the user's own
    state. The first `between_steps` completes that, and every one may save, or end the run. `save_last` saves at the
    end and `finish` waits for the disk; `close` without `finish` leaves as after an error: nothing is waited for.
    """

    def __init__(self, settings: Checkpoints, start: Start, subject: Subject) -> None:
        communicator = subject.communicator
        self._settings = settings
        self._subject = subject
        self._schedule = settings.schedule
        self._registered: dict[str, tuple[HasState, Pattern]] = {}
        self._asked = NOTHING
        self._agreement = Agreement(communicator.world.device)
        self._requested: dict[str, float] | None = None
        self._num_saves = 0
        self._writing_since: float | None = None
        self._is_prepared = self._has_failed = self._is_finished = False
        with ExitStack() as stack:
            self._folder = RunFolder(
                settings.root.absolute(),
                communicator,
                settings.disk_kind,
                with_memory=settings.snapshot_every is not None,
            )
            stack.callback(self._close_folder)
            self._token = decided_by_rank_0(new_token, communicator)
            self._beginning: Beginning | None = Beginning(
                start, self._folder, communicator, subject.replica, subject.identity, settings.leave_out
            )
            self.resumed_from = self._beginning.checkpoint
            position = self._beginning.position
            self._first_step = position.step
            self._last = self._last_snapshot = Moment(position.step, position.epoch, monotonic())
            self._writer = self._open_writer()
            self._snapshots = self._open_snapshots() if settings.snapshot_every is not None else None
            stack.callback(self._close_writers)
            self._signals = StopSignals() if settings.handle_signals else None
            if self._signals is not None:
                stack.callback(self._signals.close)
            self._held = stack.pop_all()

    # What is saved

    @property
    def components(self) -> Mapping[str, Pattern]:
        """What a checkpoint holds, by name, and how workers share it."""
        patterns = dict.fromkeys(OWN, Pattern.REPLICATED) | {"random": Pattern.PER_RANK}
        if self._subject.has_own_optimizers:
            patterns["optimizer"] = Pattern.PER_RANK
        if not self._subject.replica.schedulers:
            del patterns["scheduler"]
        patterns |= {name: pattern for name, (_, pattern) in self._registered.items()}
        return {name: pattern for name, pattern in patterns.items() if name not in self._settings.leave_out}

    def load_loop(self, loop: Loop) -> None:
        assert self._beginning is not None
        self._beginning.load_loop(loop)

    def register(self, name: str, thing: HasState, pattern: Pattern) -> None:
        if self._beginning is None:
            raise MisuseError(f"register({name!r}) came after the first step: register before the first epoch")
        check_registration(name, thing, self._registered)
        self._beginning.load(name, thing)
        self._registered[name] = (thing, pattern)

    def _states(self, loop: Loop) -> list[Component]:
        subject = self._subject
        states = replica_states(subject.replica)
        states |= {"engine": loop.state_dict(), "random": random_state(subject.communicator.world.device)}
        states |= {name: thing.state_dict() for name, (thing, _) in self._registered.items()}
        return [
            Component(name, states[name], pattern, must_be_finite=name == "model")
            for name, pattern in self.components.items()
        ]

    # When

    @property
    def wish(self) -> float:
        if self._asked == STOP or (self._signals is not None and self._signals.is_asked):
            return STOP
        # Clocks differ: rank 0's counts.
        if self._subject.communicator.world.is_main and self._schedule.is_due_by_clock(
            Moment(0, 0, monotonic()), self._last
        ):
            return SAVE
        return self._asked

    def ask(self, wish: float) -> None:
        """Have all workers save, or save and stop, after one of the next steps. From any worker and any thread."""
        self._asked = max(self._asked, wish)

    def observe(self, numbers: Numbers) -> None:
        if self._subject.communicator.world.size == 1:
            self._agreement.wish = self.wish
        else:
            self._agreement.observe(numbers)

    def between_steps(self, loop: Loop) -> None:
        if self._beginning is not None:
            self._beginning.complete()
            self._beginning = None
        self._report(self._writer.poll())
        if self._snapshots is not None:
            self._report(self._snapshots.poll())
        now = self._moment(loop)
        if now.step > self._first_step and not self._is_prepared:
            self._prepare(loop)
        if self._agreement.wish == STOP:
            self._stop(loop)
        if (
            self._agreement.wish == SAVE
            or self._requested is not None
            or self._schedule.is_due_by_count(now, self._last)
        ):
            self._save(loop)
        every = self._settings.snapshot_every
        if self._snapshots is not None and every is not None and now.step - self._last_snapshot.step >= every:
            self._write(self._snapshots, loop, {})
            self._last_snapshot = now

    def save(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        """Save as soon as no step is under way: now, or from a hook when the next step is about to begin."""
        self._requested = (self._requested or {}) | {name: float(value) for name, value in metrics.items()}
        if not loop.is_in_hook:
            self._save(loop)

    def save_last(self, loop: Loop) -> None:
        """The run may end here."""
        if self._requested is not None or self._schedule.is_due_at_end(self._moment(loop), self._last):
            self._save(loop)

    def finish(self, loop: Loop) -> None:
        """The run ends well: return when everything is on the disk, on all workers."""
        if self._is_finished:
            return
        self._report(self._writer.settle())
        if self._has_failed_on_rank_0() and self._settings.final:
            self._save(loop)  # once more: the disk may have recovered
        else:
            self.save_last(loop)
        self._report(self._writer.settle())
        self._leave_together()

    def close(self) -> None:
        is_cut_short = self._signals is not None and self._signals.is_asked and not self._is_finished
        self._signals = None
        self._held.close()
        if is_cut_short:
            self._say_what_is_saved()

    # How

    def _moment(self, loop: Loop) -> Moment:
        return Moment(loop.position.step, loop.position.epoch, monotonic())

    def _save(self, loop: Loop) -> None:
        metrics, self._requested = self._requested or {}, None
        self._write(self._writer, loop, metrics)
        self._last = self._moment(loop)
        self._has_failed = False
        self._agreement.forget()
        self._asked = self._asked if self._asked == STOP else NOTHING
        self._subject.events.emit("save", folder=str(step_folder(self._folder.root, self._last.step)))

    def _write(self, writer: AsyncWriter, loop: Loop, metrics: Mapping[str, float]) -> None:
        with self._subject.timeline.during("checkpoint"):
            loop.synchronize()
            loop.check_replicas()
            components = self._states(loop)
            for component in components:
                if component.pattern is Pattern.REPLICATED:
                    check_replication(
                        component.name, component.state, self._settings.check_replicas, self._subject.communicator
                    )
            self._report(writer.settle())
            self._num_saves += 1
            position = loop.position
            writer.save(
                Job(
                    position.step,
                    components,
                    self._subject.identity,
                    position.to_dict(),
                    metrics,
                    token=f"{self._token}{self._num_saves:x}",
                )
            )
        self._writing_since = perf_counter()

    def _prepare(self, loop: Loop) -> None:
        """Now there is a step's worth of optimizer state: get the memory for its copies before a save needs it."""
        self._is_prepared = True
        components = self._states(loop)
        self._writer.prepare(components)
        if self._snapshots is not None:
            self._snapshots.prepare(components)

    def _stop(self, loop: Loop) -> None:
        self._has_failed |= self._writer.settle() is not None
        if self._requested is not None or loop.position.step > self._last.step or self._has_failed_on_rank_0():
            self._save(loop)
        if error := self._writer.settle():
            raise error
        self._leave_together()
        if self._subject.communicator.world.is_main:
            folder = step_folder(self._folder.root, loop.position.step)
            print(f"paceline: stopped after step {loop.position.step}, saved as {folder}", file=sys.stderr)
        raise Stopped(loop.position.step)

    def _say_what_is_saved(self) -> None:
        """This worker was told to stop, and left without having saved the step: another one failed."""
        newest = max(self._folder.found(), key=lambda found: found[1], default=None)
        where = "there is no checkpoint" if newest is None else f"the newest checkpoint is {self._folder.path(*newest)}"
        rank = self._subject.communicator.world.rank
        print(
            f"paceline: rank {rank} ended without saving: its step was not completed by all workers; {where}",
            file=sys.stderr,
        )

    def _leave_together(self) -> None:
        """Where the newest state is on the disk nobody needs the snapshots any more."""
        is_on_disk = not self._has_failed_on_rank_0()
        self._note_written()
        wait_for_all(self._subject.communicator)
        if self._snapshots is not None:
            self._snapshots.settle()
            if is_on_disk:
                self._folder.remove_memory()
        self._is_finished = True

    @property
    def _has_saved(self) -> bool:
        return self._num_saves > 0

    def _has_failed_on_rank_0(self) -> bool:
        """Whether the last checkpoint did not become visible. Rank 0 makes it so, and all must act alike."""
        return bool(decided_by_rank_0(lambda: self._has_failed, self._subject.communicator))

    def _report(self, error: CheckpointError | None) -> None:
        """A save failed: stop or go on, as chosen."""
        self._note_written()
        if error is None:
            return
        self._has_failed = True
        if self._settings.on_error == "stop":
            raise error
        logger.warning("training goes on without a checkpoint: %s", error)

    def _note_written(self) -> None:
        """The timeline learns between two steps that what was written behind them is on the disk."""
        is_busy = self._writer.is_busy or (self._snapshots is not None and self._snapshots.is_busy)
        if self._writing_since is not None and not is_busy:
            self._subject.timeline.span("writing", self._writing_since, perf_counter())
            self._writing_since = None

    def _open_writer(self) -> AsyncWriter:
        settings = self._settings
        return AsyncWriter(
            self._folder.root,
            self._subject.communicator.world,
            disk=settings.disk_kind,
            num_shards=settings.num_writers,
            keep=settings.keep,
        )

    def _open_snapshots(self) -> AsyncWriter:
        self._folder.make_memory()
        world = self._subject.communicator.world
        return AsyncWriter(self._folder.memory, world, disk=Disk.PER_NODE, keep=Keep(last=1), flush=False)

    def _close_folder(self) -> None:
        self._folder.close(is_abandoned=self._has_saved and not self._is_finished)

    def _close_writers(self) -> None:
        for writer in (self._writer, self._snapshots):
            if writer is None:
                continue
            if not self._is_finished:
                writer.abandon()
            try:
                writer.close()
            except CheckpointError as error:
                logger.warning("%s", error)
