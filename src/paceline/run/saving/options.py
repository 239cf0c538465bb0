"""The settings of saving and resuming."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from paceline.checkpoint.policy import Best, Level, Retention
from paceline.checkpoint.policy import Mode as Mode
from paceline.core.settings import check, setting

DEFAULT_MINUTES = 10.0
# The components of the run itself; users register others.
OWN = ("model", "optimizer", "scheduler", "engine", "random")

Resume: TypeAlias = Literal["auto"] | bool | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Checkpoints:
    """When and where a run is saved, which checkpoints are kept, and where it resumes.

    It is saved every `every_steps`, `every_minutes` or `every_epochs`, whichever comes first. A checkpoint is kept if
    one of `keep_last`, `keep_best` and `keep_every` selects it; if all three are None, all are kept.

    folder: the run's folder, visible to all workers (or one on each node: disk="per node").
    keep_best: ("metric", n) or ("metric", n, "max"): the n checkpoints with the lowest (or highest) values of a metric
        passed to `trainer.save(metrics=...)`.
    check_replicas: compares the components that must be equal on all workers: "quick", some values of each tensor;
        "tensor", checksums; "full", all values. A dict compares only the components it names: {"model": "full",
        "optimizer": "quick"}.
    resume: "auto", from the newest checkpoint in the folder if there is one; True, there must be one; a path, from that
        checkpoint, and later steps in the folder are moved aside; None, the folder must have no checkpoint.
    """

    folder: str | os.PathLike[str] = setting("folder of the checkpoints")
    every_steps: int | None = setting("steps between checkpoints", None, least=1)
    every_minutes: float | None = setting("minutes between checkpoints; 10 without any interval", None, above=0)
    every_epochs: int | None = setting("epochs between checkpoints", None, least=1)
    final: bool = setting("save when the run ends", True)
    keep_last: int | None = setting("number of newest checkpoints to keep", 3, least=1)
    keep_best: Best | None = setting("best checkpoints to keep as well", None)
    keep_every: int | None = setting("keep every checkpoint whose step is a multiple of this", None, least=1)
    snapshot_every: int | None = setting(
        "steps between snapshots in memory (/dev/shm of each node), from which workers restarted on the same machine "
        "resume; None for no snapshots",
        None,
        least=1,
    )
    leave_out: Sequence[str] = setting('components not to save, such as "optimizer"', ())
    on_error: Literal["stop", "continue"] = setting(
        "when a checkpoint cannot be written, stop the run with the error, or continue with a warning", "stop"
    )
    check_replicas: Level | Mapping[str, Level] = setting(
        "what to compare between workers before each save: for all components, or by component", "none"
    )
    disk: Literal["shared", "per node"] = setting("whether all workers see the same disk", "shared")
    num_writers: int = setting(
        "workers that write replicated state; more than 1 helps on file systems that one worker cannot saturate",
        1,
        least=1,
    )
    handle_signals: bool = setting("on SIGTERM, SIGINT and SIGHUP finish the step, save, and end the run", True)
    resume: Resume = setting(
        "auto: the newest checkpoint, if any; true: the newest; null: refuse existing checkpoints; or a path", "auto"
    )
    allow: Sequence[str] = setting('settings that may differ from the checkpoint, such as "global_batch"', ())
    skip: Sequence[str] = setting('components of the checkpoint that are not restored, such as "optimizer"', ())

    def __post_init__(self) -> None:
        check(self)
        for name in ("allow", "skip", "leave_out"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of names")
        if {"model", "engine"}.intersection(self.leave_out):
            raise ValueError(
                f"leave_out={self.leave_out!r}: choose other names, every checkpoint needs 'model' and 'engine'"
            )
        best: Any = self.keep_best
        is_tuple = isinstance(best, tuple) and [*map(type, best[:2])] == [str, int]
        if best is not None and not (is_tuple and best[1] > 0 and best[2:] in ((), ("min",), ("max",))):
            raise ValueError(f'keep_best={best!r}: give ("metric", n) or ("metric", n, "max"), n >= 1')

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_last, self.keep_best, self.keep_every)
