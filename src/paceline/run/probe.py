"""Measures a run's steps for a prediction: each worker's time for a micro-batch, the exchange, and the rest."""

from __future__ import annotations

import math
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.comm.base import Communicator
from paceline.core.errors import MisuseError
from paceline.core.timing import Timing
from paceline.observe.environment import processor_name
from paceline.plan.predict import Device, Exchange, Link
from paceline.plan.profile import Profile, StepTimes, Subject
from paceline.run.evaluation.collect import gather
from paceline.run.run import Run
from paceline.run.saving.state import plain_model

# Before the measured steps of a run that has not trained yet: allocations, compilation, reading ahead, first shares.
WARMUP_STEPS = 5
# At least about this many seconds of steps are measured, so that a burst of other load does not fill all of them; but
# at most this many steps.
LEAST_S, MAX_STEPS = 1.5, 30
# A GPU's times arrive this many steps later.
GPU_LATE_STEPS = 8
# All-reduces that measure a link, and their largest size.
LINK_READINGS, MAX_LINK_BYTES = 7, 64 << 20
_CGROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def profile(run: Run, step: Callable[[Any], object], num_steps: int) -> tuple[Profile, StepTimes]:
    """Train `num_steps` steps after a warm-up, and describe this worker's machine and device.

    The profile describes rank 0's device; in a world of several workers its times include their contention, and the
    second result has the times of all workers.
    """
    if num_steps < 1:
        raise ValueError(f"steps={num_steps}: choose the number of steps to measure, such as 20")
    run.check_between_steps("profile()")
    device = run.world.device
    num_late = GPU_LATE_STEPS if device.type == "cuda" else 0
    if run.loop.last_record is None:
        _train(run, step, WARMUP_STEPS)
    run.loop.time_every_step()
    steps = _train(run, step, _enough(run, step, num_steps) + num_late)
    times = StepTimes.of([step for step in steps if any(own.micro_batch for own in step)])
    num_hosts = sum(local_rank == 0 for local_rank in gather(run.world.local_rank, run.communicator))
    cores = min(float(torch.get_num_threads()), cpu_quota()) if device.type == "cpu" else 0.0
    found = _described(run, times, cores)
    if num_hosts > 1:
        found = replace(found, link=_link(run, num_hosts, found.subject.gradient_bytes))
    elif run.world.size > 1:
        found = replace(found, exchange=Exchange.fitted(times.exchange_s, run.world.size, found.subject.gradient_bytes))
    return found, times


def _link(run: Run, num_hosts: int, gradient_bytes: int) -> Link:
    """Between the hosts of this world, from all-reduces of a step's bytes and of one number."""
    num_bytes = min(gradient_bytes, MAX_LINK_BYTES)
    own = [all_reduce_s(run.communicator, size, LINK_READINGS) for size in (0, num_bytes)]
    least_s, seconds = map(min, zip(*gather(own, run.communicator), strict=True))  # the last worker does not wait
    return Link.fitted(num_hosts, num_bytes, seconds, least_s)


def all_reduce_s(communicator: Communicator, num_bytes: int, num_readings: int) -> float:
    """How long the workers take to add up so many bytes; the lower median of some readings. A collective."""
    device = communicator.world.device
    tensor = communicator.empty(max(num_bytes // 4, 1), torch.float32, device).zero_()
    readings = []
    for _ in range(num_readings):
        start = perf_counter()
        communicator.all_reduce(tensor).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        readings.append(perf_counter() - start)
    return statistics.median_low(readings)


def _enough(run: Run, step: Callable[[Any], object], num_steps: int) -> int:
    """`num_steps`, or more if steps are short; the same on all workers."""
    start = perf_counter()
    _train(run, step, 1)
    step_s = float(max(gather(perf_counter() - start, run.communicator)))
    return max(num_steps, min(MAX_STEPS, round(LEAST_S / step_s)))


def cpu_quota() -> float:
    """The cores that the quotas of its cgroup (v1 or v2), and of those around it, allow this process; inf without."""
    try:
        groups = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return math.inf
    quotas = [math.inf]
    for _, controllers, path in groups:
        if not controllers or "cpu" in controllers.split(","):
            group = (_CGROUPS / "cpu" if controllers else _CGROUPS) / path.strip("/")
            quotas += map(_quota, (group, *group.parents))  # a container may not see the path's first folders
    return min(quotas)


def _quota(group: Path) -> float:
    try:
        if (limit := group / "cpu.max").is_file():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _train(run: Run, step: Callable[[Any], object], num_steps: int) -> list[Sequence[Timing]]:
    """The workers' timings, by step. In one loop, as in a run: leaving and entering the loop takes time."""
    loop = run.loop
    last = loop.position.step + num_steps
    readings, before = [], loop.last_record
    for epoch in run.epochs(None, last):
        for batch in epoch:
            step(batch)
            if (record := loop.last_record) is not None and record is not before:
                readings.append(record.timings)
                before = record
    if loop.position.step < last:
        raise MisuseError(f"the data ended before step {last}: profile() needs more samples, or fewer steps")
    return readings


def _described(run: Run, times: StepTimes, cores: float) -> Profile:
    config, steps, model = run.config, run.steps, plain_model(run.model)
    parameters = list(run.loop.replica.parameters.values())
    gradient_bytes = sum(p.numel() * (8 if config.exact else max(4, p.element_size())) for p in parameters)
    subject = Subject(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        gradient_bytes,
        steps.micro_batch,
        config.precision,
        config.exact,
    )
    host, rank = socket.gethostname(), run.world.rank
    at = run.world.device
    name = torch.cuda.get_device_name(at) if at.type == "cuda" else processor_name()
    device = Device(
        name, times.micro_batch_s[rank], times.rest_s[rank], times.data_s[rank], host, cores, times.spread[rank]
    )
    return Profile(
        subject,
        host,
        float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        (device,),
        num_samples=steps.num_samples if run.micro_batches_per_epoch is not None else None,
        global_batch=config.global_batch,
    )
