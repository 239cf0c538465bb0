"""Decides between two steps whether a run continues, is saved or stops, and does it."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from paceline.checkpoint.compare import check_replication
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.folders import new_token, step_folder
from paceline.checkpoint.manifest import Manifest, Pattern
from paceline.checkpoint.policy import Decision, Progress, Retention, Schedule
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.writer import AsyncWriter, Component
from paceline.comm.base import Communicator
from paceline.comm.messages import decided_by_rank_0, wait_for_all
from paceline.core.errors import MisuseError
from paceline.core.events import Events
from paceline.observe.timeline.recorder import Recorder
from paceline.run.saving.options import Checkpoints
from paceline.run.saving.resuming import OWN, ResumeOptions, Resumption, load_weights
from paceline.run.saving.state import HasState, has_state, random_state, replica_states
from paceline.run.saving.stopping import StopSignals
from paceline.run.step.loop import Loop
from paceline.run.step.planner import GPU_LAG_STEPS
from paceline.run.step.replica import Replica
from paceline.sync.numbers import Numbers, check_nobody_left

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class RunParts:
    """The run that is saved. `has_own_optimizers`: optimizer states differ between workers."""

    replica: Replica
    identity: Mapping[str, Any]
    communicator: Communicator
    events: Events
    has_own_optimizers: bool
    timeline: Recorder


class Checkpointer:
    """Stops a run on request and, with `settings`, saves and resumes it.

    Lifecycle: created with the replica, which it loads; `load_loop` when the loop exists; `register` for the user's own
    state. Each worker sends `requested` with every step, `observe` receives those of all workers, and before the next
    step the loop calls `decide` and carries out its answer with `save_due` or `stop`. At the end `save_last`, `finish`
    and `close`; `close` without `finish` is for errors and does not wait for other workers.
    """

    def __init__(self, settings: Checkpoints | None, options: ResumeOptions, run: RunParts) -> None:
        self._settings = settings
        self._run = run
        self._world = run.communicator.world
        self._schedule = settings.schedule if settings else Schedule(final=False)
        self._request = self._agreed = Decision.CONTINUE
        # On a GPU the numbers arrive late. All workers read them with the same delay.
        self._lag_steps = GPU_LAG_STEPS if self._world.device.type == "cuda" else 0
        self._unread: deque[Numbers] = deque()
        self._registered: dict[str, tuple[HasState, Pattern]] = {}
        self._metrics: dict[str, float] | None = None  # of a save requested by `save`
        self._has_saved = self._is_prepared = self._has_failed = self._is_finished = False
        self._writing_since: float | None = None
        self._writers: list[AsyncWriter] = []  # of checkpoints, and of snapshots in memory
        self._signals: StopSignals | None = None
        self._resumption: Resumption | None = None
        self.resumed_from: Path | None = None
        self._first_step = self._last_snapshot = 0
        self._last = Progress(0, 0, monotonic())
        with ExitStack() as stack:
            if settings is not None:
                self._open(settings, options, stack)
            elif options.resume not in ("auto", None, False) or options.allow or options.skip:
                raise ValueError(
                    f"resume={options.resume!r}, allow={list(options.allow)} and skip={list(options.skip)} need "
                    "checkpoints=Checkpoints(folder), the folder of the run"
                )
            elif options.init_from is not None:
                load_weights(run.replica.model, Path(options.init_from))
            self._resources = stack.pop_all()

    def _open(self, settings: Checkpoints, options: ResumeOptions, stack: ExitStack) -> None:
        run, world = self._run, self._world
        shared_disk, has_snapshots = settings.disk == "shared", settings.snapshot_every is not None
        root = settings.root.absolute()
        self._folder = RunFolder(root, run.communicator, shared_disk=shared_disk, with_memory=has_snapshots)
        stack.callback(lambda: self._folder.close(is_abandoned=self._has_saved and not self._is_finished))
        token = decided_by_rank_0(new_token, run.communicator)
        self._resumption = Resumption(
            options, self._folder, run.communicator, run.replica, run.identity, settings.leave_out
        )
        self.resumed_from = self._resumption.folder
        position = self._resumption.position
        self._first_step = self._last_snapshot = position.step
        self._last = Progress(position.step, position.epoch, monotonic())
        stack.callback(self._close_writers)
        keep, num_shards = settings.retention, settings.num_writers
        self._writers.append(
            AsyncWriter(root, world, token=token, shared_disk=shared_disk, num_shards=num_shards, retention=keep)
        )
        if has_snapshots:
            self._folder.make_memory()
            memory, keep = self._folder.memory, Retention(last=1)
            self._writers.append(
                AsyncWriter(memory, world, token=token, shared_disk=False, retention=keep, flush=False)
            )
        if settings.handle_signals:
            self._signals = StopSignals()
            stack.callback(self._signals.close)

    # What is saved

    @property
    def components(self) -> Mapping[str, Pattern]:
        """The components of a checkpoint by name, and how workers share them."""
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
        """Save this object too, and load its state in a resumed run. Checked also in a run without checkpoints."""
        if self._settings is not None and self._resumption is None:
            raise MisuseError(f"register({name!r}) was called after the first step: call it before the first epoch")
        if name in self._registered or name in OWN:
            raise ValueError(f"{name!r} is taken: choose another name than {', '.join([*OWN, *self._registered])}")
        if not has_state(thing):
            raise TypeError(f"{name!r} is a {type(thing).__name__}: it needs state_dict and load_state_dict")
        Component(name, None)  # validates the name
        if self._resumption is not None:
            self._resumption.load(name, thing)
        self._registered[name] = (thing, pattern)

    def _states(self, loop: Loop) -> list[Component]:
        states = replica_states(self._run.replica)
        states |= {"engine": loop.state_dict(), "random": random_state(self._world.device)}
        states |= {name: thing.state_dict() for name, (thing, _) in self._registered.items()}
        return [
            Component(name, states[name], pattern, must_be_finite=name == "model")
            for name, pattern in self.components.items()
        ]

    # When

    def request(self, decision: Decision) -> None:
        """Let all workers save, or save and stop, after one of the next steps. Called by any worker, in any thread."""
        if decision is Decision.SAVE:
            self._check_has_folder("request_save()")
        self._request = max(self._request, decision)

    @property
    def requested(self) -> Decision:
        """What this worker asks all workers to do. The largest request of all workers counts."""
        if self._signals is not None and self._signals.is_requested:
            return Decision.STOP
        is_due = self._world.is_main and self._schedule.is_due_by_clock(monotonic(), self._last)
        return max(self._request, Decision.SAVE) if is_due else self._request

    def observe(self, numbers: Numbers) -> None:
        """The numbers of a completed step, with all workers' requests; called for every step in order."""
        if self._world.size == 1:
            self._agreed = self.requested
            return
        self._unread.append(numbers)
        if len(self._unread) > self._lag_steps:
            requests = self._unread.popleft().wishes
            check_nobody_left(requests)
            self._agreed = Decision(int(max(requests)))

    def decide(self, loop: Loop) -> Decision:
        """What to do before the next step, equal on all workers. Raises if an earlier save failed."""
        if self._resumption is not None:
            self._resumption.complete()
            self._resumption = None
        for writer in self._writers:
            self._report(writer.poll())
        if self._writers and not self._is_prepared and loop.position.step > self._first_step:
            # Now the optimizer has its state: allocate the memory for copies before a save needs it.
            self._is_prepared = True
            components = self._states(loop)
            for writer in self._writers:
                writer.reserve(components)
        if self._agreed is Decision.STOP:
            return Decision.STOP
        is_due = self._is_save_due(loop) or self._is_snapshot_due(loop)
        return Decision.SAVE if is_due else Decision.CONTINUE

    def _is_save_due(self, loop: Loop) -> bool:
        is_requested = self._agreed is Decision.SAVE or self._metrics is not None
        return is_requested or self._schedule.is_due_by_count(_progress(loop), self._last)

    def _is_snapshot_due(self, loop: Loop) -> bool:
        every = self._settings.snapshot_every if self._settings else None
        return every is not None and loop.position.step - self._last_snapshot >= every

    def _reset_requests(self, request: Decision) -> None:
        """Requests sent so far are fulfilled."""
        self._request, self._agreed = request, Decision.CONTINUE
        self._unread.clear()

    # How

    def save_due(self, loop: Loop) -> None:
        """Carry out `Decision.SAVE`."""
        if self._is_save_due(loop):
            self._save(loop)
        if self._is_snapshot_due(loop):
            self._write(self._writers[1], loop, {})
            self._last_snapshot = loop.position.step

    def stop(self, loop: Loop) -> None:
        """Carry out `Decision.STOP`: save the step, if the run has a folder. The loop then ends."""
        if not self._writers:
            self._reset_requests(Decision.CONTINUE)
            loop.synchronize()
            return
        self._has_failed |= self._writers[0].settle() is not None
        if self._metrics is not None or loop.position.step > self._last.step or self._has_failed_on_rank_0():
            self._save(loop)
        if error := self._writers[0].settle():
            raise error
        self._leave_together()
        if self._world.is_main:
            folder = step_folder(self._folder.root, loop.position.step)
            print(f"paceline: stopped after step {loop.position.step}, saved as {folder}", file=sys.stderr)

    def save(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        """Save now; from a hook, before the next step."""
        self._check_has_folder("save()")
        self._metrics = (self._metrics or {}) | {name: float(value) for name, value in metrics.items()}
        if not loop.is_in_hook:
            self._save(loop)

    def save_last(self, loop: Loop) -> None:
        """Save if the run ends here and has unsaved steps."""
        if self._metrics is not None or self._schedule.is_due_at_end(_progress(loop), self._last):
            self._save(loop)

    def finish(self, loop: Loop) -> None:
        """The run ended without an error: return when everything is on the disk, on all workers."""
        if self._is_finished or not self._writers:
            return
        self._report(self._writers[0].settle())
        if self._has_failed_on_rank_0() and self._schedule.final:
            self._save(loop)  # again: the disk may have recovered
        else:
            self.save_last(loop)
        self._report(self._writers[0].settle())
        self._leave_together()

    def close(self) -> None:
        is_interrupted = self._signals is not None and self._signals.is_requested and not self._is_finished
        self._signals = None
        self._resources.close()
        if is_interrupted:  # another worker failed, so the step could not be completed
            newest = max(self._folder.found(), key=lambda found: found[1], default=None)
            path = f"the newest checkpoint is {self._folder.path(*newest)}" if newest else "there is no checkpoint"
            print(
                f"paceline: rank {self._world.rank} ended without saving: not all workers completed its step; {path}",
                file=sys.stderr,
            )

    def _check_has_folder(self, call: str) -> None:
        if self._settings is None:
            raise MisuseError(f"{call} needs a folder: give checkpoints=Checkpoints(folder) to the run")

    def _save(self, loop: Loop) -> None:
        metrics, self._metrics = self._metrics or {}, None
        self._write(self._writers[0], loop, metrics)
        self._last = _progress(loop)
        self._has_failed = False
        self._reset_requests(Decision.STOP if self._request is Decision.STOP else Decision.CONTINUE)
        self._run.events.emit("save", folder=str(step_folder(self._folder.root, self._last.step)))

    def _write(self, writer: AsyncWriter, loop: Loop, metrics: Mapping[str, float]) -> None:
        assert self._settings is not None
        with self._run.timeline.during("checkpoint"):
            loop.synchronize()
            loop.check_replicas()
            components = self._states(loop)
            level = self._settings.check_replicas
            for component in components:
                if component.pattern is Pattern.REPLICATED:
                    check_replication(component.name, component.state, level, self._run.communicator)
            self._report(writer.settle())
            step, position = loop.position.step, loop.position.to_dict()
            manifest = Manifest(step, configuration=self._run.identity, position=position, metrics=metrics)
            writer.save(manifest, components)
        self._has_saved = True
        self._writing_since = perf_counter()

    def _leave_together(self) -> None:
        """All workers are done. Snapshots are removed if the newest state is on the disk."""
        is_on_disk = not self._has_failed_on_rank_0()
        self._note_written()
        wait_for_all(self._run.communicator)
        for snapshots in self._writers[1:]:
            snapshots.settle()
            if is_on_disk:
                self._folder.remove_memory()
        self._is_finished = True

    def _has_failed_on_rank_0(self) -> bool:
        """Whether the last checkpoint did not become visible. Rank 0 publishes it, and all must act alike."""
        return bool(decided_by_rank_0(lambda: self._has_failed, self._run.communicator))

    def _report(self, error: CheckpointError | None) -> None:
        """Handle a failed save as `on_error` says."""
        self._note_written()
        if error is None:
            return
        self._has_failed = True
        if self._settings is not None and self._settings.on_error == "stop":
            raise error
        logger.warning("training continues without a checkpoint: %s", error)

    def _note_written(self) -> None:
        """Add the background write to the timeline once it is done."""
        if self._writing_since is not None and not any(writer.is_busy for writer in self._writers):
            self._run.timeline.span("writing", self._writing_since, perf_counter())
            self._writing_since = None

    def _close_writers(self) -> None:
        for writer in self._writers:
            if not self._is_finished:
                writer.abandon()
            try:
                writer.close()
            except CheckpointError as error:
                logger.warning("%s", error)


def _progress(loop: Loop) -> Progress:
    return Progress(loop.position.step, loop.position.epoch, monotonic())
