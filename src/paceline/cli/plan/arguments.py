"""The command line of `paceline plan`, and the parsers of its values. Needs no torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cli.commands import add_command, integer, is_given, refuse_ignored

_NOTE = """\
Trains some twenty steps on the devices of this machine, alone and together,
and predicts how fast combinations of workers are: samples/s, time and cost,
the workers' shares, and what limits them. Only the profile is saved (--out),
which other machines can combine with theirs (--add).

Devices have the names of their profiles; --name and --add NAME=FILE choose
shorter ones. Devices of one profile are on one machine; --link joins machines.
--device adds a device by its speed relative to this machine's.
"""
_EXAMPLES = (
    "2workers.yaml",
    "2workers.yaml --name A --out a.json",
    "--profile a.json --add B=b.json --link 1Gbit --workers 2xA,1xB",
    '--profile a.json --device "RTX 3060"=0.4 --price A=2.10/h',
    "2workers.yaml --find micro_batch",
    "--profile a.json --workers 99xA --link 10Gbit --simulate 1h",
)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Options that would be ignored: beside these options, or without --simulate.
_USELESS_WITH = {
    "--find": (
        *("--profile", "--out", "--name", "--add", "--device", "--workers", "--global-batch", "--link", "--price"),
        *("--steps", "--simulate", "--run"),
    ),
    "--profile": ("--steps",),
    "--simulate": ("--price", "--run"),
}
_OF_SIMULATE = ("--failures", "--noise", "--replace-after", "--trace", "--seed")


def add_parser(commands: Any) -> None:
    summary = "predict how fast some hardware will train"
    parser = add_command(commands, "plan", summary, _NOTE, examples=_EXAMPLES, run=_run)
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG", help="a project file; measured unless --profile is given")
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    add("--profile", type=Path, metavar="FILE", help="this machine's profile, instead of measuring")
    add("--out", type=Path, metavar="FILE", help="write this machine's profile")
    add("--name", metavar="NAME", help="what to call this machine's device (default: its model)")
    what = "another machine's profile, and what to call its device; repeatable"
    add("--add", action="append", default=[], metavar="[NAME=]FILE", help=what)
    what = "a device that was not measured, FACTOR times as fast as this machine's; repeatable"
    add("--device", action="append", default=[], type=factor, metavar="NAME=FACTOR", help=what)
    what = "the workers to predict for, such as 2xA,1xB (default: all measured devices)"
    add("--workers", type=workers, metavar="NxA,MxB", help=what)
    what = "samples per step to predict for (default: the project's); changes the course of a run"
    add("--global-batch", type=integer(1), metavar="N", help=what)
    add("--link", type=bits_per_s, metavar="SPEED", help="bandwidth between machines, such as 1Gbit or 100Mbit")
    add("--price", type=prices, default={}, metavar="A=P/h,B=Q/h", help="price of a device per hour")
    add("--steps", type=integer(1), default=20, metavar="N", help="steps to measure (default: %(default)s)")
    what = "find the fastest micro-batch that fits the memory of every device, instead of predicting"
    add("--find", choices=["micro_batch"], help=what)
    what = "simulate a run of this length with many workers, instead of predicting"
    add("--simulate", type=duration, metavar="TIME", help=what)
    what = "with --simulate: deaths per worker and hour (default: 0)"
    add("--failures", type=rate, default=0.0, metavar="RATE", help=what)
    add("--noise", type=rate, default=0.03, metavar="PART", help="with --simulate: noise (default: %(default)s)")
    what = "with --simulate: time until a dead worker's replacement joins (default: never)"
    add("--replace-after", type=duration, metavar="TIME", help=what)
    what = 'with --simulate: when workers die, leave or join, lines of {"at_s": 60, "worker": 3, "event": "leave"}'
    add("--trace", type=Path, metavar="FILE", help=what)
    add("--seed", type=integer(0), default=0, metavar="N", help="with --simulate: seed of noise and deaths")
    what = "write the answer into a run's folder: `paceline watch` shows it on the run's page"
    add("--run", dest="run_folder", type=Path, metavar="FOLDER", help=what)
    add("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    from paceline.cli.plan.command import run

    for option, useless in _USELESS_WITH.items():
        if is_given(options, option):
            refuse_ignored(options, useless, f"with {option}")
    if options.simulate is None:
        refuse_ignored(options, _OF_SIMULATE, "without --simulate TIME")
    return run(options)


def workers(text: str) -> dict[str, int]:
    """ "2xA,1xB" """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\S.*?)\s*", part)
        if match is None or (match[1] and not int(match[1])):
            raise argparse.ArgumentTypeError(f"{part!r}: choose a number and a device, such as 2xA")
        found[match[2]] = found.get(match[2], 0) + int(match[1] or 1)
    return found


def bits_per_s(text: str) -> float:
    """ "1Gbit", "100 Mbit/s" """
    return _quantity(text, re.sub(r"(/s|ps)\s*$", "", text.lower()), _BITS, "a speed such as 1Gbit or 100Mbit")


def duration(text: str) -> float:
    """ "90s", "20min", "1h" """
    return _quantity(text, text, _SECONDS, "a time such as 90s, 20min or 1h")


def rate(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: choose a number >= 0")
    return value


def factor(text: str) -> tuple[str, float]:
    """ "RTX 3060=0.4" """
    name, _, value = text.rpartition("=")
    if not name.strip() or not 0 < _number(value) < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r}: choose a name and a factor, such as "RTX 3060"=0.4')
    return name.strip().strip("\"'"), float(value)


def prices(text: str) -> dict[str, float]:
    """ "A=2.10/h,B=0.40/h" """
    found = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        price = _number(value.strip().removesuffix("/h"))
        if not name.strip() or not 0 <= price < math.inf:
            raise argparse.ArgumentTypeError(f"{part!r}: choose a device and its price per hour, such as A=2.10/h")
        found[name.strip()] = price
    return found


def _quantity(given: str, text: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(rf"\s*([\d.]+)\s*({'|'.join(units)})\s*", text)
    value = _number(match[1]) * units[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r}: choose {example}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
