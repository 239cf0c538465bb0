"""Profiles: measurements of a model on a machine, as JSON that can be combined with other machines' profiles."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_type_hints

from paceline.core.settings import check_value
from paceline.core.timing import Timing
from paceline.plan.entries import check_entries
from paceline.plan.predict import Device, Exchange, Host, Link

VERSION = 1
# Two cores that compete for cache and memory; assumed where nothing was measured.
USUAL_CONTENTION = 0.05
FREE_EXCHANGE = Exchange()  # where nothing was measured


@dataclass(frozen=True)
class Subject:
    """The model that was measured, and how it is trained. Profiles of different subjects cannot be combined."""

    model: str
    num_parameters: int
    gradient_bytes: int
    micro_batch: int
    precision: str = "fp32"
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("num_parameters", "gradient_bytes", "micro_batch"):
            check_value(name, getattr(self, name), int, least=1)

    def differences(self, other: Subject) -> list[str]:
        """What is not the same, as "micro_batch 8, not 4"."""
        return [
            f"{each.name} {getattr(other, each.name)}, not {getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        ]


@dataclass(frozen=True)
class StepTimes:
    """Means over the steps of one world, in seconds, by rank. exchange_s: what no worker's computing covered.

    spread: half of the interquartile range of a worker's micro-batches, relative to its median.
    """

    micro_batch_s: tuple[float, ...]
    rest_s: tuple[float, ...]
    data_s: tuple[float, ...]
    spread: tuple[float, ...]
    exchange_s: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[Sequence[Timing]]) -> StepTimes:
        """steps: the workers' timings by step and rank."""
        if not steps:
            raise ValueError("no step was measured: choose steps >= 1")
        by_rank = [list(zip(*own, strict=True)) for own in zip(*steps, strict=True)]  # the readings of each field
        for rank, (micro_batch_s, *_) in enumerate(by_rank):
            if not any(micro_batch_s):
                raise ValueError(
                    f"rank {rank} had no micro-batch in {len(steps)} steps: choose a global_batch of more micro-batches"
                )
        micro_batch_s, _, rest_s, data_s, _ = zip(*by_rank, strict=True)
        return cls(
            tuple(map(_mean, micro_batch_s)),
            tuple(map(_mean, rest_s)),
            tuple(map(_mean, data_s)),
            tuple(map(_spread, micro_batch_s)),
            _mean([min(own.sync for own in step) for step in steps]),
        )


