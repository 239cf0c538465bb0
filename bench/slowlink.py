"""Samples per second on slow links, the bytes sent, and the loss that each way of training together ends with.

Network namespaces are hosts with one worker each, two or three of them, and 100, 10 or 1 Mbit/s in each direction
between them. The limit is workers that never talk: each trains on its part by itself, their rates summed. There are two
of them, a bare loop and our own with a first average that is never reached, and the faster one counts in each turn.
Everyone who trains together has the same model, micro-batches, optimizer and global batch; only with a cadence the
batch is what the link makes it.

Speed: the contestants take turns inside the workers, behind a barrier; a turn is whole steps of a run that goes on
from turn to turn, and takes as long as its slowest worker. With averaging a turn is a whole round, from the middle of
one to the middle of the next: an exchange that overlaps with training begins and ends within it. Ways whose single step
takes the link more than MAX_STEP_S are not run: their speed is computed from the bytes that they send, and marked.

Loss: everyone trains once over the same samples of a fixed random Markov source, from the same weights, and is
evaluated on samples held out, with several seeds. The link does not change what they compute, so its limit is lifted
for this; except for those who choose by it. Bytes are those that a host's interface has sent in this run, headers
included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from bench.far_apart import (
    CADENCE,
    DDP,
    DILOCO,
    FP16,
    GRADIENTS,
    INT4,
    NO_TALK,
    NO_TALK_OURS,
    OVERHEAD_TARGET,
    PEERS,
    SLOW_LINK,
    SYNCHRONOUS,
    WAYS,
    Task,
    final_loss,
    missing_torchft,
    rank_of_environment,
    timed_loop,
)
from bench.harness import Contestant, Result, Unavailable, alternate, isolated
from bench.namespaces import Link, missing_slow_link, slow_link
from bench.workers import gloo_group, run_workers

if TYPE_CHECKING:
    from paceline import StepRecord

WARMUP_STEPS = 3  # first allocations, DDP's second bucket layout, PowerSGD's start
SYNCHRONOUS_STEPS = 2  # in a turn; each waits for the link
CALIBRATION_STEPS = 3  # until the cadence has found its level
MAX_STEP_S = 5.0
PROBE_BYTES = 128 << 10  # at 1 Mbit/s a second

OURS = SLOW_LINK
# The choice depends on the link.
CHOOSING = (CADENCE, SLOW_LINK)


def link_mbit_per_s() -> float:
    """What this worker can send to the next one while it receives as much from the one before."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    outgoing, incoming = torch.zeros(2, PROBE_BYTES, dtype=torch.uint8)

    def exchange() -> None:
        # The receiving first: Gloo tells the other side that it may send, and would do so behind our own bytes.
        received = distributed.irecv(incoming, (rank - 1) % size)
        sent = distributed.isend(outgoing, (rank + 1) % size)
        for pending in (received, sent):
            assert pending is not None
            pending.wait()

    distributed.barrier()
    exchange()  # uses up what may pass at once
    num_rounds, start = 8, time.perf_counter()
    for _ in range(num_rounds):  # without a pause, in which the limit would allow another burst
        exchange()
    return 8e-6 * PROBE_BYTES * num_rounds / (time.perf_counter() - start)


@dataclass(frozen=True)
class CadenceStep:
    """Shares and times by rank. A worker's `sync_s` is that of the step before: it can only tell afterwards."""

    shares: tuple[int, ...]
    micro_batch_s: tuple[float, ...]
    sync_s: tuple[float, ...]

    @classmethod
    def of(cls, record: StepRecord) -> CadenceStep:
        timings = record.timings
        return cls(record.shares, tuple(t.micro_batch for t in timings), tuple(t.sync for t in timings))


def overhead_of(steps: Sequence[CadenceStep]) -> float:
    """Time in exchanges over the compute time of the slowest worker; of the last step the exchange is not known."""
    pairs = list(itertools.pairwise(steps))
    # Who comes last to an exchange waits for nobody: its time is what the exchange itself takes.
    sync_s = sum(min(after.sync_s) for _, after in pairs)
    compute_s = sum(max(n * s for n, s in zip(step.shares, step.micro_batch_s, strict=True)) for step, _ in pairs)
    return sync_s / compute_s


def turns_of(task: Task, name: str) -> tuple[int, int]:
    """Steps before the first turn, and in a turn."""
    if name in SYNCHRONOUS:
        return WARMUP_STEPS, SYNCHRONOUS_STEPS
    if name == CADENCE:
        return CALIBRATION_STEPS, 1
    return task.every + task.every // 2, task.every


@dataclass
class Seen:
    """What a way of ours has told about itself."""

    cadence: list[CadenceStep] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)

    def see(self, name: str, told: Any) -> None:
        if name == CADENCE and hasattr(told, "timings"):
            self.cadence.append(CadenceStep.of(told))
        if getattr(told, "name", "") == "averaging":
            self.choice.update(told.details)


