"""`paceline train`: a run from a project file. Help and completion need this module without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.commands import add_command, integer

_EXAMPLE = """\
KEY=VALUE overrides a setting of the file, such as trainer.global_batch=64;
values are YAML. `paceline config show CONFIG` prints all settings.

exit codes:
  0    the run is complete
  1    it failed; the first error is shown, all output is in RUN/ranks
  2    the command or the project is wrong; nothing was trained
  75   it was stopped on request and saved; continue it with --resume
  130  Ctrl-C before anything could be saved; 143 after SIGTERM

example:
  paceline train 2workers.yaml
  paceline train 2workers.yaml trainer.max_steps=100 --workers 4
  paceline train --resume 2workers_2026-11-15_14-39-48
  paceline train 2workers.yaml --dry-run
"""
NEWEST = ""  # --resume without a name


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "train", "train the model of a project file", _EXAMPLE, run=_run)
    what = "a project file; a resumed run has its own"
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help=what)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.add_argument("-d", "--devices", metavar="A,B", help="numbers of the GPUs to use, or cpu (default: all)")
    parser.add_argument("--workers", type=integer(1), metavar="N", help="worker processes (default: one per device)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="RUN",
        help="resume a run with its own settings: its name, its folder, or one of its checkpoints (default: the newest "
        "run of CONFIG)",
    )
    what = "settings that may differ from the checkpoint, such as global_batch"
    parser.add_argument("--allow", metavar="A,B", help=what)
    what = "components of the checkpoint to start without, such as optimizer"
    parser.add_argument("--skip", metavar="A,B", help=what)
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="folder of the run (default: in OUTPUT)")
    parser.add_argument("--dry-run", action="store_true", help="build everything and try one micro-batch, then exit")
    parser.add_argument("-q", "--quiet", action="store_true", help="show errors only, no progress")


def _run(options: argparse.Namespace) -> int:
    from paceline.cli.train.command import run

    return run(options)
