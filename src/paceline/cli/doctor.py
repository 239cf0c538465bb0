"""`paceline doctor`: what slows a run down, with the figures that show it and what to change."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from paceline.cli import commands as cli
from paceline.observe import formats
from paceline.observe.run_files import RunFiles
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.evidence import Evidence
from paceline.observe.verdicts.read import read_evidence
from paceline.observe.verdicts.verdict import Verdict

_NOTE = f"""\
{cli.RUN_NOTE}It may be live, finished or killed.

The verdicts: failed, stalled, worker left, diverging (loss), memory (nearly
full), slow worker, unbalanced, data-bound, exchange-bound, host-bound GPU, too
early, nothing wrong. They refer to the run's last lines of metrics;
docs/doctor.md has their meaning and limits.

exit codes:
  0    nothing wrong, or it is too early to tell
  1    there is no such run
  10   there is something to improve (warning)
  20   the run has failed, stalls or diverges, or a worker has left (error)
"""
EXIT_CODES = {"ok": 0, "info": 0, "warning": 10, "error": 20}


def add_parser(commands: Any) -> None:
    summary = "diagnose what slows a run down, and what to change"
    parser = cli.add_command(commands, "doctor", summary, _NOTE, examples=("", "2workers", "--json"), run=_doctor)
    cli.add_run_argument(parser, "the run (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print JSON, with all figures")


def _doctor(options: argparse.Namespace) -> int:
    files = cli.choose_run(options.named, options.runs)
    evidence = read_evidence(files)
    verdicts = diagnose(evidence)
    if options.json:
        last = evidence.lines[-1] if evidence.lines else None
        found = {"run": files.root.name, "state": evidence.state, "step": last.step if last else 0}
        cli.print_json({**found, "verdicts": [asdict(verdict) for verdict in verdicts]})
    else:
        print("\n".join([_head(files, evidence), "", *(line for verdict in verdicts for line in _lines(verdict))]))
    return EXIT_CODES[verdicts[0].severity]


def _head(files: RunFiles, evidence: Evidence) -> str:
    words = [f"{files.root.name}: {evidence.state}"]
    words += [f"step {evidence.lines[-1].step:,}"] if evidence.lines else []
    if recent := evidence.recent:
        words.append(f"verdicts on steps {recent[0].since_step + 1:,} to {recent[-1].step:,}")
    return formats.one_line(", ".join(words))


def _lines(verdict: Verdict) -> list[str]:
    cost = f" (costs {verdict.lost:.0%} of the speed)" if verdict.lost and verdict.lost >= 0.01 else ""
    lines = [f"{verdict.severity:<7}  {formats.one_line(verdict.text)}{cost}"]
    return lines + [f"         {change.advice}" for change in verdict.changes]
