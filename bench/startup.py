"""Seconds from the call of a command until rank 0 has finished its first training step, with one worker and with two.

Everyone trains the same tiny MLP: a script under `paceline run`, a program that calls `paceline.launch`, and a script
with DDP over Gloo under torchrun, the limit. Beside them: for one worker the same step in plain PyTorch, and as many
interpreters at once as there are workers that only import torch. Rank 0 notes the system-wide monotonic clock after
its first step; the command's end is waited for, and not timed. The processor time that all processes of a start take,
its end included, is noted too: unlike the seconds it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import Result, alternate, circumstances
from bench.parts import Goal, Parts

RUN, LAUNCH, DDP, PLAIN, FLOOR = "paceline run", "paceline.launch", "torchrun + DDP", "plain PyTorch", "import torch"
TIMEOUT_S = 120.0
MAX_FAILED = 3  # starts of the peer

PRELUDE = """
import time
marks = {"interpreter": time.monotonic()}
import json, os, sys
import torch
from torch.nn import functional

def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def samples():
    return torch.randn(64, 32), torch.randint(10, (64,))

def note(marks, path):
    with open(path, "w") as file:
        json.dump(marks, file)
"""

OURS = """
import paceline as pl
marks["imports"] = time.monotonic()

def main(marks, path):
    marks["worker"] = time.monotonic()
    import paceline.run.assemble as assembling
    def connect(*arguments, connect=assembling.connect):
        communicator = connect(*arguments)
        marks["connect"] = time.monotonic()
        return communicator
    assembling.connect = connect
    with pl.Trainer.setup(build, optimizer_of, data=samples(), global_batch=32, micro_batch=16,
                          runtime=pl.Runtime(quiet=True)) as trainer:
        marks["set-up"] = time.monotonic()
        for epoch in trainer.epochs(max_steps=1):
            for batch in epoch:
                trainer.backward(functional.cross_entropy(trainer.model(batch.x), batch.y))
                trainer.step()
        marks["first step"] = time.monotonic()
        if trainer.is_main:
            note(marks, path)
"""

PROGRAMS = {
    RUN: PRELUDE + OURS + "main(marks, sys.argv[1])\n",
    LAUNCH: PRELUDE + OURS + "pl.launch(main, int(sys.argv[2]), args=(marks, sys.argv[1]))\n",
    DDP: PRELUDE
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
marks["imports"] = marks["worker"] = time.monotonic()
dist.init_process_group("gloo")
marks["connect"] = time.monotonic()
model = DistributedDataParallel(build())
optimizer = optimizer_of(model.parameters())
x, y = samples()
marks["set-up"] = time.monotonic()
mine = slice(dist.get_rank(), 32, dist.get_world_size())
functional.cross_entropy(model(x[mine]), y[mine]).backward()
optimizer.step()
marks["first step"] = time.monotonic()
if dist.get_rank() == 0:
    note(marks, sys.argv[1])
dist.destroy_process_group()
""",
    PLAIN: PRELUDE
    + """
model = build()
optimizer = optimizer_of(model.parameters())
x, y = samples()
functional.cross_entropy(model(x[:32]), y[:32]).backward()
optimizer.step()
note({"first step": time.monotonic()}, sys.argv[1])
""",
    FLOOR: "import json, sys, time, torch\njson.dump({'first step': time.monotonic()}, open(sys.argv[1], 'w'))\n",
}


def command(name: str, script: Path, num_workers: int) -> list[str]:
    """The start of the command line; the path of the mark and the number of workers follow."""
    workers = str(num_workers)
    starters = {
        RUN: ["-m", "paceline", "run", "--workers", workers],
        DDP: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers],
    }
    return [sys.executable, *starters.get(name, []), str(script)]


class StartFailed(Exception):
    """A command did not end well; the text says which."""


