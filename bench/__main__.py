"""`python -m bench NAME [--json] [options]`, from the repository root with the `bench` extra installed."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Benchmark(NamedTuple):
    """`module` offers `add_options(parser)` and `run(options) -> bench.harness.Result`."""

    module: str
    description: str


# No benchmark: it writes the page about them.
PAGES = "pages"

# The exit code of a benchmark that this machine cannot run.
NOT_HERE = 77

# Listed here, not discovered, so that the listing and its descriptions cost no import of torch.
BENCHMARKS = {
    "import": Benchmark("bench.import_time", "seconds to import paceline, against import torch"),
    "overhead": Benchmark("bench.overhead", "microseconds per step on one worker, against a bare PyTorch loop"),
    "scaling": Benchmark("bench.scaling", "samples/s of equal workers, against independent processes and torch DDP"),
    "crowded": Benchmark("bench.crowded", "samples/s of more workers than cores, against as many workers as cores"),
    "hetero": Benchmark("bench.hetero", "samples/s of unequal workers, against what they do alone and torch DDP"),
    "data": Benchmark(
        "bench.data", "reading data: dispatched, waiting, in memory, from Arrow files; each against its peer"
    ),
    "gpu-input": Benchmark("bench.gpu_input", "tokens/s of a GPU fed from a file, against one fed from its own memory"),
    "mps": Benchmark("bench.mps", "tokens/s of unequal workers on one GPU, against what they do alone and torch DDP"),
    "checkpoint": Benchmark("bench.checkpoint", "ms that training waits for a save, against torch.save and others"),
    "startup": Benchmark("bench.startup", "seconds to the first step of 1 and 2 workers, against torchrun and DDP"),
    "dp_train": Benchmark("bench.dp_train", "steps/s of tiny models on 1 and 2 workers, against loops by hand and DDP"),
    "gpu": Benchmark("bench.gpu", "GPT-2, a CNN and an MLP on one GPU, against a bare loop and the peers"),
    "exact": Benchmark("bench.exact", "step time of exact mode over plain mode, and of plain mode over a bare loop"),
    "checks": Benchmark("bench.checks", "what checking gradients, settings and replicas adds to a step"),
    "timeline": Benchmark("bench.timeline", "what recording a timeline adds to a step of 10 ms"),
    "watch": Benchmark("bench.watch", "steps/s while a page of `paceline watch` is open, against none; first pictures"),
    "against": Benchmark("bench.against", "step time of this tree against an earlier commit's, each over its limit"),
    "pauses": Benchmark(
        "bench.pauses", "ms of the longest step among millions of objects, by who collects garbage when"
    ),
    "survive": Benchmark(
        "bench.survive", "seconds that the loss of a worker costs, against torchft, torchrun and our own restart"
    ),
    "shard": Benchmark(
        "bench.shard", "samples/s and memory with divided optimizer state, against whole, ZeRO and FSDP2"
    ),
    "hosts": Benchmark("bench.hosts", "ms per sum over workers of two hosts, against flat Gloo between all of them"),
    "plan": Benchmark("bench.plan", "samples/s that `paceline plan` predicts, against those of a run"),
    "slowlink": Benchmark("bench.slowlink", "samples/s and loss on a slow link, against workers that never talk"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:<10} {b.description}" for name, b in BENCHMARKS.items())
    parser.epilog += f"\n\nand from their results:\n  {PAGES:<10} docs/benchmarks.md, with tables and pictures"
    names = [*BENCHMARKS, PAGES]
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME", help="`NAME --help`: its options")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.name is None:
        parser.print_help()
        return

    if chosen.name == PAGES:
        from bench.pages import main as write_pages

        write_pages(chosen.rest)
        return

    benchmark = BENCHMARKS[chosen.name]
    module = importlib.import_module(benchmark.module)
    options_parser = argparse.ArgumentParser(prog=f"python -m bench {chosen.name}", description=module.__doc__)
    options_parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")
    module.add_options(options_parser)
    options = options_parser.parse_args(chosen.rest)

    from bench.harness import CpuMeter, Unavailable  # not above: the listing needs no torch

    meter = CpuMeter()
    try:
        result = module.run(options)
    except Unavailable as reason:
        print(f"bench {chosen.name} cannot run here: {reason}", file=sys.stderr)
        sys.exit(NOT_HERE)
    result.detail["others_cores"] = meter.others_cores()
    print(result.table())
    print(f"other processes used {result.detail['others_cores']:.2f} cores meanwhile")
    if options.json:
        print(result.to_json(), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was set up is taken down
    main()
