"""The data layer, part by part, each against its limit or peer.

strategies: dispatched against sharded reading on two workers, and forgather's other three beside them.
waiting: a source that waits for 80% of the compute time, against the same data in memory.
memory: tensors read by the feed, against indexing them by hand, in a loop over a tiny model.
arrow: our Arrow source, against HF datasets reading the same files in random order.
start: the second start over many files, against the first.

The contestants of a part take turns; a part's figure is the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.data_feeding import DISPATCHED, WAITING, strategies, waiting
from bench.data_files import scratch
from bench.data_reading import ARROW, FEED, SECOND, arrow, in_memory, second_start
from bench.harness import Result, circumstances
from bench.parts import Goal, Parts, to_limit
from bench.scaling import Task


def over_best_peer(result: Result) -> float:
    ours_over = result.detail["ours_over_by_turn"]
    return min(float(spread["median"]) for name, spread in ours_over.items() if name != ARROW)


GOALS = {
    "strategies": Goal("dispatched over sharded, at least", to_limit(DISPATCHED), 0.97),
    "waiting": Goal("speed of a waiting source over memory's, at least", to_limit(WAITING), 1 / 1.05),
    "memory": Goal("step time with the feed over indexing by hand, at most", to_limit(FEED), 1.03, is_upper=True),
    "arrow": Goal("samples/s over those of HF's faster way, at least", over_best_peer, 1.5),
    "start": Goal("first start over second, at least", lambda result: 1 / to_limit(SECOND)(result), 10.0),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="*", choices=list(GOALS), default=list(GOALS), help="default: all")
    parser.add_argument("--turns", type=int, default=31, help="alternations (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.8, help="length of a turn of training (default: %(default)s)"
    )
    parser.add_argument("--files", type=int, default=200, help="of the part `start` (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only show that it runs: one short turn")


def run(options: argparse.Namespace) -> Parts:
    turns, seconds, files, micro_batch = options.turns, options.seconds, options.files, 8
    steps, batches = 256, 400
    if options.quick:
        turns, seconds, files, micro_batch = 1, 0.01, 3, 1
        steps, batches = 4, 4
    measure: dict[str, Callable[[Path], Result]] = {
        "strategies": lambda folder: strategies(folder, Task(2, micro_batch, 1, turns, seconds)),
        # What waits is read a little ahead while others have their turn: in a longer turn that counts less.
        "waiting": lambda _: waiting(Task(1, micro_batch, 2, turns, 2.5 * seconds)),
        "memory": lambda _: in_memory(turns, steps),
        "arrow": lambda folder: arrow(folder, turns, batches),
        "start": lambda folder: second_start(folder, turns, files),
    }
    results = {}
    for name in options.parts:
        with scratch() as folder:
            results[name] = measure[name](folder)
    return Parts("data", results, GOALS, circumstances({"parts": options.parts, "turns": turns}))
