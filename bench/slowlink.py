"""Samples per second on slow links, the bytes sent, and the loss that each way of training together ends with.

Network namespaces are hosts with one worker each, two or three of them, and 100, 10 or 1 Mbit/s in each direction
between them. The limit is workers that never talk: each trains on its part by itself, their rates summed. There are two
of them, a bare loop and our own with a first average that is never reached, and the faster one counts.
Everyone who trains together has the same model, micro-batches, optimizer and global batch; only with a cadence the
batch is what the link makes it.

Speed needs a quiet machine. Where it has fewer cores than there are hosts, each host has a quota, an equal part of
them. Ways whose turn takes the link too long are not run: their speed is computed from the bytes that they send, and
marked. Bytes are those that a host's interface has sent in the turns, headers included.

Loss: everyone trains once over the same samples, from the same weights, and is evaluated on samples held out, with
several seeds. Neither the link nor the load of the machine changes what they compute, so that there are no links, the
machine may be busy, several runs may take place at once, and a GPU may be shared by all workers.

With --results, measurements are kept in a file, and only what it lacks is measured. With --minutes a call ends early,
and another one goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import distributed

from bench.cpu_quota import cpu_quota, missing_cpu_quota
from bench.far_apart import SOURCES, Task
from bench.far_apart_ways import (
    CADENCE,
    DILOCO,
    GRADIENTS,
    NO_TALK,
    NO_TALK_OURS,
    PEERS,
    SLOW_LINK,
    SPEED_REPEATS,
    WAYS,
    final_loss,
    missing_torchft,
)
from bench.harness import Result, Unavailable, isolated
from bench.namespaces import missing_slow_link, slow_link
from bench.slowlink_speed import Speeds, is_timed, speed_worker
from bench.slowlink_table import Loss, Scenario, Speed, scenarios_of
from bench.workers import gloo_group, results_of, run_workers, working


class Results:
    """Measurements, also in a file if one is given: one line of JSON for each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.losses: list[Loss] = []
        self.speeds: list[Speed] = []
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                fields["task"] = Task(**fields["task"])
                if "loss" in fields:
                    self.losses.append(Loss(**fields))
                else:
                    lists = {name: tuple(fields[name]) for name in ("turns", "link_mbit_per_s")}
                    self.speeds.append(Speed(**{**fields, **lists}))

    def add(self, measured: Loss | Speed) -> None:
        if isinstance(measured, Loss):
            self.losses.append(measured)
        else:
            self.speeds.append(measured)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")


# Loss


def loss_worker(jobs: Sequence[tuple[Task, str]], device: str, until_s: float) -> list[float]:
    """The losses of as many jobs as begin before `until_s`, of all workers' clock."""
    found: list[float] = []
    with gloo_group():
        for task, way in jobs:
            is_over = torch.tensor([time.monotonic() > until_s])
            distributed.broadcast(is_over, 0)
            if is_over.item():
                break
            found.append(isolated(partial(partial, final_loss, task, way, device))())
    return found


def measure_losses(
    results: Results, tasks: Sequence[Task], ways: Sequence[str], options: argparse.Namespace, until_s: float
) -> None:
    """Several runs at once, in chains of jobs that have the same workers."""
    known = {(each.task, each.way) for each in results.losses}
    jobs: dict[int, list[tuple[Task, str]]] = {}
    for seed, task, way in itertools.product(options.seeds, tasks, ways):
        job = (replace(task, seed=seed), way)
        if job not in known and way not in (NO_TALK_OURS, CADENCE):
            jobs.setdefault(task.num_hosts, []).append(job)
    total = sum(map(len, jobs.values()))
    chains: list[tuple[int, list[tuple[Task, str]]]] = []
    for num_hosts, own in jobs.items():
        num_chains = max(1, round(options.at_once * len(own) / total))
        chains += [(num_hosts, own[number::num_chains]) for number in range(num_chains)]
    with ExitStack() as stack:
        groups = [
            stack.enter_context(working(loss_worker, num_hosts, own, options.device, until_s))
            for num_hosts, own in chains
        ]
        for (_, own), workers in zip(chains, groups, strict=True):
            for (task, way), *losses in zip(own, *results_of(workers), strict=False):
                # Who trained together ended with one loss; those who never talked, each with its own.
                results.add(Loss(task, way, statistics.fmean(losses)))


