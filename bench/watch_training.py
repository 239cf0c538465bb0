"""For `bench watch`: steps per second of a run beside an open page, against none.

One run of `paceline train` goes on throughout, on as many workers as there are cores. Each contestant is a set of
processes that share these cores with the workers, and that are suspended in the turns of the others. What a server and
a page missed while they were suspended they catch up with before their turn begins. Steps per second come from the
run's own metrics, so that a turn has no cost of its own. A turn is as long as the longest pause of a page between two
frames (`pace.js`), or a multiple of it: since a page draws when its turn begins, each has as many frames as it would
have without the other turns.

- Chromium shows the page, without a GPU, beside the server: everything that a page costs, on one machine.
- Chromium shows about:blank: what a browser costs whatever it shows.
- The page's requests are made and its stream of events is read: what this machine has to do for a page whose browser is
  on another machine.

The kernel's account is read beside the steps: how long the workers were ready to compute and had no core.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from bench.harness import alternate
from bench.watch_server import TIMEOUT_S, OpenPage, serving, started
from paceline.observe.json_lines import LineReader
from paceline.observe.run_files import RunFiles

WITHOUT, REQUESTS = "no browser", "the page's requests only"
BLANK, PAGE = "Chromium on about:blank", "Chromium on the page"
SETTLE_S = 2.0
WARM_UP_S = 4.0

PARTS = """
import torch
from torch.nn import functional
def data(): return torch.randn(8192, 64), torch.randint(10, (8192,))
def model():
    sizes = (64, 512, 512, 10)
    layers = [torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
def loss(model, batch): return functional.cross_entropy(model(batch.x), batch.y)
"""
PROJECT = """
model: {factory: "bench_watch_parts:model"}
data: {train: {factory: "bench_watch_parts:data"}}
loss: bench_watch_parts:loss
trainer: {max_steps: 1000000000, global_batch: 512, micro_batch: 64, learning_rate: 0.0001, log_every: 5}
"""


@dataclass
class Training:
    """By contestant, turn by turn: steps per second; how long the workers waited for a core, of the time; the cores
    that the contestant's processes used.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    delays: dict[str, list[float]] = field(default_factory=dict)
    cores: dict[str, list[float]] = field(default_factory=dict)


def measure_training(folder: Path, num_turns: int, turn_s: float) -> Training:
    """Contestants that need Chromium are left out where there is none."""
    program = shutil.which("chromium")
    with ExitStack() as stack:
        files = stack.enter_context(training(folder))
        server = stack.enter_context(serving(folder / "runs"))
        page = OpenPage(server, files.root.name)
        contestants: dict[str, list[int]] = {WITHOUT: [], REQUESTS: [server.process.pid]}
        if program is not None:
            server = stack.enter_context(serving(folder / "runs"))
            blank = stack.enter_context(chromium(program, folder / "blank", "about:blank", "about:blank"))
            address = f"{server.address}#run={files.root.name}"
            shown = stack.enter_context(chromium(program, folder / "page", address, f"{files.root.name} · paceline"))
            contestants |= {BLANK: [blank], PAGE: [server.process.pid, shown]}
        try:
            return _take_turns(files, contestants, num_turns, turn_s)
        finally:
            _signal([pid for own in contestants.values() for pid in own], signal.SIGCONT)
            page.close()
            assert page.num_bytes > 1000 * num_turns, "the page was not served"


def _take_turns(files: RunFiles, contestants: Mapping[str, Sequence[int]], num_turns: int, turn_s: float) -> Training:
    found = Training()

    def turn(name: str, seconds: float) -> float:
        _signal([pid for other, own in contestants.items() for pid in own if other != name], signal.SIGSTOP)
        _signal(contestants[name], signal.SIGCONT)
        time.sleep(SETTLE_S)
        cpu_s = cpu_s_of(contestants[name])
        (step, at), delay_s, began = last_line(files), run_delay_s(files), time.monotonic()
        time.sleep(seconds)
        (later_step, later), later_delay_s, ended = last_line(files), run_delay_s(files), time.monotonic()
        found.delays.setdefault(name, []).append((later_delay_s - delay_s) / (ended - began))
        found.cores.setdefault(name, []).append((cpu_s_of(contestants[name]) - cpu_s) / (ended - began))
        return (later_step - step) / (later - at)

    alternate({name: partial(turn, name, min(turn_s, WARM_UP_S)) for name in contestants}, 1)
    found.delays.clear()
    found.cores.clear()
    found.rates = alternate({name: partial(turn, name, turn_s) for name in contestants}, num_turns)
    return found


@contextmanager
def training(folder: Path) -> Iterator[RunFiles]:
    """An endless run, from its first lines of metrics on."""
    (folder / "bench_watch_parts.py").write_text(PARTS)
    (folder / "endless.yaml").write_text(PROJECT)
    files = RunFiles(folder / "runs" / "endless")
    workers = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "paceline", "train", "endless.yaml", "-q", "-d", "cpu", "--workers", workers]
    with started([*command, "--run-folder", str(files.root)], folder, signal.SIGTERM) as process:
        until = time.monotonic() + TIMEOUT_S
        while not files.metrics.is_file() or last_line(files)[0] < 100:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the run did not start: see {files.ranks}")
            time.sleep(0.1)
        yield files


@contextmanager
def chromium(program: str, folder: Path, address: str, title: str) -> Iterator[int]:
    """A process of Chromium that shows a page whose title ends so."""
    folder.mkdir()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--remote-debugging-port=0"]
    command = ["env", f"TMPDIR={folder}", program, *options, f"--user-data-dir={folder}", address]
    with started(command, folder, signal.SIGTERM, subprocess.DEVNULL) as process:
        until = time.monotonic() + TIMEOUT_S
        while not _title(folder).endswith(title):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Chromium shows {_title(folder)!r} instead of a page that is named {title!r}")
            time.sleep(0.1)
        yield process.pid


def _title(profile: Path) -> str:
    """The title of the page that Chromium shows; empty before it is ready."""
    with suppress(OSError, StopIteration):
        port = (profile / "DevToolsActivePort").read_text().split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S) as reply:
            return next(str(page["title"]) for page in json.load(reply) if page["type"] == "page")
    return ""


def last_line(files: RunFiles) -> tuple[int, float]:
    """The step and the time of the last line of metrics."""
    lines = [line for line in LineReader(files.metrics, tail=True).read() if "loss" in line]
    return (int(lines[-1]["step"]), float(lines[-1]["time"])) if lines else (0, 0.0)


def run_delay_s(files: RunFiles) -> float:
    """How long the workers were ready to compute but had no core, summed over them, since they started."""
    pids = [json.loads(path.read_text())["pid"] for path in files.ranks.glob("rank-*.json")]
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9


def cpu_s_of(sessions: Sequence[int]) -> float:
    fields = _fields(sessions)
    return sum(int(each[11]) + int(each[12]) for each in fields.values()) / os.sysconf("SC_CLK_TCK")


def _signal(sessions: Sequence[int], number: signal.Signals) -> None:
    for pid in _fields(sessions):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _fields(sessions: Sequence[int]) -> dict[int, list[str]]:
    """Of the processes in these sessions, by pid: what follows the name in /proc/PID/stat."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat") if sessions else ():
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                found[int(path.parent.name)] = fields
    return found