@dataclass(frozen=True)
class Profile:
    """A machine's devices, measured alone, and how much they slow each other down when they train together.

    counts: the number of devices of each kind. num_samples and epochs: of the run, for times per epoch and run; None if
    unknown. link: between the machines, if it was measured in a world of several.
    """

    subject: Subject
    host: str
    cores: float
    devices: tuple[Device, ...]
    counts: tuple[int, ...] = (1,)
    contention: float = USUAL_CONTENTION
    exchange: Exchange = FREE_EXCHANGE
    num_samples: int | None = None
    global_batch: int | None = None
    epochs: int | None = None
    link: Link | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.host, str):
            raise ValueError(f"host={self.host!r} is not a name")
        check_value("cores", self.cores, float, above=0)
        check_value("contention", self.contention, float, least=0)
        for name in ("num_samples", "global_batch", "epochs"):
            check_value(name, getattr(self, name), int | None, least=1)
        if not self.devices or len(self.counts) != len(self.devices):
            raise ValueError(f"counts={list(self.counts)} of {len(self.devices)} devices: give one for each kind")
        for count in self.counts:
            check_value("counts", count, int, least=1)

    @property
    def as_host(self) -> Host:
        return Host(self.cores, self.contention, self.exchange)

    def with_company(self, together: StepTimes, devices: Sequence[Device]) -> Profile:
        """With the contention and exchange of a world of several workers on these devices of this machine."""
        if len(devices) < 2:
            return self
        slowdowns = [
            seconds / device.micro_batch_s for seconds, device in zip(together.micro_batch_s, devices, strict=True)
        ]
        demands = [device.cores for device in devices]
        crowded, contended = (Host(self.cores, contention).slowdowns(demands) for contention in (0.0, 1.0))
        found = [
            (slowdown / none - 1) / (full / none - 1)
            for slowdown, none, full in zip(slowdowns, crowded, contended, strict=True)
            if full > none
        ]
        contention = statistics.fmean(found) if found else 0.0 if any(demands) else self.contention
        crowding = max(1.0, sum(demands) / self.cores)
        exchange = Exchange.fitted(together.exchange_s / crowding, len(devices), self.subject.gradient_bytes)
        own = self.devices
        if contention < 0:  # others make no worker faster: the machine's speed has changed, and both readings count
            factor, contention = (1 + statistics.fmean(slowdowns) / statistics.fmean(crowded)) / 2, 0.0
            own = tuple(device.slowed(factor) for device in own)
        return replace(self, devices=own, contention=contention, exchange=exchange)

    def device(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        raise ValueError(f"{self.host} has no device {name!r}: it has {', '.join(d.name for d in self.devices)}")

    def renamed(self, name: str) -> Profile:
        """The same machine with this name for it and its device; further kinds of devices get a number."""
        devices = tuple(
            replace(device, name=name if number == 0 else f"{name}-{number + 1}", host=name)
            for number, device in enumerate(self.devices)
        )
        return replace(self, host=name, devices=devices)

    def to_json(self) -> str:
        values = {"paceline_profile": VERSION} | asdict(self)
        if math.isinf(self.exchange.bytes_per_s):
            values["exchange"]["bytes_per_s"] = None
        return json.dumps(values, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """What `to_json` wrote. A missing, unknown or invalid entry is a ValueError that names it."""
        try:
            values: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error}") from None
        if not isinstance(values, dict) or values.pop("paceline_profile", None) != VERSION:
            raise ValueError(f"it is not a profile of version {VERSION}: make one with `paceline plan --out`")
        values.setdefault("link", None)  # profiles had none before
        check_entries("the profile", values, [each.name for each in fields(cls)])
        for name in ("devices", "counts"):
            if not isinstance(values[name], list):
                raise ValueError(f"the profile's {name}={values[name]!r} is not a list")
        if isinstance(values["exchange"], dict) and values["exchange"].get("bytes_per_s", 0) is None:
            values["exchange"]["bytes_per_s"] = math.inf
        values["subject"] = _made(Subject, values["subject"])
        known = {"uncertainty": 0.0}  # which profiles did not have before
        values["devices"] = tuple(_made(Device, known | d if isinstance(d, dict) else d) for d in values["devices"])
        values["counts"] = tuple(values["counts"])
        values["exchange"] = _made(Exchange, values["exchange"])
        values["link"] = None if values["link"] is None else _made(Link, values["link"])
        return cls(**values)


def check_combinable(own: Profile, others: Sequence[Profile]) -> None:
    """Refuse profiles of another model, and two machines of one name."""
    names = [own.host]
    for other in others:
        if differences := own.subject.differences(other.subject):
            raise ValueError(
                f"the profile of {other.host} is of another model: {'; '.join(differences)}. Measure it there with the "
                "same project file"
            )
        if other.host in names:
            raise ValueError(f"two machines are named {other.host!r}: rename one with --add NAME=FILE")
        names.append(other.host)


def _mean(readings: Sequence[float]) -> float:
    """Of what was measured, without the lowest and the highest tenth, which show other load on the machine.

    Unlike medians, means add up.
    """
    measured = sorted(filter(None, readings))
    few = len(measured) // 10
    return statistics.fmean(measured[few : len(measured) - few]) if measured else 0.0


def _spread(readings: Sequence[float]) -> float:
    measured = list(filter(None, readings))
    if len(measured) < 4:
        return 0.0
    first, median, third = statistics.quantiles(measured, n=4)
    return (third - first) / 2 / median


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    owner, hints = f"the profile's {kind.__name__.lower()}", get_type_hints(kind)
    check_entries(owner, values, [each.name for each in fields(kind)])
    for name, hint in hints.items():
        if hint in (str, bool) and not isinstance(values[name], hint):
            raise ValueError(f"{owner} has {name}={values[name]!r}, which is not a {hint.__name__}")
        check_value(f"{owner}: {name}", values[name], hint, finite=False)
    return kind(**values)
