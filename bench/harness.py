"""What every benchmark shares: contestants that take turns, medians, and the one form of a result.

A contestant is a callable that runs one turn and returns its measurement. Contestants alternate within one run,
so that whatever else the machine does meets all of them; only ratios inside one run mean anything.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Contestant = Callable[[], float]


class Unavailable(Exception):
    """This machine lacks what a benchmark needs; the text says what."""


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """The order of one turn: rotated by one each turn, and backwards every other time.

    So no contestant always starts, and none always runs behind the same neighbour.
    """
    start = turn % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if turn % 2 else rotated


def alternate(contestants: Mapping[str, Contestant], num_turns: int) -> dict[str, list[float]]:
    """Each contestant's measurements, one per turn. Garbage is collected before a measurement, not within it."""
    if num_turns < 1:
        raise ValueError(f"turns={num_turns} measures nothing: choose turns >= 1")
    measurements: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(num_turns):
        for name in turn_order(list(contestants), turn):
            gc.collect()
            measurements[name].append(contestants[name]())
    return measurements


@dataclass(frozen=True)
class TorchSettings:
    """The process-wide switches of torch that change how fast a step is."""

    num_threads: int
    deterministic: bool
    warn_only: bool
    fill_uninitialized_memory: bool
    cudnn_attention: bool
    pads_compiled_products: bool

    @classmethod
    def current(cls) -> TorchSettings:
        compiler = sys.modules.get("torch._inductor.config")  # its import takes seconds
        return cls(
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cuda.cudnn_sdp_enabled(),
            getattr(compiler, "force_shape_pad", False),
        )

    def apply(self) -> None:
        if self == TorchSettings.current():
            return  # the setters are not free: one of them imports torch's compiler
        torch.set_num_threads(self.num_threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)
        torch._inductor.config.force_shape_pad = self.pads_compiled_products


def isolated(build: Callable[[], Contestant]) -> Contestant:
    """Build a contestant that keeps to itself the torch settings it chooses, at set-up or in a turn."""
    outside = TorchSettings.current()
    try:
        contestant = build()
        own = TorchSettings.current()
    finally:
        outside.apply()

    def turn() -> float:
        nonlocal own
        own.apply()
        try:
            return contestant()
        finally:
            own = TorchSettings.current()
            outside.apply()

    return turn


@dataclass(frozen=True)
class Spread:
    """The median of some measurements and how far they scatter."""

    minimum: float
    q1: float
    median: float
    q3: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        # quantiles() wants two values; one value is its own quartiles.
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(min(values), q1, median, q3, max(values))


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [value / other for value, other in zip(values, base, strict=True)]


