"""Seconds that the loss of a worker costs: from its SIGKILL to the end of the next completed step, beyond a normal one.

Three workers on one host train together; one of them, drawn at random, is killed at a random moment, and again once the
world is whole. The next completed step is the first that was completed without the killed worker; a normal one is the
median of the undisturbed steps of as many workers in the same run. Beside the seconds: steps that were completed twice,
steps that were dropped, and samples that were never trained.

Contestants: Paceline's survivors go on (`launch(min_workers=1)`). torchft: three replica groups of one worker, each
under its own torchrun, which restarts it; the lighthouse is started as the README of torchft says, and all timeouts
are its defaults: 5 s for heartbeats, 60 s for collectives, quorum and connections. torchrun with DDP over Gloo, and
Paceline's `launch(max_restarts=...)` without `min_workers`, restart all workers from checkpoints of every 10 steps.
Two faults of the peers, which would keep them from going on at all, are worked around, see the code: an assertion in
torchft's hook for DDP, and addresses of ended workers in the store of torchrun.
Contestants take turns, some kills at a time, each time with new processes; a worker has one intra-op thread and several
micro-batches in each step. A kill takes the peers 5 to 15 s, most of it until their world is whole again, so they may
be given fewer kills (--peer-kills). With --device cuda only Paceline runs: three workers share a GPU over Gloo.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Result, circumstances, missing_package, turn_order
from bench.namespaces import missing_slow_link
from bench.parts import Goal, Parts
from bench.survive_log import Cost, Kill, WorkerNotes, costs
from bench.survive_worker import CHECKPOINT_STEPS, ENDLESS, NUM_WORKERS, TASKS

OURS, TORCHFT, TORCHRUN, RESTART = "paceline", "torchft", "torchrun, restart", "paceline, restart"
CONTESTANTS = (OURS, TORCHFT, TORCHRUN, RESTART)
WHOLE_STEPS = 20  # that all workers have done together before one is killed, a checkpoint among them
MOMENT_S = 0.3  # within which a worker is killed after that: many steps
TIMEOUT_S = 180.0
POLL_S = 0.02  # rarely: it takes time from the workers, which note the times themselves
GRACE_S = 20.0
MEDIAN_GOAL_S, P90_GOAL_S = 0.5, 1.0
# The README's; a heartbeat is waited for 5000 ms by default.
LIGHTHOUSE = ("torchft_lighthouse", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")


@dataclass(frozen=True)
class Command:
    """A process to start, and what its environment has beside ours."""

    words: Sequence[str]
    environment: Mapping[str, str]

    @classmethod
    def python(cls, *words: str, **environment: str) -> Command:
        return cls([sys.executable, *words], environment)


def worker(program: str, folder: Path, model: str, device: str = "cpu") -> tuple[str, ...]:
    return ("-m", "bench.survive_worker", program, str(folder), model, device)


def commands_of(name: str, folder: Path, model: str, device: str) -> list[Command]:
    if name in (OURS, RESTART):
        return [Command.python(*worker("paceline" if name == OURS else "restart", folder, model, device))]
    elastic = ("-m", "torch.distributed.run", "--max-restarts", str(ENDLESS), "--nnodes", "1")
    if name == TORCHRUN:
        number = ("--standalone", "--nproc-per-node", str(NUM_WORKERS))
        # Otherwise restarted workers of torch 2.13 find the addresses of those before them in the store, and hang.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [Command.python(*elastic, *number, *worker("torchrun", folder, model), **own_store)]
    ports = free_ports(1 + NUM_WORKERS)
    program = Path(sys.executable).with_name(LIGHTHOUSE[0])
    lighthouse = Command([str(program), *LIGHTHOUSE[1:], "--bind", f"0.0.0.0:{ports[0]}"], {"RUST_BACKTRACE": "1"})
    groups = [
        Command.python(
            *(*elastic, "--nproc-per-node", "1", "--master-port", str(port), *worker("torchft", folder, model)),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{ports[0]}",
            REPLICA_GROUP_ID=str(group),
            NUM_REPLICA_GROUPS=str(NUM_WORKERS),
        )
        for group, port in enumerate(ports[1:])
    ]
    return [lighthouse, *groups]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(commands: Sequence[Command], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, which are gone after the block, and their workers with them."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "stderr").open("ab") as stderr:
            for command in commands:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **command.environment}
                processes.append(
                    subprocess.Popen(
                        command.words,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes[::-1]:  # the lighthouse last
            process.terminate()  # a launcher takes its workers along
        for process in processes[::-1]:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def run_folder() -> Iterator[Path]:
    """Where the workers of a run leave their notes; at its end none of them is left."""
    with tempfile.TemporaryDirectory(prefix="bench-survive-") as path:
        try:
            yield Path(path)
        finally:
            for notes in WorkerNotes.of_all(Path(path)):
                if notes.is_alive:
                    os.kill(notes.pid, signal.SIGKILL)


class Losses:
    """Kills workers of one run, one after the other."""

    def __init__(self, folder: Path, processes: Sequence[subprocess.Popen[bytes]], source: random.Random) -> None:
        self._folder = folder
        self._processes = processes
        self._random = source
        self.kills: list[Kill] = []

    def wait_until_whole(self) -> None:
        self._wait_for(lambda: len(self._together()) == NUM_WORKERS, f"{NUM_WORKERS} workers that train together")

    def kill_one(self) -> None:
        self.lose(lambda victim: os.kill(victim.pid, signal.SIGKILL))

    def lose(self, how: Callable[[WorkerNotes], object]) -> None:
        """Lose a random worker after a random time; returns when a step was completed without it."""
        self.wait_until_whole()
        time.sleep(self._random.uniform(0, MOMENT_S))
        victim = self._random.choice(self._together() or WorkerNotes.of_all(self._folder))
        last = victim.from_end(1)
        assert last is not None
        kill = Kill(time.monotonic(), last.world)
        how(victim)
        self.kills.append(kill)
        self._wait_for(lambda: self._has_step_after(kill), "a step after a kill")

    def costs(self, global_batch: int) -> list[Cost]:
        return costs(self.kills, [own.all() for own in WorkerNotes.of_all(self._folder)], global_batch)

    def _together(self) -> list[WorkerNotes]:
        """The workers that have done some steps in the newest world, if that is whole."""
        found = []
        for own in WorkerNotes.of_all(self._folder):
            first, last = own.from_end(WHOLE_STEPS), own.from_end(1)
            if first and last and first.world == last.world and last.size == NUM_WORKERS and own.is_alive:
                found.append((last.world, own))
        newest = max((world for world, _ in found), default=0)
        return [own for world, own in found if world == newest]

    def _has_step_after(self, kill: Kill) -> bool:
        last = [own.from_end(1) for own in WorkerNotes.of_all(self._folder)]
        return any(n is not None and n.completed and n.world > kill.world for n in last)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                reason = f"{ended} ended" if ended else f"there was none in {TIMEOUT_S:g} s"
                tail = (self._folder / "stderr").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"waiting for {what}: {reason}\n{tail}")
            time.sleep(POLL_S)


def lose_workers(name: str, model: str, num_kills: int, source: random.Random, device: str = "cpu") -> list[Cost]:
    """The costs of so many kills in one run."""
    with run_folder() as folder:
        with running(commands_of(name, folder, model, device), folder) as processes:
            losses = Losses(folder, processes, source)
            for _ in range(num_kills):
                losses.kill_one()
            losses.wait_until_whole()  # so that what was never trained is counted until then
        return losses.costs(TASKS[model].global_batch)


def p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def measure(model: str, options: argparse.Namespace) -> Result:
    skipped = {TORCHFT: reason} if (reason := missing_package("torchft")) else {}
    chosen = options.contestants if options.device == "cpu" else [OURS]
    names = [name for name in CONTESTANTS if name in chosen and name not in skipped]
    num_kills = {name: options.kills if name in (OURS, RESTART) else options.peer_kills for name in names}
    source = random.Random(options.seed)
    found: dict[str, list[Cost]] = {name: [] for name in names}
    for turn in range(-(-max(num_kills.values()) // options.at_once)):
        for name in turn_order(names, turn):
            if count := min(options.at_once, num_kills[name] - len(found[name])):
                began_s = time.monotonic()
                found[name] += lose_workers(name, model, count, source, options.device)
                progress = f"{len(found[name])} of {num_kills[name]} kills, {time.monotonic() - began_s:.0f} s"
                print(f"{model}: {name}: {progress}", file=sys.stderr, flush=True)
    task = TASKS[model]
    result = Result.of(
        "survive",
        "seconds to the next step after a kill",
        {name: [cost.seconds for cost in own] for name, own in found.items()},
        ours=OURS,
        limit=next(name for name in (TORCHFT, TORCHRUN, RESTART, OURS) if name in names),
        better="lower",
        settings={
            "workers": NUM_WORKERS,
            "device": options.device,
            "kills": num_kills,
            "seed": options.seed,
            "model": task.model,
            "global_batch": task.global_batch,
            "micro_batch": task.micro_batch,
            "micro_batches_per_worker": task.num_micro_batches,
            "optimizer": "AdamW",
            "checkpoint_steps": CHECKPOINT_STEPS,
            "threads_per_worker": 1,
            "lighthouse": " ".join(LIGHTHOUSE[1:]),
        },
        packages=["torchft"],
        skipped=skipped,
        not_peers=(RESTART,),
        is_paired=False,
    )
    result.detail["p90"] = {name: p90([cost.seconds for cost in own]) for name, own in found.items()}
    result.detail["lost"] = {name: lost(own) for name, own in found.items()}
    result.detail["notes"] += [note(name, result) for name in names]
    return result


def lost(own: Sequence[Cost]) -> dict[str, int]:
    return {
        "steps_repeated": sum(cost.num_repeated for cost in own),
        "steps_dropped": sum(cost.num_dropped for cost in own),
        "samples_untrained": sum(cost.num_untrained for cost in own),
    }


def note(name: str, result: Result) -> str:
    counts = result.detail["lost"][name]
    return (
        f"{name:<18} 90th percentile {result.detail['p90'][name]:.3f} s; {counts['steps_repeated']} steps repeated, "
        f"{counts['steps_dropped']} dropped, {counts['samples_untrained']} samples never trained"
    )


def slower_of_goals(result: Result) -> float:
    return max(result.ours / MEDIAN_GOAL_S, float(result.detail["p90"][OURS]) / P90_GOAL_S)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: Paceline alone (default: cpu)")
    parser.add_argument("--kills", type=int, default=30, help="of each contestant (default: %(default)s)")
    parser.add_argument("--peer-kills", type=int, default=30, help="of torchft and of torchrun (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=10, help="kills in a contestant's turn (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=10, help="cuts of the link of two hosts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default: %(default)s)")


def run(options: argparse.Namespace) -> Parts:
    results = {model: measure(model, options) for model in options.models}
    text = f"median over {MEDIAN_GOAL_S:g} s and 90th percentile over {P90_GOAL_S:g} s, the larger, at most"
    goals = dict.fromkeys(results, Goal(text, slower_of_goals, 1.0, is_upper=True))
    if options.hosts and (reason := missing_slow_link()):
        print(f"two hosts: skipped: {reason}", file=sys.stderr)
    elif options.hosts:
        from bench import survive_hosts

        results[survive_hosts.PART] = survive_hosts.measure(options)
        goals[survive_hosts.PART] = survive_hosts.GOAL
    settings = {"models": options.models, "kills": options.kills}
    return Parts("survive", results, goals, circumstances(settings))