# Speed


def measure_speeds(
    results: Results, task: Task, mbits: Sequence[float], ways: Sequence[str], num_turns: int, num_steps: int
) -> None:
    never = [(way, None) for way in (NO_TALK, NO_TALK_OURS)]
    pairs = [(way, mbit) for mbit in mbits for way in ways if way not in (NO_TALK, NO_TALK_OURS)]
    turns = [*never, *(pair for pair in pairs if is_timed(task, *pair, num_steps))]
    with ExitStack() as stack:
        link = stack.enter_context(slow_link(None, task.num_hosts))
        quotas = [stack.enter_context(cpu_quota(cores)) for cores in quotas_of(task.num_hosts)]
        by_rank: list[Speeds] = run_workers(
            speed_worker, task.num_hosts, link, quotas, task, turns, num_turns, num_steps
        )
    first, session = by_rank[0], secrets.token_hex(4)
    for way, mbit in turns:
        values = zip(*(own.turns[way, mbit] for own in by_rank), strict=True)
        results.add(
            Speed(
                task,
                way,
                mbit,
                session,
                tuple(samples_per_s(way, each) for each in values),
                () if mbit is None else tuple(own.link_mbit_per_s[mbit] for own in by_rank),
                first.choices.get(mbit) if way == SLOW_LINK else None,
                first.cadence_overheads.get(mbit),
                statistics.fmean(own.bytes_per_sample[way, mbit] for own in by_rank),
            )
        )


def quotas_of(num_hosts: int) -> list[float]:
    """Cores for each host where there are fewer cores than hosts, with a little left for the rest; else nothing.

    Without quotas hosts would differ from moment to moment and wait for each other.
    """
    num_cores = os.cpu_count() or 1
    return [0.97 * num_cores / num_hosts] * num_hosts if num_cores < num_hosts else []


def samples_per_s(name: str, values: Sequence[float]) -> float:
    """Of all workers, from what each one measured in the same turn.

    Except with `NO_TALK` each value counts everybody's samples by one worker's clock. Their mean, as workers that
    overlap exchanges with training need not begin and end a turn together.
    """
    return sum(values) if name == NO_TALK else statistics.fmean(values)


# The benchmark


