"""Seconds to import paceline, which imports torch, against importing torch alone.

Each measurement is a fresh interpreter that times its own import statement, and for paceline the use of `Trainer`,
so that an import put off until then counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from bench.harness import Result, alternate

MEASURE = """
import json, sys, time
before = len(sys.modules)
start = time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - start, len(sys.modules) - before]))
"""


TORCH, PACELINE = "import torch", "import paceline"
STATEMENTS = {TORCH: "import torch", PACELINE: "import paceline; paceline.Trainer"}


def fresh_import(name: str) -> tuple[float, int]:
    """Seconds for, and modules loaded by, a statement in a new interpreter."""
    program = MEASURE.format(statement=STATEMENTS[name])
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    seconds, num_modules = json.loads(done.stdout)
    return seconds, num_modules


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=15, help="alternations (default: %(default)s)")


def run(options: argparse.Namespace) -> Result:
    # Counting also leaves compiled bytecode and a warm file cache to the timed imports.
    num_modules = {name: fresh_import(name)[1] for name in STATEMENTS}
    contestants = {name: lambda name=name: fresh_import(name)[0] for name in STATEMENTS}
    return Result.of(
        "import",
        "seconds",
        alternate(contestants, options.turns),
        ours=PACELINE,
        limit=TORCH,
        better="lower",
        settings={"modules_loaded": num_modules},
    )
