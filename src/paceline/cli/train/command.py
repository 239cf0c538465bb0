"""`paceline train CONFIG`: what the user asked for, the run's folder, and the workers."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.errors import CheckpointError
from paceline.cli.commands import CommandError, add_command
from paceline.cli.config import ConfigError, Project, load_project, show
from paceline.cli.find_runs import find_runs
from paceline.cli.logs.summary import render
from paceline.cli.train.dry_run import dry_run
from paceline.cli.train.path_checks import check_places
from paceline.cli.train.user_errors import Mistake, Told, told
from paceline.cli.train.work import Assignment, train
from paceline.core.errors import WorkerError
from paceline.core.rank_variables import is_worker
from paceline.core.world import device_count
from paceline.observe import formats
from paceline.observe.best_effort import attempt
from paceline.observe.environment import describe_environment
from paceline.observe.run_files import (
    RunFiles,
    create_run_folder,
    prepare_run_folder,
    read_status,
    running,
    state_of,
    write_json,
)
from paceline.observe.summary import summarize
from paceline.run.launching.launch import launch
from paceline.run.launching.worker import STOPPED_EXIT_CODE
from paceline.run.saving.stopping import Stopped

_EXAMPLE = """\
KEY=VALUE sets a value of the file, such as trainer.global_batch=64; values
are YAML. `paceline config show CONFIG` prints all of them.

exit codes:
  0    the run is complete
  1    it failed; the first error is shown, all output is in RUN/ranks
  2    the command or the project is wrong; nothing was trained
  75   it was asked to stop, and saved: the same command with --resume goes on
  130  Ctrl-C before anything could be saved

example:
  paceline train 2workers.yaml
  paceline train 2workers.yaml trainer.max_steps=100 --workers 4
  paceline train 2workers.yaml --resume
  paceline train 2workers.yaml --dry-run
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "train", "train what a project file describes", _EXAMPLE)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a project file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="values that win over the file's")
    parser.add_argument("-d", "--devices", metavar="A,B", help="numbers of the GPUs to use, or cpu (default: all)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per device)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="RUN",
        help="go on with a run, its folder or one of its checkpoints (default: the config's newest run)",
    )
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="the run's own folder (default: in OUTPUT)")
    parser.add_argument("--dry-run", action="store_true", help="build everything, try one micro-batch, start nothing")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress, only errors")
    parser.set_defaults(run=run)


NEWEST = Path()


def run(options: argparse.Namespace) -> int:
    if options.resume is not None and "=" in str(options.resume) and not Path(options.resume).exists():
        options.overrides.insert(0, str(options.resume))  # `--resume key=value` names no run
        options.resume = NEWEST
    try:
        order = _order(options)
    except (CommandError, ValueError) as error:
        _say(error)
        return 2
    except OSError as error:
        _say(f"the run's folder cannot be made: {error.filename}: {error.strerror}")
        return 2
    if options.dry_run:
        return _try(order)
    return _train(order, quiet=options.quiet)


@dataclass(frozen=True)
class Order:
    """What is to be trained, by how many, and where it is written down.

    `has_new_folder`: the run's folder was made for it. `checkpoint`: one to go on from, if named.
    """

    project: Project
    num_workers: int
    files: RunFiles
    has_new_folder: bool = False
    is_resumed: bool = False
    checkpoint: Path | None = None


def _order(options: argparse.Namespace) -> Order:
    project = load_project(options.config, _overrides(options))
    _choose_devices(project.settings.devices)
    num_workers = project.settings.workers or _num_devices(project.settings.devices)
    check_places(project)
    output = Path(project.settings.output)
    if options.resume is not None:
        files, checkpoint = _to_resume(str(options.resume), output, project.path.stem)
        project = project.resolve(num_workers, _first_global_batch(files))
        return Order(project, num_workers, files, is_resumed=True, checkpoint=checkpoint)
    project = project.resolve(num_workers)
    if options.dry_run:
        return Order(project, num_workers, RunFiles(output))
    if options.run_folder is not None:
        return Order(project, num_workers, prepare_run_folder(_empty(options.run_folder)))
    if is_worker():  # every process of the world must find the same folder
        world = os.environ.get("TORCHELASTIC_RUN_ID", "world")
        return Order(project, num_workers, prepare_run_folder(output / f"{project.path.stem}_{world}"))
    return Order(project, num_workers, create_run_folder(output, project.path.stem), has_new_folder=True)


