"""What a page of `paceline watch` costs: the training beside it, the server's time to a first picture, its memory.

One run of `paceline train` goes on throughout, on as many workers as there are cores, and a page is open: its requests
are made and its stream of events is read. In turns without a page the server is suspended. Steps per second come from
the run's own metrics, so that a turn has no cost of its own. What counts is the median of the ratios of neighbouring
turns, with its confidence interval.

On a machine whose speed varies by more than what is asked, that says little. So the kernel's own account is read too:
how long the workers were ready to compute and had no core. What a page adds to that is the most that it can cost.

First pictures are measured at a new server, as the time until the answers of a page have arrived, for a run with a
million lines and for a folder with a thousand runs. Beside them: reading the same files once, line by line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

from bench.harness import Result, Spread, alternate, ratios
from paceline.observe.json_lines import LineReader
from paceline.observe.run_files import RunFiles, create_run_folder, write_json

WITHOUT, WITH, AGAIN = "without", "with a page open", "without, again"
TIMEOUT_S = 120.0
SETTLE_S = 0.1
MIN_RATIO, MAX_READS, MAX_MEMORY_MB = 0.995, 3.0, 200.0

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


class Server:
    """A process of `paceline watch`, and requests to it."""

    def __init__(self, process: subprocess.Popen[str], address: str, token: str) -> None:
        self.process, self._address = process, address
        self._headers = {"Authorization": f"Bearer {token}"}

    def open(self, path: str) -> object:
        return urlopen(Request(f"{self._address}{path}", headers=self._headers), timeout=TIMEOUT_S)

    def get(self, path: str) -> bytes:
        with self.open(path) as reply:  # type: ignore[attr-defined]
            content: bytes = reply.read()
        return content

    @property
    def peak_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "paceline", "watch", str(folder), "--port", "0"]
    with _process(command, folder, signal.SIGINT) as process:
        assert process.stdout is not None
        match = re.fullmatch(r"(http://[^/]+)/\?token=(\S+)", process.stdout.readline().strip())
        assert match is not None
        yield Server(process, match[1], match[2])


@contextmanager
def training(folder: Path) -> Iterator[RunFiles]:
    """An endless run, from its first lines of metrics on."""
    (folder / "bench_watch_parts.py").write_text(PARTS)
    (folder / "endless.yaml").write_text(PROJECT)
    files = RunFiles(folder / "runs" / "endless")
    workers = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "paceline", "train", "endless.yaml", "-q", "-d", "cpu", "--workers", workers]
    with _process([*command, "--run-folder", str(files.root)], folder, signal.SIGTERM) as process:
        until = time.monotonic() + TIMEOUT_S
        while not files.metrics.is_file() or last_line(files)[0] < 100:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the run did not start: see {files.ranks}")
            time.sleep(0.1)
        yield files


@contextmanager
def _process(command: Sequence[str], folder: Path, end: signal.Signals) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.send_signal(end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def last_line(files: RunFiles) -> tuple[int, float]:
    """The step and the time of the last line of metrics."""
    lines = [line for line in LineReader(files.metrics, tail=True).read() if "loss" in line]
    return (int(lines[-1]["step"]), float(lines[-1]["time"])) if lines else (0, 0.0)


class OpenPage:
    """Does what the page does: fetches a run and reads what is pushed."""

    def __init__(self, server: Server, run_id: str) -> None:
        self.num_events = 0
        picture_of_a_run(server, run_id)
        self._stream = server.open(f"/api/stream?run={run_id}&log=1")
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._has_begun.wait(TIMEOUT_S)

    def _read(self) -> None:
        try:
            for line in self._stream:  # type: ignore[attr-defined]
                self.num_events += line.startswith(b"event: ")
                self._has_begun.set()
        except (OSError, ValueError, AttributeError):
            return  # closed

    def close(self) -> None:
        self._stream.fp.raw._sock.shutdown(2)  # type: ignore[attr-defined]
        self._thread.join()
        self._stream.close()  # type: ignore[attr-defined]


def picture_of_a_run(server: Server, run_id: str) -> None:
    for path in ("", "/metrics?points=2000", "/events", "/log", "/checkpoints", "/config"):
        server.get(f"/api/runs/{run_id}{path}")


@dataclass
class Training:
    """By contestant, turn by turn: steps per second, and how long the workers waited for a core, of the time.

    server_cores: what the server uses while a page is open.
    """

    rates: dict[str, list[float]]
    delays: dict[str, list[float]]
    server_cores: float


def run_delay_s(files: RunFiles) -> float:
    """How long the workers were ready to compute but had no core, summed over them, since they started."""
    pids = [json.loads(path.read_text())["pid"] for path in files.ranks.glob("rank-*.json")]
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9


def measure_training(folder: Path, pairs: int, turn_s: float) -> Training:
    """A page is open throughout; in turns without it the server is suspended. So a turn can be short, and neighbours
    see the same machine. When it goes on, the server also catches up with what it missed, which counts against it.
    """
    cpu: list[float] = []
    delays: dict[str, list[float]] = {}
    with training(folder) as files, serving(folder / "runs") as server:
        page = OpenPage(server, files.root.name)

        def turn(name: str) -> float:
            has_page = name == WITH
            server.process.send_signal(signal.SIGCONT if has_page else signal.SIGSTOP)
            time.sleep(SETTLE_S)
            (step, at), delay_s, cpu_s = last_line(files), run_delay_s(files), server.cpu_s
            began = time.monotonic()
            time.sleep(turn_s)
            took_s = time.monotonic() - began
            delays.setdefault(name, []).append((run_delay_s(files) - delay_s) / took_s)
            if has_page:
                cpu.append((server.cpu_s - cpu_s) / took_s)
            later_step, later = last_line(files)
            return (later_step - step) / (later - at)

        contestants = {name: partial(turn, name) for name in (WITHOUT, WITH, AGAIN)}
        try:
            alternate(contestants, 1)
            cpu.clear()
            delays.clear()
            measurements = alternate(contestants, pairs)
            assert page.num_events > pairs
        finally:
            server.process.send_signal(signal.SIGCONT)
            page.close()
        return Training(measurements, delays, sum(cpu) / len(cpu))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median: order statistics, without assumptions about the distribution."""
    ordered, count = sorted(values), len(values)
    below, probability = 0, 0.0
    while below < count // 2 and (probability := probability + math.comb(count, below) / 2**count) < 0.025:
        below += 1
    return ordered[max(below - 1, 0)], ordered[count - max(below, 1)]


