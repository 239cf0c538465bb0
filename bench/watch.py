"""What a page of `paceline watch` costs: the training beside it, the server's time to a first picture, its memory.

Training: see bench.watch_training. What counts is the median of the ratios of neighbouring turns, with its confidence
interval: with Chromium on the page over no browser, where Chromium is installed, otherwise with the page's requests.

First pictures are measured at a new server, as the time until the answers of a page have arrived, for a run with a
million lines and for a folder with a thousand runs. Beside them: reading the same files once, line by line.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness import Result, Spread, alternate, ratios
from bench.watch_server import Server, picture_of_a_run, serving
from bench.watch_training import BLANK, PAGE, REQUESTS, WITHOUT, Training, measure_training
from paceline.observe.run_files import RunFiles, create_run_folder, write_json

MIN_RATIO, MAX_READS, MAX_MEMORY_MB = 0.995, 3.0, 200.0


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
    parser.add_argument("--turns", type=int, default=7, help="alternations of the training (default: %(default)s)")
    parser.add_argument(
        "--turn-s", type=float, default=32.0, help="seconds of a turn, a multiple of 16 (default: %(default)s)"
    )
    parser.add_argument("--pictures", type=int, default=5, help="first pictures of each kind (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the long run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1000, help="in the large folder (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        found = measure_training(Path(folder), options.turns, options.turn_s)
        pictures, peaks = _pictures(Path(folder), options)
    result = Result.of(
        "watch",
        "steps per second",
        found.rates,
        ours=PAGE if PAGE in found.rates else REQUESTS,
        limit=WITHOUT,
        better="higher",
        packages=("starlette", "uvicorn"),
        settings={"lines": options.lines, "runs": options.runs, "turn_s": options.turn_s},
        skipped={}
        if PAGE in found.rates
        else dict.fromkeys((PAGE, BLANK), "needs chromium: apt-get install -y chromium"),
    )
    detail = result.detail
    detail["training"] = _compare(found)
    detail["cores"] = {name: sum(cores) / len(cores) for name, cores in found.cores.items()}
    detail["peak_mb"] = max(peaks)
    detail["first_picture_s"] = {name: Spread.of(found["picture"]).median for name, found in pictures.items()}
    by_turn = {name: Spread.of(ratios(found["picture"], found["reading"])) for name, found in pictures.items()}
    detail["first_picture_over_reading"] = {name: spread.median for name, spread in by_turn.items()}
    detail["notes"] = [
        f"steps per second, median (95% interval) of {options.turns} pairs of turns (wanted: {MIN_RATIO}):",
        *(
            f"{pair}: {_shown(measured['steps'])}; 1 - the time that workers wait for a core in addition: "
            f"{_shown(measured['waiting'])}"
            for pair, measured in detail["training"].items()
        ),
        *(f"{name}: {100 * cores:.2f}% of a core" for name, cores in detail["cores"].items()),
        *(
            f"first picture of {name}: {detail['first_picture_s'][name]:.3f} s, {over:.2f} times reading its files "
            f"(wanted: at most 1 s, {MAX_READS:g} times)"
            for name, over in detail["first_picture_over_reading"].items()
        ),
        f"memory of the server: at most {max(peaks):.0f} MB (wanted: {MAX_MEMORY_MB:.0f} MB)",
    ]
    return result


def _compare(found: Training) -> dict[str, dict[str, dict[str, float]]]:
    """By pair, the strictest first: ratios of steps per second, and what the kernel's account leaves of the time."""
    pairs = [(PAGE, WITHOUT), (PAGE, BLANK), (BLANK, WITHOUT), (REQUESTS, WITHOUT)]
    return {
        f"{name} over {base}": {
            "steps": paired(ratios(found.rates[name], found.rates[base])),
            "waiting": paired(
                [1 - own + other for own, other in zip(found.delays[name], found.delays[base], strict=True)]
            ),
        }
        for name, base in pairs
        if name in found.rates and base in found.rates
    }


def paired(values: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(values)
    return {"median": Spread.of(values).median, "low": low, "high": high}


def _shown(found: dict[str, float]) -> str:
    return f"{found['median']:.4f} ({found['low']:.4f} to {found['high']:.4f})"


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
