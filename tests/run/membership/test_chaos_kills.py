"""Kill anything, at any moment: the run that ends is the one that was never disturbed, bit for bit.

Twenty kills in every test run, a thousand in `make soak`. A seed decides what is lost, how and when, as far as the
machine is repeatable, and the variables PACELINE_CHAOS (a seed), PACELINE_CHAOS_KILLS and PACELINE_CHAOS_VARIANTS
(such as stream,readers) choose in `pytest -s -m soak tests/run/membership/test_chaos_kills.py`.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path

import chaos_program
import pytest
from chaos_killer import KINDS, Killer, Order
from chaos_program import VARIANTS, Outcome, Program

import paceline as pl

CHOSEN = os.environ.get("PACELINE_CHAOS")
STALL_S = 3.0
PAUSE_S = 0.05
KILLS_PER_RUN = 20
PLAIN_TOLERANCE = 1e-5


class Chaos:
    """Disturbs runs, one after another, until there were so many kills."""

    def __init__(self, folder: Path, seed: int, num_kills: int, *, exact: bool = True) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self.seed = seed
        self._num_kills = num_kills
        self._exact = exact
        self.kills: Counter[str] = Counter()
        self.num_good = 0
        self.num_runs = 0
        self.failures: list[str] = []
        self._expected: dict[str, Outcome] = {}

    def go(self, variants: tuple[str, ...] = tuple(VARIANTS), *, report_every: int | None = None) -> None:
        orders = [Order.draw_from(self._random, KINDS) for _ in range(self._num_kills)]
        while orders:
            variant = variants[self.num_runs % len(variants)]
            program = self._program(f"run-{self.num_runs}", variant, PAUSE_S)
            self.num_runs += 1
            num_workers = self._random.choice([3, 4])
            killer = Killer(program, orders[:KILLS_PER_RUN], num_workers)
            error = self._run(program, killer)
            orders = orders[killer.num_kills :] if killer.num_kills else orders[1:]
            self.kills += killer.kills
            if error is None:
                self.num_good += killer.num_kills
            else:
                self.failures.append(f"run {self.num_runs - 1}, {variant}, {num_workers} workers: {error}")
                print("\n".join([self.failures[-1], *killer.log]), file=sys.stderr)
            if report_every and self.num_runs % report_every == 0:
                print(self.report(), flush=True)

    def _run(self, program: Program, killer: Killer) -> str | None:
        """Why the run is not as if it had been undisturbed; None if it is."""
        expected = self._undisturbed(program.variant)
        program.reset()
        try:
            with killer:
                _launch(program, killer.num_workers)
            outcome = Outcome.read(program)
        except Exception as error:
            return f"{killer.hang or ''}{type(error).__name__}: {error}"
        if killer.hang is not None:
            return killer.hang
        if outcome.digest == expected.digest:
            return None
        if not self._exact:
            return None if outcome.is_close(expected, PLAIN_TOLERANCE) else "not within the tolerance"
        first = next((i for i, (a, b) in enumerate(zip(outcome.losses, expected.losses, strict=True), 1) if a != b), 0)
        return f"another digest; the first loss that differs is that of step {first}"

    def _program(self, name: str, variant: str, pause_s: float) -> Program:
        # In plain mode rounding grows with the steps, whoever does them.
        return Program(str(self._folder / name), variant, 20 if self._exact else 5, self._exact, pause_s)

    def _undisturbed(self, variant: str) -> Outcome:
        if variant not in self._expected:
            program = self._program(f"undisturbed-{variant}", variant, 0.0)
            program.reset()
            _launch(program, 2)
            self._expected[variant] = Outcome.read(program)
        return self._expected[variant]

    def report(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        total = sum(self.kills.values())
        return f"{self.num_good} of {total} kills ({kinds}) in {self.num_runs} runs, seed {self.seed}"


def _launch(program: Program, num_workers: int) -> None:
    pl.launch(chaos_program.train, num_workers, args=(program,), min_workers=1, max_restarts=10_000, stall_s=STALL_S)


def check(chaos: Chaos) -> None:
    print(chaos.report())
    assert not chaos.failures, "\n\n".join([chaos.report(), *chaos.failures])


def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, random.SystemRandom().randrange(10**6), num_kills=20)
    chaos.go(("buckets",))
    check(chaos)


def test_plain_mode_stays_within_rounding(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, random.SystemRandom().randrange(10**6), num_kills=3, exact=False)
    chaos.go(("sharded",))
    check(chaos)


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_a_thousand_kills_change_no_bit(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, int(CHOSEN or 1), num_kills=int(os.environ.get("PACELINE_CHAOS_KILLS", "1000")))
    chaos.go(tuple(os.environ.get("PACELINE_CHAOS_VARIANTS", ",".join(VARIANTS)).split(",")), report_every=1)
    check(chaos)