def write_long_run(folder: Path, num_lines: int) -> RunFiles:
    """As a run of two workers writes it, some 300 bytes per line."""
    files = create_run_folder(folder, "long")
    rest = '"lr":0.001,"samples_per_s":812.12,"grad_norm":0.8123,"shares":[6,2],"waiting":[0.0123,0.0412],'
    rest += '"lanes":{"computing":[0.9,0.85],"data":[0.02,0.01],"exchange":[0.05,0.05],"rest":[0.02,0.05]},'
    rest += '"speeds":[30.1,10.2],"efficiency":0.93}\n'
    with files.metrics.open("w") as file:
        for step in range(1, num_lines + 1):
            loss = 0.1 + 8 / step + step % 7 / 100
            file.write(f'{{"step":{step},"time":{step / 100},"epoch":{step // 1000},"loss":{loss:.6f},{rest}')
            if step % 100 == 0:
                file.write(f'{{"step":{step},"time":{step / 100},"eval":{{"loss":{loss + 0.1:.6f}}}}}\n')
    _write_status(files, num_lines)
    return files


def write_many_runs(folder: Path, count: int) -> None:
    for i in range(count):
        files = create_run_folder(folder, f"run{i}")
        lines = ({"step": s, "time": s / 10, "loss": 8.0 / s, "shares": [6, 2], "lr": 0.001} for s in range(1, 501))
        files.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        write_json(files.environment, {"versions": {"torch": "2.13"}, "host": {"cores": 8}, "command": ["paceline"]})
        write_json(files.report, {"steps": 500, "efficiency": 0.9, "workers": [{"rank": 0}, {"rank": 1}]})
        for rank in (0, 1):
            write_json(files.ranks / f"rank-{rank}.json", {"rank": rank, "host": "a", "step": 500, "memory": 1e9})
        files.config.write_text(f"trainer:\n  learning_rate: {i / 1000}\n  global_batch: 64\n" * 20)
        _write_status(files, 500)


def _write_status(files: RunFiles, steps: int) -> None:
    process = {"pid": 1, "process_started": None, "host": "elsewhere", "started": time.time(), "num_starts": 1}
    write_json(files.status, {"state": "finished", **process, "total_steps": steps})


