"""`paceline plan --simulate`: a long run of many workers, simulated."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.cli import commands as cli
from paceline.observe import formats
from paceline.plan.predict import predict
from paceline.run.simulation import Event, Scenario, Simulation

if TYPE_CHECKING:
    from paceline.cli.plan.command import Situation


def simulate(options: argparse.Namespace, situation: Situation) -> int:
    devices = [device for kind in situation.kinds for device in kind.devices(kind.count)]
    trace = [] if options.trace is None else _read_trace(options.trace)
    scenario = Scenario(options.simulate, options.noise, options.failures, options.replace_after, trace, options.seed)
    start = perf_counter()
    expected = predict(situation.workload, devices, situation.hardware)
    outcome = Simulation(situation.workload, devices, scenario, situation.hardware).run()
    values = outcome.to_dict() | {
        "predicted_samples_per_s": expected.samples_per_s,
        "of_predicted": outcome.samples_per_s / expected.samples_per_s,
        "took_s": perf_counter() - start,
    }
    if options.json:
        cli.print_json(values)
        return 0
    speed = (
        f"{formats.rate(outcome.samples_per_s)} samples/s, {values['of_predicted']:.1%} of what all workers would do"
    )
    end = "" if outcome.seconds >= options.simulate else "; then no worker was left"
    recovery = "-"
    if outcome.recoveries_s:
        recovery = f"{values['recovery_s']:.1f} s after a death, at most {values['longest_recovery_s']:.1f} s"
    cli.print_fields(
        {
            "workers": f"{outcome.num_workers}, at least {values['least_workers']} at a time",
            "simulated": f"{formats.duration(outcome.seconds)}, {cli.count(outcome.steps, 'step')}{end}",
            "speed": speed,
            "wasted": f"{values['wasted']:.2%} of the compute time, in steps that were repeated",
            "changes": f"{cli.count(outcome.deaths, 'death')}, {outcome.leaves} left, {outcome.joins} joined",
            "full speed": recovery,
            "shares": f"{values['least_share']} to {values['largest_share']} micro-batches per step",
        }
    )
    return 0


def _read_trace(path: Path) -> list[Event]:
    events: list[Event] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            at_s, worker, what = float(values["at_s"]), int(values["worker"]), values["event"]
            if not 0 <= at_s < math.inf:
                raise ValueError(f"at_s={at_s}")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f'{path}, line {number}: {error!r}; an event is {{"at_s": 60, "worker": 3, "event": "leave"}}'
            ) from None
        if what not in ("die", "leave", "join"):
            raise ValueError(f"{path}, line {number}: event={what!r}: choose die, leave or join")
        events.append((at_s, worker, what))
    return events