def result_of(scenarios: Sequence[Scenario], skipped: dict[str, str]) -> Result:
    """The first scenario is the headline, by its speeds, or by its losses where no speeds were measured."""
    first = scenarios[0]
    by_speed = first.speed_of(NO_TALK) is not None
    measurements: dict[str, Sequence[float]]
    if by_speed:
        newest = (first.speed_of(SLOW_LINK) or first.speeds[0]).session
        measurements = {each.way: each.turns for each in first.speeds if each.session == newest}
    else:
        measurements = {way: [each.loss for each in own.values()] for way in WAYS if (own := first.losses_of(way))}
    limit = NO_TALK if by_speed else GRADIENTS
    ours = next((way for way in (SLOW_LINK, *reversed(WAYS)) if way in measurements and way != limit), limit)
    if limit not in measurements:
        raise Unavailable(f"nothing to compare: add {limit!r} to --ways")
    result = Result.of(
        "slowlink",
        "samples/s" if by_speed else "loss",
        measurements,
        ours=ours,
        limit=limit,
        better="higher" if by_speed else "lower",
        settings={**first.task.settings(), "mbit": first.mbit},
        packages=["torchft"] if not skipped else [],
        skipped=skipped,
        not_peers=tuple(name for name in WAYS if name not in PEERS),
        is_paired=by_speed,
    )
    result.detail["scenarios"] = [each.fields() for each in scenarios]
    for scenario in scenarios:
        result.detail["notes"] += ["", *scenario.table()]
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 10, 1], help="of the links (default: 100 10 1)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3], help="number of hosts (default: 2 3)")
    parser.add_argument("--source", choices=SOURCES, default="markov", help="what is learnt (default: %(default)s)")
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512], help="of the models (default: 128 512)")
    parser.add_argument("--layers", type=int, default=4, help="of the models (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a micro-batch (default: %(default)s)")
    parser.add_argument("--every", type=int, default=32, help="steps between averages (default: %(default)s)")
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[8160, 6144],
        help="to train on for the loss, for each width (default: 8160 6144)",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=3, help="alternations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="timed in a turn, about (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and order (default: 0 1 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for the loss (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="runs for the loss at once (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--parts", nargs="*", choices=["speed", "loss"], default=["speed", "loss"], help="to measure")
    parser.add_argument("--results", type=Path, help="a file that keeps measurements")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no measurement later than this")
    parser.add_argument("--quick", action="store_true", help="only show that it runs: a tiny model, few samples")


def tasks_of(options: argparse.Namespace) -> Iterator[Task]:
    samples = options.samples * len(options.width) if len(options.samples) == 1 else options.samples
    if len(samples) < len(options.width):
        raise ValueError(f"samples={options.samples} for {len(options.width)} widths: give one number, or one for each")
    for width, num_samples in zip(options.width, samples, strict=False):
        for hosts in options.hosts:
            yield Task(
                options.source,
                width,
                options.layers,
                options.micro_batch,
                options.every,
                num_samples - num_samples % (hosts * options.micro_batch),
                hosts,
            )


def check(options: argparse.Namespace, tasks: Sequence[Task]) -> None:
    if not min(options.mbit) > 0:
        raise ValueError(f"mbit={min(options.mbit)} lets nothing pass: choose mbit > 0")
    if "speed" not in options.parts:
        return
    if options.turns < 2:  # a step of the cadence tells what the exchange before it took
        raise ValueError(f"turns={options.turns} cannot tell what a cadence costs: choose turns >= 2")
    for task in tasks:
        num_steps = len(options.mbit) * (options.turns + 1) * 2 * max(options.steps, task.every)
        if task.num_samples * SPEED_REPEATS < num_steps * task.global_batch:
            raise ValueError(
                f"samples={task.num_samples} are too few for turns={options.turns} of {options.steps} steps: choose at "
                f"least {-(-num_steps * task.global_batch // SPEED_REPEATS)}, or fewer turns"
            )


def run(options: argparse.Namespace) -> Result:
    if options.quick:
        options.width, options.layers, options.micro_batch, options.every = [32], 1, 4, 8
        options.samples, options.turns, options.steps, options.seeds, options.mbit = [384], 2, 8, [0], [100.0]
    tasks = list(tasks_of(options))
    check(options, tasks)
    if "speed" in options.parts:
        has_quotas = any(map(quotas_of, options.hosts))
        if reason := missing_slow_link() or (missing_cpu_quota() if has_quotas else None):
            raise Unavailable(reason)
    reason = missing_torchft()
    skipped = {} if reason is None else {DILOCO: reason}
    ways = [name for name in options.ways or WAYS if name not in skipped]
    results, until_s = Results(options.results), time.monotonic() + 60 * options.minutes
    if "loss" in options.parts:
        measure_losses(results, tasks, ways, options, until_s)
    if "speed" in options.parts:
        for task in tasks:
            if time.monotonic() < until_s:
                measure_speeds(results, task, options.mbit, ways, options.turns, options.steps)
    return result_of(scenarios_of(tasks, options.mbit, results.speeds, results.losses), skipped)
