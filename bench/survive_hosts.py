"""The part of `bench survive` with two hosts: seconds from the cut of their link to the surviving host's next step.

Two network namespaces are two hosts, of two workers and of one, under `paceline run --nodes 1:2`. The first one keeps
the store, so it goes on; the other one is started again once the link is back, and joins.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from pathlib import Path

from bench import survive_worker
from bench.harness import Result
from bench.namespaces import ADDRESSES, INTERFACE, PORT, Link, slow_link
from bench.parts import Goal
from bench.survive import OURS, Command, Losses, lost, note, p90, run_folder, running
from bench.survive_log import Cost
from bench.survive_worker import ENDLESS, TASKS

PART = "two hosts"
GOAL = Goal("median of seconds, at most", lambda result: result.ours, 2.0, is_upper=True)
MODEL, WORKERS, MBIT = "mlp", (2, 1), 1000.0
REPOSITORY = Path(__file__).parents[1]


def command(link: Link, host: int, folder: Path) -> Command:
    where = ("ip", "netns", "exec", link.namespaces[host])
    nodes = ("--nodes", "1:2", "--address", f"{ADDRESSES[0]}:{PORT}", "--min-workers", "1")
    workers = ("--workers", str(WORKERS[host]), "--max-restarts", str(ENDLESS))
    script = (str(survive_worker.__file__), "paceline-worker", str(folder), MODEL, "cpu")
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(REPOSITORY)}  # the script's folder is bench/ itself
    own = Command.python("-m", "paceline", "run", *nodes, *workers, *script, **variables)
    return Command([*where, *own.words], own.environment)


def set_link(link: Link, state: str) -> None:
    subprocess.run(["ip", "-netns", link.namespaces[0], "link", "set", INTERFACE, state], check=True)


def cut_links(num_cuts: int, source: random.Random) -> list[Cost]:
    with slow_link(MBIT) as link, run_folder() as folder, running([command(link, 0, folder)], folder) as first:
        losses = Losses(folder, first, source)
        for _ in range(num_cuts):
            with running([command(link, 1, folder)], folder):
                losses.lose(lambda _: set_link(link, "down"))
            set_link(link, "up")
        return losses.costs(TASKS[MODEL].global_batch)


def measure(options: argparse.Namespace) -> Result:
    found = cut_links(options.hosts, random.Random(options.seed))
    seconds = [cost.seconds for cost in found]
    settings = {"workers": WORKERS, "cuts": options.hosts, "seed": options.seed, "model": TASKS[MODEL].model}
    unit = "seconds to the next step after a cut"
    result = Result.of(
        "survive", unit, {OURS: seconds}, ours=OURS, limit=OURS, better="lower", settings={**settings, "mbit": MBIT}
    )
    result.detail["p90"] = {OURS: p90(seconds)}
    result.detail["lost"] = {OURS: lost(found)}
    result.detail["notes"].append(note(OURS, result))
    return result