@dataclass
class Starts:
    """One contestant: a call starts it and returns the seconds to its mark.

    `phases` has where each start's went, `cpu_s` what all its processes worked. A start of the peer's that fails, which
    a worker of torchrun's now and then does at its end, is repeated and counted in `num_failed`; ours must not.
    """

    name: str
    num_workers: int
    folder: Path
    phases: list[dict[str, float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def __post_init__(self) -> None:
        self._script = self.folder / f"{self.name.replace(' ', '-')}.py"
        self._script.write_text(PROGRAMS[self.name])

    def __call__(self) -> float:
        while True:
            try:
                return self._start()
            except StartFailed:
                self.num_failed += 1
                if self.name != DDP or self.num_failed > MAX_FAILED:
                    raise

    def _start(self) -> float:
        num_commands = self.num_workers if self.name == FLOOR else 1
        paths = [self.folder / f"mark-{number}" for number in range(num_commands)]
        words = command(self.name, self._script, self.num_workers)
        begun_s, worked_s = time.monotonic(), _children_s()
        with ExitStack() as stack:
            started = [stack.enter_context(_started([*words, str(path), str(self.num_workers)])) for path in paths]
            for process in started:
                if process.wait(TIMEOUT_S) != 0:
                    raise StartFailed(f"{self.name} ended with {process.returncode}: {' '.join(words)}")
        marks = [json.loads(path.read_text()) for path in paths]
        last = max(marks, key=lambda own: float(own["first step"]))
        self.phases.append(phases_of(begun_s, last))
        self.cpu_s.append(_children_s() - worked_s)
        return float(last["first step"]) - begun_s


def _children_s() -> float:
    """What the processes that this one has started and seen end have worked, and theirs in turn."""
    times = os.times()
    return times.children_user + times.children_system


@contextmanager
def _started(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone after the block, also after an error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # not killed: a launcher takes its workers along
            process.wait()


def phases_of(begun_s: float, marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds up to each mark since the one before it, the first since the call."""
    times_s = [begun_s, *marks.values()]
    return {name: after - before for name, (before, after) in zip(marks, itertools.pairwise(times_s), strict=True)}


def profile(starts: Sequence[Starts]) -> str:
    """Where the time went, by contestant: the medians of the phases."""
    names = list(starts[0].phases[0])
    lines = ["".join([f"{'':<18}", *(f"{name:>13}" for name in names)])]
    for own in starts:
        medians = [statistics.median(phases[name] for phases in own.phases) for name in names]
        lines.append("".join([f"{own.name:<18}", *(f"{value:>13.3f}" for value in medians)]))
    return "\n".join(lines)


def measure(num_workers: int, num_turns: int, *, with_profile: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        names = [name for name in PROGRAMS if name != PLAIN or num_workers == 1]
        contestants = {name: Starts(name, num_workers, Path(folder)) for name in names}
        for own in contestants.values():
            own()  # compiled bytecode and a warm file cache
            own.phases.clear()
            own.cpu_s.clear()
        measured = alternate(contestants, num_turns)
    if with_profile:
        print(
            f"workers: {num_workers}; seconds up to each mark\n{profile([contestants[n] for n in (RUN, LAUNCH, DDP)])}",
            file=sys.stderr,
        )
    result = Result.of(
        "startup",
        "seconds to the first step",
        measured,
        ours=RUN,
        limit=DDP,
        better="lower",
        settings={"workers": num_workers, "model": "32-64-10", "optimizer": "SGD", "threads_per_worker": 1},
        not_peers=(LAUNCH, PLAIN, FLOOR),
    )
    cpu_s = {name: statistics.median(own.cpu_s) for name, own in contestants.items()}
    result.detail["cpu_s"] = cpu_s
    result.detail["notes"].append(
        "processor seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in cpu_s.items())
    )
    result.detail["failed"] = {name: own.num_failed for name, own in contestants.items() if own.num_failed}
    result.detail["notes"] += [f"{name}: {n} failed starts repeated" for name, n in result.detail["failed"].items()]
    return result


def slower_of_ours(result: Result) -> float:
    by_turn = result.detail["ratio_by_turn"]
    return max(float(by_turn[name]["median"]) for name in (RUN, LAUNCH))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    parser.add_argument("--turns", type=int, default=9, help="alternations (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="say on stderr where the time goes")


def run(options: argparse.Namespace) -> Parts:
    results = {
        f"{n} worker" if n == 1 else f"{n} workers": measure(n, options.turns, with_profile=options.profile)
        for n in options.workers
    }
    goal = Goal(f"seconds, by the slower of ours, over those of {DDP}, at most", slower_of_ours, 1.0, is_upper=True)
    settings = {"workers": options.workers, "turns": options.turns}
    return Parts("startup", results, dict.fromkeys(results, goal), circumstances(settings))
