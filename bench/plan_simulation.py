"""Simulated runs against real ones: `python -m bench.plan_simulation`.

Two workers of which one has 40% of a core, as in `bench hetero`: simulated from what the two do alone, against what
they do together. Three workers that are killed at random, as in `bench survive`: simulated from a normal step's time,
against the seconds that a kill costs. And the seconds that simulating an hour of 1,000 workers takes. What two to four
workers do with other models, quotas and links is compared by `bench plan`, in its column "simulated".
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence

from bench import hetero
from bench.survive import Losses, commands_of, run_folder, running
from bench.survive_log import NormalSteps, WorkerNotes
from bench.survive_worker import NUM_WORKERS, TASKS
from bench.unequal import Task
from paceline.plan.predict import Device, Hardware, Host, Link, Workload, predict
from paceline.run.simulation import Outcome, Scenario, Simulation

SIMULATED_S = 600.0
PAUSE_S = 5.0  # between two simulated kills


def unequal_workers(num_turns: int, seconds: float) -> tuple[float, float]:
    """Samples per second, simulated and measured."""
    result = hetero.contest(Task(0.4, 4, 32, num_turns, seconds), [])
    devices = [
        Device(str(rank), 4 / rate, host=str(rank)) for rank, rate in enumerate(result.detail["alone_samples_per_s"])
    ]
    simulation = Simulation(Workload(32, 4, 0), devices, Scenario(SIMULATED_S), Hardware(link=Link(1e12)))
    return simulation.run().samples_per_s, result.ours


def kills(model: str, num_kills: int) -> tuple[float, float]:
    """Seconds that a kill costs beyond a normal step, simulated and measured: medians."""
    with run_folder() as folder:
        with running(commands_of("paceline", folder, model, "cpu"), folder) as processes:
            losses = Losses(folder, processes, random.Random(1))
            for _ in range(num_kills):
                losses.kill_one()
        step_s = NormalSteps([own.all() for own in WorkerNotes.of_all(folder)]).seconds(NUM_WORKERS)
        measured = [cost.seconds for cost in losses.costs(TASKS[model].global_batch)]
    return simulated_cost(model, step_s, 10 * num_kills), statistics.median(measured)


def simulated_cost(model: str, step_s: float, num_kills: int) -> float:
    task, draw = TASKS[model], random.Random(1)
    host = Host(len(os.sched_getaffinity(0)))
    crowded = max(host.slowdowns([1.0] * NUM_WORKERS))
    devices = [Device("cpu", step_s / task.num_micro_batches / crowded, cores=1.0)] * NUM_WORKERS
    hardware = Hardware({"": host})
    work = Workload(NUM_WORKERS * task.num_micro_batches, task.micro_batch, 0)
    trace = []
    for number in range(1, num_kills + 1):
        at_s, worker = number * PAUSE_S + draw.uniform(0, step_s), draw.randrange(NUM_WORKERS)
        trace += [(at_s, worker, "die"), (at_s + PAUSE_S / 2, worker, "join")]
    outcome = Simulation(work, devices, Scenario((num_kills + 1) * PAUSE_S, trace=trace), hardware).run()  # type: ignore[arg-type]
    return statistics.median(outcome.recoveries_s) - predict(work, devices[1:], hardware).step_s


def hour(num_workers: int, seconds: float) -> tuple[Outcome, float]:
    """Unequal workers, eight per machine, that die now and then and are replaced; and the seconds it takes."""
    devices = [Device("a", 0.02 if rank % 2 else 0.04, 0.005, host=str(rank // 8)) for rank in range(num_workers)]
    work = Workload(4 * num_workers, 4, 4e6)
    scenario = Scenario(seconds, failures_per_hour=0.1, replace_after_s=300.0)
    start = time.perf_counter()
    outcome = Simulation(work, devices, scenario, Hardware({"": Host()}, Link(1.2e9, 1e-5))).run()
    return outcome, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of two unequal workers (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of each model (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=1.0, help="of 1,000 workers (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.hours:
        outcome, took_s = hour(1000, 3600 * options.hours)
        text = f"1,000 workers, {outcome.steps} steps, {outcome.deaths} deaths: {options.hours:g} h in {took_s:.1f} s"
        print(f"{text}, {1e3 * took_s / outcome.steps:.2f} ms per step", flush=True)
    if options.turns:
        simulated, measured = unequal_workers(options.turns, 2.0)
        print(f"hetero, samples/s: simulated {simulated:.1f}, measured {measured:.1f}: {simulated / measured:.3f}")
    for model in TASKS if options.kills else ():
        simulated, measured = kills(model, options.kills)
        print(f"survive, {model}: simulated {simulated:.3f} s, measured {measured:.3f} s", flush=True)


if __name__ == "__main__":
    main()