def contestant(task: Task, name: str, seen: Seen) -> Contestant:
    """Samples per second over a turn, started together with the other workers."""
    loop = timed_loop(task, name, partial(seen.see, name))

    def measure(num_steps: int) -> float:
        distributed.barrier()
        start = time.perf_counter()
        num_samples = sum(itertools.islice(loop, num_steps))
        return num_samples / (time.perf_counter() - start)

    num_untimed, num_steps = turns_of(task, name)
    measure(num_untimed)
    if name == SLOW_LINK:  # a round of what it has chosen
        num_steps = max(num_steps, int(seen.choice.get("every", 0)))
        measure(num_steps // 2)
    return partial(measure, num_steps)


@dataclass(frozen=True)
class Measured:
    """One worker's view. Its turns in samples/s are of its own samples with `NO_TALK`, else of everybody's.

    Losses and bytes per sample are lists by seed.
    """

    link_mbit_per_s: float
    turns: dict[str, list[float]]
    seen: Seen
    losses: dict[str, list[float]]
    sent: dict[str, list[float]]


def set_limit(link: Link, mbit: float | None) -> None:
    distributed.barrier()
    if distributed.get_rank() == 0:
        link.limit(mbit)
    distributed.barrier()


def lift_limit(link: Link) -> None:
    set_limit(link, None)


def worker(link: Link, task: Task, ways: Sequence[str], num_seeds: int, parts: Sequence[str]) -> Measured:
    link.join(rank_of_environment())
    with gloo_group():
        found = Measured(link_mbit_per_s(), {}, Seen(), {}, {})
        if "speed" in parts:
            run = [name for name in ways if step_s_of_link(task, name) <= MAX_STEP_S]
            contestants = {name: isolated(partial(contestant, task, name, found.seen)) for name in run}
            found.turns.update(alternate(contestants, task.num_turns))
            contestants.clear()  # the loops end here, while the group they talk over is still there
        if "loss" in parts:
            measure_losses(found, task, [name for name in ways if name in CHOOSING], num_seeds)
            lift_limit(link)
            measure_losses(found, task, [name for name in ways if name not in CHOOSING], num_seeds)
        return found


def measure_losses(found: Measured, task: Task, ways: Sequence[str], num_seeds: int) -> None:
    for name in ways:
        for seed in range(num_seeds):
            loss, sent = final_loss(replace(task, seed=seed), name, partial(found.seen.see, name))
            found.losses.setdefault(name, []).append(loss)
            found.sent.setdefault(name, []).append(sent)


def step_s_of_link(task: Task, name: str) -> float:
    """How long the link takes at least for a step that exchanges all gradients; 0 for other ways."""
    bytes_per_parameter = {DDP: 4, GRADIENTS: 4, FP16: 2}.get(name, 0)
    ring = 2 * (task.num_hosts - 1) / task.num_hosts
    return 8e-6 * ring * bytes_per_parameter * task.num_parameters / task.mbit


def samples_per_s(name: str, values: Sequence[float]) -> float:
    """Of all workers, from what each one measured in the same turn."""
    if name == NO_TALK_OURS:  # each value counts everybody's samples by this worker's clock, and nobody waits
        return statistics.fmean(values)
    return sum(values) if name == NO_TALK else min(values)


def contest(task: Task, ways: Sequence[str], num_seeds: int, parts: Sequence[str]) -> dict[str, Any]:
    """One scenario: for every way its speed, bytes and losses, each with all single measurements."""
    with slow_link(task.mbit, task.num_hosts) as link:
        by_rank: list[Measured] = run_workers(worker, task.num_hosts, link, task, ways, num_seeds, parts)
    turns = {
        name: [samples_per_s(name, values) for values in zip(*(own.turns[name] for own in by_rank), strict=True)]
        for name in by_rank[0].turns
    }
    first = by_rank[0]
    return {
        "settings": task.settings(),
        "link_mbit_per_s": [own.link_mbit_per_s for own in by_rank],
        "turns": turns,
        # Who trained together ended with one loss; those who never talked, each with its own.
        "losses": {name: by_seed([own.losses[name] for own in by_rank]) for name in first.losses},
        "bytes_per_sample": {name: by_seed([own.sent[name] for own in by_rank]) for name in first.sent},
        "choice": first.seen.choice,
        "cadence_overhead": overhead_of(steps) if len(steps := first.seen.cadence[CALIBRATION_STEPS:]) > 1 else None,
    }


def by_seed(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*by_rank, strict=True)]


@dataclass(frozen=True)
class Row:
    """One way in one scenario. A number is None where it was not measured. computed: by the link and its bytes."""

    name: str
    speed: float | None  # over workers that never talk
    is_computed: bool
    fewer_bytes: float | None  # how many times fewer than DDP's
    loss: float | None  # over synchronous training's, mean of the seeds
    least_loss: float | None
    largest_loss: float | None


