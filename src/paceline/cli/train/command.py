"""`paceline train CONFIG`: from the command line to a run's folder and its workers."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reader import checkpoint_at
from paceline.cli.commands import CommandError, add_command, find_runs
from paceline.cli.config import ConfigError, Project, load_project, show
from paceline.cli.train.dry_run import dry_run, nearest_existing
from paceline.cli.train.user_errors import ProjectError, UserFacingError, user_facing
from paceline.cli.train.worker import RunRequest, train
from paceline.core.errors import WorkerError
from paceline.core.rank_variables import is_worker
from paceline.core.world import device_count, devices
from paceline.observe import formats, run_files
from paceline.observe.best_effort import attempt
from paceline.observe.environment import describe_environment
from paceline.observe.run_files import RunFiles
from paceline.observe.summary import summarize, text
from paceline.run.launching.launch import launch
from paceline.run.launching.worker import STOPPED_EXIT_CODE
from paceline.run.saving.stopping import Stopped

_EXAMPLE = """\
KEY=VALUE overrides a setting of the file, such as trainer.global_batch=64;
values are YAML. `paceline config show CONFIG` prints all settings.

exit codes:
  0    the run is complete
  1    it failed; the first error is shown, all output is in RUN/ranks
  2    the command or the project is wrong; nothing was trained
  75   it was asked to stop and was saved; continue it with --resume
  130  Ctrl-C before anything could be saved

example:
  paceline train 2workers.yaml
  paceline train 2workers.yaml trainer.max_steps=100 --workers 4
  paceline train 2workers.yaml --resume
  paceline train 2workers.yaml --dry-run