def reading(paths: Sequence[Path]) -> Callable[[], float]:
    def read() -> float:
        began = time.perf_counter()
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    block.count(b"\n")
        return time.perf_counter() - began

    return read


def first_picture(folder: Path, picture: Callable[[Server], None], peaks: list[float]) -> Callable[[], float]:
    def measure() -> float:
        with serving(folder) as server:
            server.get("/page/index.html")  # the first request also imports
            began = time.perf_counter()
            picture(server)
            took_s = time.perf_counter() - began
            peaks.append(server.peak_mb)
        return took_s

    return measure


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=120, help="alternations of the training (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=1.0, help="seconds of a turn (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=5, help="first pictures of each kind (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the long run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1000, help="in the large folder (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = measure_training(folder, options.turns, options.turn_s)
        pictures, peaks = _pictures(folder, options)
    result = Result.of(
        "watch",
        "steps per second",
        found.rates,
        ours=WITH,
        limit=WITHOUT,
        better="higher",
        packages=("starlette", "uvicorn"),
        settings={"lines": options.lines, "runs": options.runs, "turn_s": options.turn_s},
    )
    detail = result.detail
    detail["paired"] = _paired(ratios(found.rates[WITH], found.rates[WITHOUT]))
    detail["paired_control"] = _paired(ratios(found.rates[AGAIN], found.rates[WITHOUT]))
    detail["kept"] = _paired(_kept(found.delays[WITH], found.delays[WITHOUT]))
    detail["kept_control"] = _paired(_kept(found.delays[AGAIN], found.delays[WITHOUT]))
    detail["server_cores"] = cores = found.server_cores
    detail["peak_mb"] = max(peaks)
    detail["first_picture_s"] = {name: Spread.of(found["picture"]).median for name, found in pictures.items()}
    by_turn = {name: Spread.of(ratios(found["picture"], found["reading"])) for name, found in pictures.items()}
    detail["first_picture_over_reading"] = {name: spread.median for name, spread in by_turn.items()}
    detail["notes"] = [
        f"steps per second with a page open over without, pair by pair: {_shown(detail['paired'])}",
        f"the same of {AGAIN!r}, which shows the noise: {_shown(detail['paired_control'])}",
        f"1 - the time that workers wait for a core due to the page: {_shown(detail['kept'])} (wanted: {MIN_RATIO})",
        f"the same of {AGAIN!r}: {_shown(detail['kept_control'])}",
        f"while a page is open, the server uses {100 * cores:.2f}% of a core",
        *(
            f"first picture of {name}: {detail['first_picture_s'][name]:.3f} s, {over:.2f} times reading its files "
            f"(wanted: at most 1 s, {MAX_READS:g} times)"
            for name, over in detail["first_picture_over_reading"].items()
        ),
        f"memory of the server: at most {max(peaks):.0f} MB (wanted: {MAX_MEMORY_MB:.0f} MB)",
    ]
    return result


def _kept(with_page: Sequence[float], without: Sequence[float]) -> list[float]:
    """The part of its time that training keeps, at least: as if every wait of a worker delayed all of them."""
    return [1 - (value - other) for value, other in zip(with_page, without, strict=True)]


def _paired(values: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(values)
    return {"median": Spread.of(values).median, "low": low, "high": high, "pairs": len(values)}


def _shown(paired: dict[str, float]) -> str:
    return f"{paired['median']:.4f} ({paired['low']:.4f} to {paired['high']:.4f}, 95% of {paired['pairs']} pairs)"


def _pictures(folder: Path, options: argparse.Namespace) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Seconds to first pictures and to reading the same files, and the servers' memory in MB."""
    peaks: list[float] = []
    long, many = folder / "long", folder / "many"
    files = write_long_run(long, options.lines)
    write_many_runs(many, options.runs)
    kinds = {
        f"a run with {options.lines:,} lines": (long, lambda server: picture_of_a_run(server, files.root.name)),
        f"a folder with {options.runs:,} runs": (many, lambda server: server.get("/api/runs")),
    }
    found = {}
    for name, (where, picture) in kinds.items():
        paths = [path for path in where.rglob("*") if path.is_file()]
        contestants = {"picture": first_picture(where, picture, peaks), "reading": reading(paths)}
        alternate(contestants, 1)
        found[name] = alternate(contestants, options.pictures)
    return found, peaks