def _overrides(options: argparse.Namespace) -> list[str]:
    overrides = list(options.overrides)
    if options.workers is not None:
        overrides.append(f"workers={options.workers}")
    if options.devices is not None:
        given = options.devices
        if given != "cpu" and not re.fullmatch(r"\d+(,\d+)*", given):
            raise ValueError(f"-d {given}: give the numbers of GPUs, such as 0,1, or cpu")
        overrides.append("devices=cpu" if given == "cpu" else f"devices=[{given}]")
    return overrides


def _choose_devices(devices: Sequence[int] | str | None) -> None:
    """What this process and its workers see: CUDA reads the variable when it is first used."""
    if devices is not None and not is_worker():
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if devices == "cpu" else ",".join(map(str, devices))


def _num_devices(devices: Sequence[int] | str | None) -> int:
    if isinstance(devices, tuple):
        return len(devices)
    return 1 if devices == "cpu" else device_count()


def _to_resume(named: str, output: Path, config_name: str) -> tuple[RunFiles, Path | None]:
    """The run's folder, and the checkpoint in it if one was named."""
    if named != str(NEWEST):
        path = Path(named)
        if (path / "manifest.json").is_file():
            return prepare_run_folder(path.absolute().parent.parent), path.absolute()
        if not RunFiles(path).is_run:
            raise ValueError(
                f"--resume {named}: there is no run, and no checkpoint; `paceline logs list` shows the runs"
            )
        files = RunFiles(path)
    else:
        runs = [run for run in find_runs(output) if run.config_name == config_name] if output.is_dir() else []
        if not runs:
            raise ValueError(f"--resume: no run of {config_name} is in {output}; start one without --resume")
        files = runs[-1]
    if state_of(files, read_status(files)) == "live":
        raise ValueError(f"--resume: {files.root} is running; wait for it, or end it with `paceline runs stop`")
    return prepare_run_folder(files.root), None


def _empty(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError(f"--run-folder {folder}: a path cannot hold a null byte")
    if RunFiles(folder).is_run:
        raise ValueError(f"--run-folder {folder} holds a run: choose another, or go on with it by --resume {folder}")
    return folder


def _first_global_batch(files: RunFiles) -> int | None:
    """What the run was started with, where it depended on the number of workers."""
    try:
        return load_project(files.config).settings.trainer.global_batch
    except ConfigError:
        return None


def _try(order: Order) -> int:
    try:
        return dry_run(order.project, order.num_workers)
    except Told as error:
        _say(error)
        return 2


def _train(order: Order, *, quiet: bool) -> int:
    files = order.files
    if not is_worker():
        with attempt(files.config):
            files.config.write_text(show(order.project), encoding="utf-8")
        with attempt(files.environment):
            write_json(files.environment, describe_environment(order.project.folder))
        if not quiet:
            print(f"run {formats.one_line(str(files.root))}", flush=True)
    assignment = Assignment(order.project, files, order.is_resumed, order.checkpoint, _terminal(), quiet)
    try:
        with running(files):
            launch(
                train,
                order.num_workers,
                args=(assignment,),
                max_restarts=order.project.settings.max_restarts,
                logs=files.ranks,
            )
    except KeyboardInterrupt:
        return 130
    except Stopped:
        return STOPPED_EXIT_CODE
    except (WorkerError, Told) as error:
        return _failed(order, error)
    except CheckpointError as error:
        _say(error)
        return 1
    if not quiet:
        with attempt("the summary"):
            print(f"\n{render([summarize(files)], 'text')}", flush=True)
    return 0


def _say(text: object) -> None:
    print(f"paceline train: {formats.printable(str(text))}", file=sys.stderr)


def _failed(order: Order, error: WorkerError | Told) -> int:
    reason = told(error)
    _say(reason or error)
    if not isinstance(reason, Mistake):
        return 1
    if order.has_new_folder:  # else a later --resume would take it for the newest run
        shutil.rmtree(order.files.root, ignore_errors=True)
    return 2


def _terminal() -> str | None:
    """Where the leading worker may draw a line that lives: its own output goes to a file."""
    return os.ttyname(sys.stdout.fileno()) if sys.stdout.isatty() else None