"""
NEWEST = Path()


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "train", "train the model of a project file", _EXAMPLE)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a project file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the file")
    parser.add_argument("-d", "--devices", metavar="A,B", help="numbers of the GPUs to use, or cpu (default: all)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per device)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="RUN",
        help="resume a run: its folder, or one of its checkpoints (default: the newest run of CONFIG)",
    )
    parser.add_argument("--run-folder", type=Path, metavar="DIR", help="folder of the run (default: in OUTPUT)")
    parser.add_argument("--dry-run", action="store_true", help="build everything and try one micro-batch, then exit")
    parser.add_argument("-q", "--quiet", action="store_true", help="show errors only, no progress")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.resume is not None and "=" in str(options.resume) and not Path(options.resume).exists():
        options.overrides.insert(0, str(options.resume))  # `--resume key=value` names no run
        options.resume = NEWEST
    try:
        project = _load(options)
        chosen = project.settings.devices
        num_devices = len(chosen) if isinstance(chosen, tuple) else 1 if chosen == "cpu" else device_count()
        num_workers = project.settings.workers or num_devices
        request = _request(options, project, num_workers)
    except (CommandError, ValueError) as error:
        return _report(error, 2)
    except OSError as error:
        return _report(f"cannot create the run's folder: {error.filename}: {error.strerror}", 2)
    try:
        if options.dry_run:
            return dry_run(request.project, num_workers)
        return _train(request, num_workers)
    except KeyboardInterrupt:
        return 130
    except Stopped:
        return STOPPED_EXIT_CODE
    except (WorkerError, UserFacingError, CheckpointError) as error:
        reason = user_facing(error)
        if not isinstance(reason, ProjectError):
            return _report(reason or error, 1)
        if not (options.dry_run or options.resume or options.run_folder or is_worker()):
            shutil.rmtree(request.files.root, ignore_errors=True)  # or a later --resume would take it for the newest
        return _report(reason, 2)


def _load(options: argparse.Namespace) -> Project:
    overrides, devices = list(options.overrides), options.devices
    if options.workers is not None:
        overrides.append(f"workers={options.workers}")
    if devices is not None:
        if devices != "cpu" and not re.fullmatch(r"\d+(,\d+)*", devices):
            raise ValueError(f"-d {devices}: give GPU numbers, such as 0,1, or cpu")
        overrides.append("devices=cpu" if devices == "cpu" else f"devices=[{devices}]")
    project = load_project(options.config, overrides)
    chosen = project.settings.devices
    if chosen is not None and not is_worker():  # also for the workers; CUDA reads the variable when it is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if chosen == "cpu" else ",".join(map(str, chosen))
    problems = [(project.origin(key), f"{key}: {message}") for key, message in _path_problems(project)]
    if problems:
        raise ConfigError(problems)
    return project


def _path_problems(project: Project) -> Iterator[tuple[str, str]]:
    """Missing checkpoints and GPUs, and folders that cannot be created."""
    settings, saving = project.settings, project.settings.checkpoints
    starts = {}
    if saving.save and isinstance(saving.resume, str) and saving.resume != "auto":
        starts["checkpoints.resume"] = project.folder / saving.resume
    if saving.init_from is not None and not (path := project.folder / saving.init_from).is_file():
        starts["checkpoints.init_from"] = path
    for key, path in starts.items():
        try:
            checkpoint_at(path)
        except CheckpointError as error:
            yield key, str(error) if path.exists() else f"nothing at {path}: check the path"
    folders = {"output": Path(settings.output)}
    if saving.save and saving.folder is not None:
        folders["checkpoints.folder"] = project.folder / saving.folder
    for key, folder in folders.items():
        existing = nearest_existing(folder)
        if not existing.is_dir():
            yield key, f"cannot create the folder {folder}, because {existing} is a file: choose another"
    if isinstance(settings.devices, tuple):
        visible = sum(device.type == "cuda" for device in devices())
        if visible < len(settings.devices):
            named = ", ".join(map(str, settings.devices))
            yield "devices", f"this machine has {visible} of the GPUs {named}: see `paceline devices`, or use cpu"


def _request(options: argparse.Namespace, project: Project, num_workers: int) -> RunRequest:
    output = Path(project.settings.output)
    # The leading worker's output goes to a file: it shows progress on the terminal by its name.
    shown = {"terminal": os.ttyname(sys.stdout.fileno()) if sys.stdout.isatty() else None, "quiet": options.quiet}
    if options.resume is not None:
        files, checkpoint = _to_resume(str(options.resume), output, project.path.stem)
        project = project.resolve(num_workers, _first_global_batch(files))
        return RunRequest(project, files, is_resumed=True, checkpoint=checkpoint, **shown)
    project = project.resolve(num_workers)
    if options.dry_run:
        files = RunFiles(output)
    elif options.run_folder is not None:
        if RunFiles(options.run_folder).is_run:
            hint = f"choose another, or resume it with --resume {options.run_folder}"
            raise ValueError(f"--run-folder {options.run_folder} contains a run: {hint}")
        files = run_files.prepare_run_folder(options.run_folder)
    elif is_worker():  # all processes of the world must use the same folder
        world = os.environ.get("TORCHELASTIC_RUN_ID", "world")
        files = run_files.prepare_run_folder(output / f"{project.path.stem}_{world}")
    else:
        files = run_files.create_run_folder(output, project.path.stem)
    return RunRequest(project, files, **shown)


def _to_resume(named: str, output: Path, config_name: str) -> tuple[RunFiles, Path | None]:
    """The run's folder, and the checkpoint in it if one was named."""
    if named != str(NEWEST):
        path = Path(named)
        if (path / "manifest.json").is_file():
            return run_files.prepare_run_folder(path.absolute().parent.parent), path.absolute()
        if not RunFiles(path).is_run:
            raise ValueError(f"--resume {named}: not a run, and not a checkpoint; see `paceline logs list`")
        files = RunFiles(path)
    else:
        runs = [run for run in find_runs(output) if run.config_name == config_name] if output.is_dir() else []
        if not runs:
            raise ValueError(f"--resume: {output} has no run of {config_name}; start one without --resume")
        files = runs[-1]
    if run_files.state_of(files, run_files.read_status(files)) == "live":
        raise ValueError(f"--resume: {files.root} is running; wait for it, or end it with `paceline runs stop`")
    return run_files.prepare_run_folder(files.root), None


def _first_global_batch(files: RunFiles) -> int | None:
    """The global batch of the run's first start, if it depended on the number of workers."""
    try:
        return load_project(files.config).settings.trainer.global_batch
    except ConfigError:
        return None


def _train(request: RunRequest, num_workers: int) -> int:
    files, project = request.files, request.project
    if not is_worker():
        with attempt(files.config):
            files.config.write_text(show(project), encoding="utf-8")
        with attempt(files.environment):
            run_files.write_json(files.environment, describe_environment(project.folder))
        if not request.quiet:
            print(f"run {formats.one_line(str(files.root))}", flush=True)
    with run_files.running(files):
        max_restarts = project.settings.max_restarts
        launch(train, num_workers, args=(request,), max_restarts=max_restarts, logs=files.ranks)
    if not request.quiet:
        with attempt("the summary"):
            print(f"\n{text(summarize(files))}", flush=True)
    return 0


def _report(text: object, code: int) -> int:
    print(f"paceline train: {formats.printable(str(text))}", file=sys.stderr)
    return code