def _ratio_of_medians(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [statistics.median(values) / statistics.median(base)]


@dataclass(frozen=True)
class Result:
    """What a benchmark found. `ratio` is ours over the limit, both in `unit`.

    `detail["spread"]` has every contestant's quartiles. `detail["ratio_by_turn"]` has those of its ratio to the limit
    within a turn, which the machine's drift from turn to turn does not touch, and `detail["ours_over_by_turn"]` those
    of our ratio to it. A benchmark may add lines to `detail["notes"]`, which the table ends with.
    """

    bench: str
    unit: str
    ours: float
    limit: float
    peers: dict[str, float]
    detail: dict[str, Any]

    @property
    def ratio(self) -> float:
        return self.ours / self.limit

    @classmethod
    def of(
        cls,
        bench: str,
        unit: str,
        measurements: Mapping[str, Sequence[float]],
        *,
        ours: str,
        limit: str,
        better: str,
        settings: Mapping[str, Any],
        packages: Sequence[str] = (),
        skipped: Mapping[str, str] | None = None,
        not_peers: Sequence[str] = (),
        is_paired: bool = True,
    ) -> Result:
        """Sum up measurements, `unit`s per turn of each contestant, by their medians.

        `better` is "lower" or "higher"; `skipped` says why a peer is missing; `not_peers` are contestants that
        only show up in the detail. Measurements that are not `is_paired` belong to no turn: contestants may have
        different numbers of them, and the ratios of their medians are given.
        """
        compare = ratios if is_paired else _ratio_of_medians
        spread = {name: Spread.of(values) for name, values in measurements.items()}
        by_turn = {name: Spread.of(compare(values, measurements[limit])) for name, values in measurements.items()}
        ours_over = {name: Spread.of(compare(measurements[ours], values)) for name, values in measurements.items()}
        detail = {
            "ours": ours,
            "limit": limit,
            "better": better,
            "turns": len(measurements[limit]),
            "spread": {name: asdict(value) for name, value in spread.items()},
            "ratio_by_turn": {name: asdict(value) for name, value in by_turn.items()},
            "ours_over_by_turn": {name: asdict(value) for name, value in ours_over.items()},
            "skipped": dict(skipped or {}),
            "notes": [],
            **circumstances(settings, packages),
        }
        peers = {name: value.median for name, value in spread.items() if name not in (ours, limit, *not_peers)}
        return cls(bench, unit, spread[ours].median, spread[limit].median, peers, detail)

    def to_json(self) -> str:
        fields = asdict(self)
        return json.dumps({**{k: fields[k] for k in ("bench", "unit", "ours", "limit")}, "ratio": self.ratio, **fields})

    def table(self) -> str:
        detail = self.detail
        roles = {detail["limit"]: "limit", detail["ours"]: "ours"}
        lines = [
            f"{self.bench}: {self.unit}, {detail['better']} is better; medians of {detail['turns']} turns",
            f"{'':<26} {'median':>9} {'quartiles':>20} {'/ limit':>8} {'by turn':>16} {'ours/it':>10} {'by turn':>16}",
        ]
        for name, spread in sorted(detail["spread"].items(), key=lambda item: item[1]["median"]):
            to_limit, ours_over = detail["ratio_by_turn"][name], detail["ours_over_by_turn"][name]
            quartiles = f"{_short(spread['q1'])} .. {_short(spread['q3'])}"
            lines.append(
                f"{name:<26} {_short(spread['median']):>9} {quartiles:>20} "
                f"{spread['median'] / self.limit:>8.3f} {to_limit['q1']:>7.3f} .. {to_limit['q3']:.3f} "
                f"{self.ours / spread['median']:>10.3f} {ours_over['q1']:>7.3f} .. {ours_over['q3']:.3f}   "
                f"{roles.get(name, '')}".rstrip()
            )
        lines += [f"{name:<26} skipped: {reason}" for name, reason in detail["skipped"].items()]
        lines.append(f"ratio of {detail['ours']} to {detail['limit']}: {self.ratio:.3f}")
        return "\n".join([*lines, *detail["notes"], *self.footer()])

    def footer(self) -> list[str]:
        """Where and how it was measured."""
        machine = self.detail["machine"]
        return [
            f"{machine['cpu']}, {machine['cores']} cores; {_joined(self.detail['versions'])}",
            _joined(self.detail["settings"]),
        ]


def circumstances(settings: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """What the detail of every result ends with."""
    return {
        "settings": dict(settings),
        "versions": versions("paceline", "torch", *packages),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _short(value: float) -> str:
    """Four significant digits, without an exponent for the sizes benchmarks have."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _joined(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


class CpuMeter:
    """How busy others kept the machine since this was made: whether a figure deserves trust."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._time_s = self._now()

    def others_cores(self) -> float:
        """Cores that other processes used, on average. Our workers count as ours once they have ended."""
        busy_s, own_s, time_s = self._now()
        return max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / (time_s - self._time_s)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        busy_s = busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
        return busy_s, sum(os.times()[:4]), time.monotonic()


def busy_seconds(proc_stat: str, ticks_per_s: int) -> float:
    """Core-seconds since the machine started in which a core had something to do, or was taken by the hypervisor."""
    user, nice, system, _idle, _waiting, *interrupts_and_steal = map(int, proc_stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / ticks_per_s


def missing_package(*packages: str) -> str | None:
    """Why a peer that needs these packages cannot take part; None if it can."""
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed (the `bench` extra has it)"
    return None


def versions(*packages: str) -> dict[str, str]:
    """The installed versions, in order; packages that are not installed are left out."""
    return {name: importlib.metadata.version(name) for name in packages if missing_package(name) is None}


def machine() -> dict[str, Any]:
    """The machine a figure belongs to."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