def rows_of(scenario: Mapping[str, Any]) -> list[Row]:
    turns, losses, sent = scenario["turns"], scenario["losses"], scenario["bytes_per_sample"]
    never_talking = [turns[name] for name in (NO_TALK, NO_TALK_OURS) if name in turns]
    limits = [max(values) for values in zip(*never_talking, strict=True)]
    rows = []
    for name in dict.fromkeys([*turns, *losses]):
        speed: float | None = None
        is_computed = False
        if name in turns and limits:
            speed = statistics.median(own / limit for own, limit in zip(turns[name], limits, strict=True))
        elif name in sent and limits and name in SYNCHRONOUS:
            link_samples_per_s = 1e6 * scenario["settings"]["mbit"] / 8 / statistics.fmean(sent[name])
            speed, is_computed = link_samples_per_s / statistics.median(limits), True
        ratios = [own / base for own, base in zip(losses.get(name, ()), losses.get(GRADIENTS, ()), strict=False)]
        is_talking = name in sent and DDP in sent and name not in (NO_TALK, NO_TALK_OURS)
        fewer = statistics.fmean(sent[DDP]) / statistics.fmean(sent[name]) if is_talking else None
        least, largest = (min(ratios), max(ratios)) if ratios else (None, None)
        mean = statistics.fmean(ratios) if ratios else None
        rows.append(Row(name, speed, is_computed, fewer, mean, least, largest))
    return rows


def table_of(scenario: Mapping[str, Any]) -> list[str]:
    settings = scenario["settings"]
    head = (
        f"{settings['mbit']:g} Mbit/s, {settings['num_hosts']} hosts, {settings['parameters'] / 1e6:.2f}M parameters; "
        f"measured {' '.join(f'{speed:.3g}' for speed in scenario['link_mbit_per_s'])} Mbit/s at the same time"
    )
    lines = [head, f"{'':<28} {'/ no talk':>10} {'fewer bytes':>12} {'loss / synchronous':>20}   of seeds"]
    for row in rows_of(scenario):
        speed = "" if row.speed is None else f"{row.speed:.3f}{'*' if row.is_computed else ' '}"
        fewer = "" if row.fewer_bytes is None else f"{row.fewer_bytes:.1f}"
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        seeds = "" if row.loss is None else f"{row.least_loss:.4f} to {row.largest_loss:.4f}"
        lines.append(f"{row.name:<28} {speed:>10} {fewer:>12} {loss:>20}   {seeds}")
    if any(row.is_computed for row in rows_of(scenario)):
        lines.append("* computed: its bytes over the link's speed")
    if scenario["choice"]:
        lines.append(f"slow link: {scenario['choice']['reason']}")
    if scenario["cadence_overhead"] is not None:
        lines.append(f"cadence: overhead {scenario['cadence_overhead']:.3f}, target {OVERHEAD_TARGET}")
    return lines


def result_of(scenarios: Sequence[dict[str, Any]], skipped: Mapping[str, str]) -> Result:
    """The first scenario is the headline, by its speeds, or by its losses where no speeds were asked for."""
    first = scenarios[0]
    by_speed = bool(first["turns"])
    measurements: Mapping[str, list[float]] = first["turns"] if by_speed else first["losses"]
    ours, limit = OURS if OURS in measurements else INT4, NO_TALK if by_speed else GRADIENTS
    if missing := {ours, limit} - measurements.keys():
        raise Unavailable(f"nothing to compare: add {' and '.join(sorted(missing))} to --ways")
    result = Result.of(
        "slowlink",
        "samples/s" if by_speed else "loss",
        measurements,
        ours=ours,
        limit=limit,
        better="higher" if by_speed else "lower",
        settings=first["settings"],
        packages=["torchft"] if not skipped else [],
        skipped=skipped,
        not_peers=tuple(name for name in WAYS if name not in PEERS),
    )
    result.detail["scenarios"] = [{**each, "rows": [asdict(row) for row in rows_of(each)]} for each in scenarios]
    for scenario in scenarios:
        result.detail["notes"] += ["", *table_of(scenario)]
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 10, 1], help="of the links (default: 100 10 1)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3], help="number of hosts (default: 2 3)")
    parser.add_argument(
        "--width", type=int, nargs="+", default=[128, 512], help="of the transformers (default: 128 512)"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the transformers (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--every", type=int, default=32, help="steps between averages (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8160, help="to train on for the loss (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="alternations (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each loss (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument(
        "--parts", nargs="+", choices=["speed", "loss"], default=["speed", "loss"], help="what to measure"
    )
    parser.add_argument("--quick", action="store_true", help="only show that it runs: a tiny model, few samples")


def tasks_of(options: argparse.Namespace) -> list[Task]:
    if options.quick:
        return [Task(100.0, 32, 1, micro_batch=4, every=8, num_samples=384, num_turns=2, num_hosts=n) for n in (2, 3)]
    return [
        Task(
            mbit,
            width,
            options.layers,
            options.micro_batch,
            options.every,
            options.samples - options.samples % (hosts * options.micro_batch),
            options.turns,
            hosts,
        )
        for width in options.width
        for hosts in options.hosts
        for mbit in options.mbit
    ]


def run(options: argparse.Namespace) -> Result:
    tasks = tasks_of(options)
    if reason := missing_slow_link():
        raise Unavailable(reason)
    reason = missing_torchft()
    skipped = {} if reason is None else {DILOCO: reason}
    ways = [name for name in options.ways or WAYS if name not in skipped]
    num_seeds = 1 if options.quick else options.seeds
    return result_of([contest(task, ways, num_seeds, options.parts) for task in tasks], skipped)
