"""Predicts how fast workers train together from measurements of each one. Arithmetic only.

Workers wait for each other in the exchange. A step takes the time of the slowest worker's update and micro-batches,
plus the part of the exchange that does not overlap with them:

    step_s = E[max((rest_s[i] + share[i] * micro_batch_s[i]) * slowdown[i])] + exposed_exchange_s

E is the expected value: times vary, and another worker may be the slowest in each step. The shares are the ones that
the planner would choose, in whole micro-batches. docs/plan.md explains every term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.core.settings import check_value
from paceline.plan.cadence import Cadence
from paceline.plan.shares import shares

# The error of predictions that were compared with runs (`python -m bench plan`).
MODEL_ERROR = 0.05
# The error of a device's factor given by the user.
FACTOR_ERROR = 0.1
# Backward's part of a micro-batch: an exchange can begin when backward has completed the first gradients.
BACKWARD_PART = 0.6
# TCP payload as a part of a link's nominal bandwidth.
TCP_PART = 0.94
# Gradients are exchanged in buckets of this size.
BUCKET_BYTES, GPU_BUCKET_BYTES = 8 << 20, 32 << 20
# The fixed cost of a call of the exchange.
CALL_S = 1e-4
LATENCY_S = 1e-4  # of a message on a link that was not measured
_LIKE = "#"  # before the number of another machine of the same kind
_SETTLING_REPORTS = 100  # after which a cadence has found its level
# Of a normal distribution: its standard deviation over half of its interquartile range, how many standard deviations
# hold all of it, and in how many points it is added up.
_SIGMA, _REACH, _POINTS = 1.4826, 5.0, 100


@dataclass(frozen=True)
class Device:
    """One worker's device, measured alone on its host.

    micro_batch_s: seconds per micro-batch, including the wait for its data, data_s. rest_s: seconds per step outside
    micro-batches and exchange, such as the optimizer's. host: its machine's name. cores: how many of its host's cores
    it keeps busy while it computes, for a CPU worker one per thread, or its quota; 0 for a GPU. spread: half of the
    interquartile range of step times, relative to micro_batch_s. uncertainty: the relative error of a speed that was
    not measured.
    """

    name: str
    micro_batch_s: float
    rest_s: float = 0.0
    data_s: float = 0.0
    host: str = ""
    cores: float = 0.0
    spread: float = 0.0
    uncertainty: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.micro_batch_s < math.inf:
            raise ValueError(f"{self.name}: micro_batch_s={self.micro_batch_s} must be a finite number of seconds > 0")
        for name in ("rest_s", "data_s", "cores", "spread", "uncertainty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{self.name}: {name}={getattr(self, name)} must be a finite number >= 0")

    def slowed(self, factor: float) -> Device:
        """The same device while everything on it takes `factor` times as long."""
        return replace(
            self,
            micro_batch_s=factor * self.micro_batch_s,
            rest_s=factor * self.rest_s,
            data_s=factor * self.data_s,
        )

    def scaled(self, name: str, factor: float, host: str | None = None) -> Device:
        """A device that was not measured, `factor` times as fast as this one."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor={factor} of {name}: choose how fast it is relative to {self.name}, such as 0.4")
        return replace(
            self,
            name=name,
            micro_batch_s=(self.micro_batch_s - self.data_s) / factor + self.data_s,
            rest_s=self.rest_s / factor,
            host=self.host if host is None else host,
            uncertainty=self.uncertainty + FACTOR_ERROR,
        )


