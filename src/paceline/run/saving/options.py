"""The settings of saving."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from paceline.checkpoint.compare import Level
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.pieces import Disk
from paceline.checkpoint.schedule import Schedule

DEFAULT_MINUTES = 10.0

Mode = Literal["min", "max"]
Resume: TypeAlias = Literal["auto"] | bool | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Checkpoints:
    """When a run is saved, where, and which checkpoints stay.

    folder: the run's own, visible to all workers (or one on every node: disk="per node").
    every_steps, every_minutes, every_epochs: whichever comes first; without any of them every 10 minutes. final: also
        when the run ends.
    keep_last: how many of the newest stay. keep_best: ("metric", n) or ("metric", n, "max"): also the n with the lowest
        (or highest) values of a metric given to `trainer.save(metrics=...)`. keep_every: also, for ever, those of every
        so many steps. None of the three: all stay.
    snapshot_every: steps between snapshots in memory (/dev/shm of every node), from which workers that are restarted on
        the same machine go on; None for none.
    leave_out: components not to save, such as "optimizer".
    on_error: when a checkpoint cannot be written, "stop" the run with the error or "continue" with a warning.
    check_replicas: before each save compare what must be equal on all workers: "none", "quick", "tensor" or "full".
    num_writers: by how many workers replicated state is written; more than 1 pays on file systems that one worker
        cannot fill.
    handle_signals: SIGTERM and SIGINT finish the step, save, and end the run.
    resume: "auto", from the newest checkpoint in the folder if there is one; True, there must be one; a path, from that
        checkpoint, and later steps in the folder are moved aside; None, the folder must have no checkpoint.
    allow: settings that may differ from those of the checkpoint, such as "global_batch". skip: components of the
        checkpoint that are not restored, such as "optimizer".
    """

    folder: str | os.PathLike[str]
    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    final: bool = True
    keep_last: int | None = 3
    keep_best: tuple[str, int] | tuple[str, int, Mode] | None = None
    keep_every: int | None = None
    snapshot_every: int | None = None
    leave_out: Sequence[str] = ()
    on_error: Literal["stop", "continue"] = "stop"
    check_replicas: Level = "none"
    disk: Literal["shared", "per node"] = "shared"
    num_writers: int = 1
    handle_signals: bool = True
    resume: Resume = "auto"
    allow: Sequence[str] = ()
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("allow", "skip"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of names")
        for name in ("snapshot_every", "num_writers"):
            value = getattr(self, name)
            if (value is not None or name == "num_writers") and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} is not a positive integer: choose {name} >= 1")
        if self.on_error not in ("stop", "continue"):
            raise ValueError(f"on_error={self.on_error!r}: choose 'stop' or 'continue'")
        if self.check_replicas not in get_args(Level):
            raise ValueError(f"check_replicas={self.check_replicas!r}: choose one of {', '.join(get_args(Level))}")
        if self.disk not in ("shared", "per node"):
            raise ValueError(f"disk={self.disk!r}: choose 'shared' or 'per node'")
        if isinstance(self.leave_out, str) or {"model", "engine"}.intersection(self.leave_out):
            raise ValueError(
                f"leave_out={self.leave_out!r}: give a list of names, without 'model' and 'engine', which every "
                "checkpoint needs"
            )
        if self.keep_best is not None and not (isinstance(self.keep_best, tuple) and len(self.keep_best) in (2, 3)):
            raise ValueError(f'keep_best={self.keep_best!r}: give ("metric", n) or ("metric", n, "max")')
        _ = self.schedule, self.keep  # which check themselves

    @property
    def root(self) -> Path:
        return Path(self.folder)

    @property
    def schedule(self) -> Schedule:
        has_none = self.every_steps is None and self.every_minutes is None and self.every_epochs is None
        minutes = DEFAULT_MINUTES if has_none else self.every_minutes
        return Schedule(self.every_steps, minutes, self.every_epochs, self.final)

    @property
    def keep(self) -> Keep:
        metric, best, *mode = self.keep_best or (None, None)
        return Keep(self.keep_last, best, metric, mode[0] if mode else "min", self.keep_every)

    @property
    def disk_kind(self) -> Disk:
        return Disk(self.disk)
