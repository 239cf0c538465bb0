"""The settings of saving."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from paceline.checkpoint.compare import Level
from paceline.checkpoint.policy import Retention, Schedule, check_positive
from paceline.core.settings import setting

DEFAULT_MINUTES = 10.0

Mode = Literal["min", "max"]
Resume: TypeAlias = Literal["auto"] | bool | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Checkpoints:
    """When and where a run is saved, and which checkpoints are kept.

    folder: the run's folder, visible to all workers (or one on each node: disk="per node").
    every_steps, every_minutes, every_epochs: whichever comes first; every 10 minutes if none is given. final: also at
        the end of the run.
    keep_last: keep this many of the newest. keep_best: ("metric", n) or ("metric", n, "max"): also keep the n with the
        lowest (or highest) values of a metric passed to `trainer.save(metrics=...)`. keep_every: also keep those of
        every N steps, forever. If all three are None, all are kept.
    snapshot_every: steps between snapshots in memory (/dev/shm of each node), from which workers restarted on the same
        machine resume; None for no snapshots.
    leave_out: components not to save, such as "optimizer".
    on_error: when a checkpoint cannot be written, "stop" the run with the error or "continue" with a warning.
    check_replicas: before each save, compare replicated state between workers: "none", "quick", "tensor" or "full".
    num_writers: how many workers write replicated state. More than 1 helps on file systems that one worker cannot
        saturate.
    handle_signals: on SIGTERM and SIGINT finish the step, save, and end the run.
    resume: "auto", from the newest checkpoint in the folder if there is one; True, there must be one; a path, from that
        checkpoint, and later steps in the folder are moved aside; None, the folder must have no checkpoint.
    allow: settings that may differ from those of the checkpoint, such as "global_batch". skip: components of the
        checkpoint that are not restored, such as "optimizer".
    """

    folder: str | os.PathLike[str] = setting("folder of the checkpoints")
    every_steps: int | None = setting("steps between checkpoints", None, least=1)
    every_minutes: float | None = setting("minutes between checkpoints; 10 without any interval", None, above=0)
    every_epochs: int | None = setting("epochs between checkpoints", None, least=1)
    final: bool = setting("save when the run ends", True)
    keep_last: int | None = setting("number of newest checkpoints to keep; all if null", 3, least=1)
    keep_best: tuple[str, int] | tuple[str, int, Mode] | None = setting("best checkpoints to keep as well", None)
    keep_every: int | None = setting("keep every checkpoint whose step is a multiple of this", None, least=1)
    snapshot_every: int | None = setting("steps between in-memory snapshots, used by restarts", None, least=1)
    leave_out: Sequence[str] = setting("components not to save, such as optimizer", ())
    on_error: Literal["stop", "continue"] = setting("what to do when a checkpoint cannot be written", "stop")
    check_replicas: Level = setting("what to compare between workers before each save", "none")
    disk: Literal["shared", "per node"] = setting("whether all workers see the same disk", "shared")
    num_writers: int = setting("number of workers that write", 1, least=1)
    handle_signals: bool = setting("save on SIGTERM and SIGINT before the run ends", True)
    resume: Resume = setting(
        "auto: the newest checkpoint, if any; true: the newest; null: refuse existing checkpoints; or a path", "auto"
    )
    allow: Sequence[str] = setting("settings that may differ from those of the checkpoint", ())
    skip: Sequence[str] = setting("components of the checkpoint not to restore", ())

    def __post_init__(self) -> None:
        for name in ("allow", "skip"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of names")
        check_positive("snapshot_every", self.snapshot_every)
        check_positive("num_writers", self.num_writers if self.num_writers is not None else 0)
        for name, choices in (
            ("on_error", ("stop", "continue")),
            ("check_replicas", get_args(Level)),
            ("disk", ("shared", "per node")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, choices))}")
        if isinstance(self.leave_out, str) or {"model", "engine"}.intersection(self.leave_out):
            raise ValueError(
                f"leave_out={self.leave_out!r}: give a list of names, without 'model' and 'engine', which every "
                "checkpoint needs"
            )
        if self.keep_best is not None and not (isinstance(self.keep_best, tuple) and len(self.keep_best) in (2, 3)):
            raise ValueError(f'keep_best={self.keep_best!r}: give ("metric", n) or ("metric", n, "max")')
        _ = self.schedule, self.retention  # validate themselves

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def schedule(self) -> Schedule:
        has_none = self.every_steps is None and self.every_minutes is None and self.every_epochs is None
        minutes = DEFAULT_MINUTES if has_none else self.every_minutes
        return Schedule(self.every_steps, minutes, self.every_epochs, self.final)

    @property
    def retention(self) -> Retention:
        metric, best, *mode = self.keep_best or (None, None)
        return Retention(self.keep_last, best, metric, mode[0] if mode else "min", self.keep_every)