@dataclass(frozen=True)
class Exchange:
    """What summing gradients costs among workers of one host: call_s per step and worker, and bytes_per_s of each."""

    call_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        check_value("an exchange's call_s", self.call_s, float, least=0)
        check_value("an exchange's bytes_per_s", self.bytes_per_s, float, above=0, finite=False)

    @classmethod
    def fitted(cls, seconds: float, num_workers: int, num_bytes: float) -> Exchange:
        """From one measurement. It cannot separate calls from bytes: all beyond CALL_S counts as bytes."""
        part = 2 * (num_workers - 1) / num_workers
        call_s = min(CALL_S, seconds / 2 / (num_workers - 1))
        left_s = seconds - (num_workers - 1) * call_s
        return cls(call_s, part * num_bytes / left_s if left_s > 0 else math.inf)

    def seconds(self, num_workers: int, num_bytes: float, crowding: float = 1.0) -> float:
        """Every worker reads its part from all others and writes the sum to all: (n - 1) / n of the bytes, twice."""
        if num_workers < 2:
            return 0.0
        part = 2 * (num_workers - 1) / num_workers
        return crowding * ((num_workers - 1) * self.call_s + part * num_bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Host:
    """A machine. contention: by how much a worker's CPU slows down for each other core that is busy."""

    cores: float = math.inf
    contention: float = 0.0
    exchange: Exchange = Exchange()

    def slowdowns(self, demands: Sequence[float]) -> list[float]:
        """The factors by which workers slow down that keep so many cores busy at the same time.

        Cores are divided fairly: a worker that needs less than an equal part gets it, the others divide the rest.
        """
        granted = _fair_parts(self.cores, demands)
        busy = sum(granted)
        factors = []
        for demand, got in zip(demands, granted, strict=True):
            others = min(busy - got, max(self.cores - 1, 0.0)) if math.isfinite(self.cores) else busy - got
            factors.append((1 + self.contention * others) * (demand / got if got else 1.0))
        return factors


@dataclass(frozen=True)
class Link:
    """Between hosts: payload in each direction, and the latency of a message."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_value("a link's bytes_per_s", self.bytes_per_s, float, above=0, finite=False)
        check_value("a link's latency_s", self.latency_s, float, least=0)

    @classmethod
    def sold_as(cls, bits_per_s: float) -> Link:
        """A link of this nominal bandwidth that was not measured."""
        return cls(TCP_PART * bits_per_s / 8, LATENCY_S)

    @classmethod
    def fitted(cls, num_hosts: int, num_bytes: float, seconds: float, least_s: float) -> Link:
        """From the seconds of an all-reduce of `num_bytes`, and `least_s` of a tiny one."""
        latency_s = least_s / (2 * (num_hosts - 1))
        return cls(2 * (num_hosts - 1) / num_hosts * num_bytes / max(seconds - least_s, 1e-9), latency_s)

    def seconds(self, num_hosts: int, num_bytes: float) -> float:
        """A ring all-reduce: in 2 (n - 1) messages, every host sends and receives 2 (n - 1) / n of the bytes."""
        num_messages = 2 * (num_hosts - 1)
        return num_messages * (self.latency_s + num_bytes / num_hosts / self.bytes_per_s)


@dataclass(frozen=True)
class Averaging:
    """Averaging every `every` steps. transfer_part: bytes sent, relative to gradients. overlap: training continues."""

    every: int = 32
    transfer_part: float = 1.0
    overlap: bool = False


@dataclass(frozen=True)
class Workload:
    """What is trained. gradient_bytes: exchanged per step. num_samples: per epoch, None if unknown.

    overlap: buckets of bucket_bytes are sent during the last micro-batch's backward. stall_s: how long training waits
    for a checkpoint, every `save_every` steps. read_s: with a dispatched feed, the seconds that rank 0 takes to read a
    micro-batch for another worker.
    """

    num_micro_batches: int
    micro_batch: int
    gradient_bytes: float
    num_samples: int | None = None
    epochs: float = 1.0
    strategy: Literal["gradients"] | Cadence | Averaging = "gradients"
    overlap: bool = True
    stall_s: float = 0.0
    save_every: int | None = None
    read_s: float = 0.0
    bucket_bytes: float = BUCKET_BYTES

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "micro_batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: choose {name} >= 1")
        if self.strategy != "gradients" and not isinstance(self.strategy, Cadence | Averaging):
            raise ValueError(
                f"strategy={self.strategy!r} is unknown: choose 'gradients', Cadence(...) or Averaging(...) of "
                "paceline.plan.predict"
            )


@dataclass(frozen=True)
class Hardware:
    """Hosts by name, and the link between them. A host without an entry has enough cores for all its workers."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    link: Link | None = None

    def host(self, name: str) -> Host:
        return self.hosts.get(name, self.hosts.get(name.rpartition(_LIKE)[0], Host()))


def like(host: str, number: int) -> str:
    """The name of another machine of the same kind."""
    return f"{host}{_LIKE}{number}"


@dataclass(frozen=True)
class Prediction:
    """samples_per_s lies between low and high. slowed: the devices with their times under contention.

    shares: micro-batches per step by worker; with a cadence, per exchange. efficiency: relative to the sum of the
    devices' speeds alone. limit: the largest loss: "compute", "whole micro-batches", "noise", "exchange", "shared
    cores", "data", or "checkpoints".
    """

    slowed: tuple[Device, ...]
    step_s: float
    shares: tuple[int, ...]
    samples_per_s: float
    low: float
    high: float
    efficiency: float
    limit: str
    parts: Mapping[str, float]

    def epoch_s(self, workload: Workload) -> float | None:
        return None if workload.num_samples is None else workload.num_samples / self.samples_per_s


def predict(workload: Workload, devices: Sequence[Device], hardware: Hardware | None = None) -> Prediction:
    """The steady state of one worker on each device, by rank."""
    if not devices:
        raise ValueError("devices is empty: give at least one device")
    hardware = hardware or Hardware()
    hosts: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        hosts.setdefault(device.host, []).append(rank)
    if len(hosts) > 1 and hardware.link is None:
        raise ValueError(f"hosts {', '.join(map(repr, hosts))} need a link: give its speed, such as --link 1Gbit")
    slowed = _slowed(devices, hosts, hardware)
    costs = _costs(workload, slowed, hosts, hardware)
    match workload.strategy:
        case Cadence() as cadence:
            plan = _cadence(cadence, slowed, costs)
        case Averaging() as averaging:
            plan = _averaging(workload, averaging, slowed, costs)
        case _:
            plan = _gradients(workload, slowed, costs)
    return _summary(workload, devices, slowed, plan)


@dataclass(frozen=True)
class _Costs:
    """Seconds of an exchange, and the part of it after the last micro-batch's backward."""

    exchange_s: float
    exposed_s: float


@dataclass(frozen=True)
class _Plan:
    """Of one step, or with averaging of one round's mean step."""

    shares: tuple[int, ...]
    busy_s: float
    exposed_s: float
    num_micro_batches: float


def _slowed(devices: Sequence[Device], hosts: Mapping[str, Sequence[int]], hardware: Hardware) -> list[Device]:
    """The devices with their times while all of them work. hosts: ranks by name."""
    slowed = list(devices)
    for name, ranks in hosts.items():
        computing = [rank for rank in ranks if devices[rank].cores]
        factors = hardware.host(name).slowdowns([devices[rank].cores for rank in computing])
        for rank, factor in zip(computing, factors, strict=True):
            slowed[rank] = devices[rank].slowed(factor)
    return slowed


def _costs(
    workload: Workload, devices: Sequence[Device], hosts: Mapping[str, Sequence[int]], hardware: Hardware
) -> _Costs:
    inside_s = 0.0
    for name, ranks in hosts.items():
        host = hardware.host(name)
        crowding = max(1.0, sum(devices[rank].cores for rank in ranks) / host.cores)
        inside_s = max(inside_s, host.exchange.seconds(len(ranks), workload.gradient_bytes, crowding))
    link_s = 0.0 if hardware.link is None else hardware.link.seconds(len(hosts), workload.gradient_bytes)
    # A bucket leaves when backward has completed its gradients, the last one at the end of backward.
    num_buckets = math.ceil(workload.gradient_bytes / workload.bucket_bytes) or 1
    exposed_s = link_s
    if workload.overlap:
        backward_s = BACKWARD_PART * min(device.micro_batch_s for device in devices)
        exposed_s = max(link_s / num_buckets, link_s - (1 - 1 / num_buckets) * backward_s)
    return _Costs(inside_s + link_s, inside_s + exposed_s)


def _gradients(workload: Workload, devices: Sequence[Device], costs: _Costs) -> _Plan:
    counts = _best_shares(workload.num_micro_batches, devices)
    busy_s = max(*_busy(counts, devices), workload.num_micro_batches * workload.read_s)
    return _Plan(counts, busy_s, costs.exposed_s, workload.num_micro_batches)


def _cadence(cadence: Cadence, devices: Sequence[Device], costs: _Costs) -> _Plan:
    """El Che's counts once they have settled."""
    el_che = cadence.for_workers(len(devices))
    for _ in range(_SETTLING_REPORTS):
        counts = el_che.batch_counts
        compute_ms = [1e3 * n * device.micro_batch_s for n, device in zip(counts, devices, strict=True)]
        el_che.report_timing(compute_ms, counts, 1e3 * costs.exposed_s)
    counts = el_che.batch_counts
    return _Plan(counts, max(_busy(counts, devices)), costs.exposed_s, sum(counts))


def _averaging(workload: Workload, averaging: Averaging, devices: Sequence[Device], costs: _Costs) -> _Plan:
    """A mean step of a round: workers wait for each other only when they average."""
    counts = _best_shares(workload.num_micro_batches, devices)
    busy_s = max(_busy(counts, devices))
    sent_s = averaging.transfer_part * costs.exchange_s
    exposed_s = max(0.0, sent_s - averaging.every * busy_s) if averaging.overlap else sent_s
    return _Plan(counts, busy_s, exposed_s / averaging.every, workload.num_micro_batches)


def _best_shares(num_micro_batches: int, devices: Sequence[Device]) -> tuple[int, ...]:
    return shares(num_micro_batches, [1 / d.micro_batch_s for d in devices], [d.rest_s for d in devices])


def _busy(counts: Sequence[int], devices: Sequence[Device]) -> list[float]:
    """The seconds between two exchanges in which each worker is busy."""
    return [n * device.micro_batch_s + device.rest_s for n, device in zip(counts, devices, strict=True)]


def _noise_s(busy_s: Sequence[float], devices: Sequence[Device]) -> float:
    """The mean of the largest of independent, normally distributed times, minus the largest of their means.

    The largest exceeds x unless none of them does. The integral of that probability is its mean.
    """
    times = Counter((t, _SIGMA * device.spread * t) for t, device in zip(busy_s, devices, strict=True))
    first, last = max(t - _REACH * sigma for t, sigma in times), max(t + _REACH * sigma for t, sigma in times)
    if len(devices) == 1 or first == last:
        return 0.0
    width, expected_s = (last - first) / _POINTS, first
    for number in range(_POINTS):
        x, none_exceeds = first + (number + 0.5) * width, 1.0
        for (t, sigma), count in times.items():
            none_exceeds *= ((1 + math.erf((x - t) / sigma / math.sqrt(2))) / 2 if sigma else float(x >= t)) ** count
        expected_s += width * (1 - none_exceeds)
    return max(0.0, expected_s - max(t for t, _ in times))


def _summary(workload: Workload, devices: Sequence[Device], slowed: Sequence[Device], plan: _Plan) -> Prediction:
    stall_s = workload.stall_s / workload.save_every if workload.save_every else 0.0
    busy_s = _busy(plan.shares, slowed)
    noise_s = _noise_s(busy_s, slowed)
    step_s = plan.busy_s + noise_s + plan.exposed_s + stall_s
    samples_per_s = plan.num_micro_batches * workload.micro_batch / step_s
    alone = _sum_of_speeds(workload, devices)
    together = _sum_of_speeds(workload, slowed)
    even_s = plan.num_micro_batches / sum(1 / device.micro_batch_s for device in slowed)
    parts = {
        "shared cores": (1 - together / alone) * step_s if len(devices) > 1 else 0.0,
        "whole micro-batches": max(0.0, max(busy_s) - max(device.rest_s for device in slowed) - even_s),
        "noise": noise_s,
        "data": plan.busy_s - max(busy_s),
        "exchange": plan.exposed_s,
        "checkpoints": stall_s,
    }
    limit = max(parts, key=parts.__getitem__)
    error = math.hypot(MODEL_ERROR, max(device.spread + device.uncertainty for device in devices))
    return Prediction(
        tuple(slowed),
        step_s,
        plan.shares,
        samples_per_s,
        samples_per_s * max(1 - error, 0.0),
        samples_per_s * (1 + error),
        samples_per_s / alone,
        limit if parts[limit] > 0.05 * step_s else "compute",
        parts,
    )


def _sum_of_speeds(workload: Workload, devices: Sequence[Device]) -> float:
    """Samples per second of devices that train by themselves, each with the whole global batch."""
    count = workload.num_micro_batches
    return sum(count * workload.micro_batch / (count * d.micro_batch_s + d.rest_s) for d in devices)


def _fair_parts(cores: float, demands: Sequence[float]) -> list[float]:
    granted = list(demands)
    left, waiting = cores, sorted(range(len(demands)), key=demands.__getitem__)
    for number, rank in enumerate(waiting):
        granted[rank] = min(demands[rank], left / (len(waiting) - number))
        left -= granted[rank]
    return granted
