"""What a run is: the settings that, with the seed, decide its course, and those that only decide how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.comm.base import DEFAULT_TIMEOUT_S
from paceline.sync.averaging import Averaging

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run; the batch sizes are checked against the data when the run is put together.

    Course: global_batch, micro_batch, seed, shuffle, drop_last, precision, max_grad_norm, strategy, exact (and then
    threads).
    Speed only: shares, speed_hints, overlap, backend, timeout_s, and threads outside of exact mode.
    """

    global_batch: int
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    exact: bool = False
    strategy: Literal["gradients"] | Averaging = "gradients"
    shares: tuple[float, ...] | Literal["measured", "equal"] = "measured"
    speed_hints: tuple[float, ...] | None = None
    overlap: bool = True
    backend: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    threads: int | None = None

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} is a {type(self.seed).__name__}: choose an int")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r} is unknown: choose one of {', '.join(get_args(Precision))}")
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} is no bound: choose a number >= 0, or None not to clip"
            )
        if self.strategy != "gradients" and not isinstance(self.strategy, Averaging):
            raise ValueError(f"strategy={self.strategy!r} is unknown: choose 'gradients' or Averaging(...)")
        if self.exact and self.strategy != "gradients":
            raise ValueError(
                "exact=True needs strategy='gradients': replicas that differ between averages have no one course"
            )
        if isinstance(self.shares, str) and self.shares not in ("measured", "equal"):
            raise ValueError(
                f"shares={self.shares!r} is unknown: choose 'measured', 'equal', or one relative speed per worker"
            )
        if self.speed_hints is not None and self.shares != "measured":
            raise ValueError("speed_hints would be ignored, since shares is not 'measured': leave one of them out")
        if not (0 < self.timeout_s < math.inf):
            raise ValueError(f"timeout_s={self.timeout_s} is no time-out: choose a finite number of seconds > 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}: choose at least 1 thread per worker, or None")

    def check_workers(self, num_workers: int) -> None:
        """Whether what names workers names as many as the world has."""
        for name in ("shares", "speed_hints"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_workers:
                raise ValueError(
                    f"{name}={list(value)} names {len(value)} workers, the world has {num_workers}: "
                    "give one number per worker"
                )
