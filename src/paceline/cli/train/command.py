"""`paceline train CONFIG`: from the command line to a run's folder and its workers."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.reader import checkpoint_at
from paceline.cli.commands import INTERRUPTED_EXIT_CODE, CommandError, count, print_message
from paceline.cli.config import ConfigError, Project, load_project, show
from paceline.cli.config.errors import fail
from paceline.cli.train import NEWEST, resume
from paceline.cli.train.display import shown_progress
from paceline.cli.train.dry_run import dry_run, nearest_existing
from paceline.cli.train.user_errors import ProjectError, UserFacingError, in_command_words, user_facing
from paceline.cli.train.worker import RunRequest, train
from paceline.core.errors import WorkerError
from paceline.core.processes import is_worker
from paceline.core.world import device_count, devices
from paceline.observe import formats, run_files
from paceline.observe.best_effort import attempt
from paceline.observe.environment import describe_environment
from paceline.observe.run_files import RUNS_FOLDER, RunFiles
from paceline.observe.summary import summarize
from paceline.observe.summary import text as text_of
from paceline.run.launching.launch import Launch, launch_workers, run_folder, workers_to_start
from paceline.run.launching.worker import STOPPED_EXIT_CODE
from paceline.run.saving.stopping import Stopped

LIVE_FILE = "progress"


def run(options: argparse.Namespace) -> int:
    try:
        _sort_resume(options)
        request = _request(options)
    except (CommandError, ValueError) as error:
        return _report(error, 2)
    except OSError as error:
        return _report(f"cannot create the run's folder: {error.filename}: {error.strerror}", 2)
    num_workers = num_workers_of(request.project)
    try:
        if options.dry_run:
            return dry_run(request.project, num_workers)
        return _train(request, num_workers)
    except KeyboardInterrupt:
        print(end="\n" if sys.stderr.isatty() else "", file=sys.stderr)  # after the ^C that a terminal echoes
        return _report("interrupted before it could save", INTERRUPTED_EXIT_CODE)
    except Stopped:
        return STOPPED_EXIT_CODE
    except (WorkerError, UserFacingError, CheckpointError) as error:
        reason = user_facing(error)
        if not isinstance(reason, ProjectError):
            return _report(reason or error, 1)
        if not (options.dry_run or request.is_resumed or options.run_folder or is_worker()):
            shutil.rmtree(request.files.root, ignore_errors=True)  # or a later --resume would choose it as the newest
        return _report(reason, 2)


def _sort_resume(options: argparse.Namespace) -> None:
    """Give the word after --resume its meaning: argparse takes any for a run."""
    if options.resume not in (None, NEWEST) and not Path(options.resume).is_dir():
        if "=" in options.resume:  # `--resume KEY=VALUE`
            options.overrides.insert(0, options.resume)
            options.resume = NEWEST
        elif options.config is None and Path(options.resume).is_file():  # `--resume CONFIG`
            options.config, options.resume = Path(options.resume), NEWEST
    if options.config is None and options.resume is None:
        raise CommandError("CONFIG is missing: give a project file, or a run with --resume")


def _overrides(options: argparse.Namespace) -> list[str]:
    """All settings of the command line as KEY=VALUE."""
    overrides, devices = list(options.overrides), options.devices
    if options.workers is not None:
        overrides.append(f"workers={options.workers}")
    if devices is not None:
        if devices != "cpu" and not re.fullmatch(r"\d+(,\d+)*", devices):
            raise ValueError(f"-d {devices}: give GPU numbers, such as 0,1, or cpu")
        overrides.append("devices=cpu" if devices == "cpu" else f"devices=[{devices}]")
    for name in ("allow", "skip"):
        if (names := getattr(options, name)) is not None:
            overrides.append(f"checkpoints.{name}=[{names}]")
    return overrides


def checked(project: Project) -> Project:
    """The project, if its paths and GPUs exist. From now on only the GPUs that it chooses are visible."""
    chosen = project.settings.devices
    if chosen is not None and not is_worker():  # also for the workers; CUDA reads the variable when it is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if chosen == "cpu" else ",".join(map(str, chosen))
    problems = [(project.origin(key), f"{key}: {message}") for key, message in _path_problems(project)]
    if problems:
        raise ConfigError(problems)
    return project


def num_workers_of(project: Project) -> int:
    if is_worker():
        workers_to_start(project.settings.workers)  # must not differ from the world's size
        return int(os.environ["WORLD_SIZE"])
    chosen = project.settings.devices
    num_devices = len(chosen) if isinstance(chosen, tuple) else 1 if chosen == "cpu" else device_count()
    return project.settings.workers or num_devices


def _path_problems(project: Project) -> Iterator[tuple[str, str]]:
    """Missing checkpoints and GPUs, and folders that cannot be created."""
    settings, saving = project.settings, project.settings.checkpoints
    starts = {}
    if saving.save and isinstance(saving.resume, str) and saving.resume != "auto":
        starts["checkpoints.resume"] = project.folder / saving.resume
    if saving.init_from is not None:
        starts["checkpoints.init_from"] = project.folder / saving.init_from
    for key, path in starts.items():
        try:
            if key == "checkpoints.resume" or not path.is_file():
                checkpoint_at(path)
        except CheckpointError as error:
            yield key, str(error) if path.exists() else f"nothing at {path}: check the path"
        except OSError as error:
            yield key, f"cannot read {error.filename}: {error.strerror}"
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


def _request(options: argparse.Namespace) -> RunRequest:
    overrides = _overrides(options)
    if options.resume is not None:
        if options.run_folder is not None:
            raise CommandError("--run-folder has no effect with --resume, which continues in the run's own folder")
        return _resumed(options, overrides)
    project = checked(load_project(options.config, overrides))
    project = _resolved(project)
    output = Path(project.settings.output)
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
    return RunRequest(project, files, quiet=options.quiet)


def _resolved(project: Project) -> Project:
    num_workers, least = num_workers_of(project), project.settings.min_workers
    if least is not None and least > num_workers and not is_worker():
        message = f"min_workers is {least}, but the run has {count(num_workers, 'worker')}: choose at most that"
        raise fail(project.origin("min_workers"), message)
    return project.resolve(num_workers)


def _resumed(options: argparse.Namespace, overrides: list[str]) -> RunRequest:
    """The request to resume a run with its own settings. Prints the settings that differ now."""
    given = None
    if options.config is not None:
        with suppress(ConfigError):  # it is only compared, and may no longer be valid
            given = load_project(options.config, overrides)
    output = Path(RUNS_FOLDER if given is None else given.settings.output)
    config_name = None if options.config is None else options.config.stem
    files, checkpoint = resume.find_run(options.resume, output, config_name)
    if not files.config.is_file() and options.config is not None:  # the run could not write it
        project = before = checked(load_project(options.config, overrides))
        _note(options, f"{files.config} does not exist: the settings of {options.config} are used")
    else:
        project = checked(resume.own_project(files, overrides, options.config))
        before = resume.own_project(files, (), options.config)
    if not project.settings.checkpoints.save:
        raise fail(project.origin("checkpoints.save"), "checkpoints.save is false: --resume needs a saved run")
    num_workers = num_workers_of(project)
    if given is not None:
        with suppress(ConfigError):
            given = given.resolve(num_workers, project.settings.trainer.global_batch)
    for text in resume.differences(before, project, given):
        _note(options, text)
    project = _resolved(project)
    return RunRequest(project, files, is_resumed=True, checkpoint=checkpoint, quiet=options.quiet)


def _leads() -> bool:
    """Whether this process writes the run's files: the command itself, or rank 0 if torchrun has started several."""
    return os.environ.get("RANK", "0") == "0" or not is_worker()


def _note(options: argparse.Namespace, text: str) -> None:
    if not options.quiet and _leads():
        print_message("paceline train", text)


def _train(request: RunRequest, num_workers: int) -> int:
    files, project = request.files, request.project
    is_verbose = _leads() and not request.quiet
    if _leads():
        text = show(project)
        with attempt(files.config):
            is_known = request.is_resumed and files.config.is_file()
            if not is_known or load_project(files.config, folder=project.folder).settings != project.settings:
                files.config.write_text(text, encoding="utf-8")
        with attempt(files.environment):
            environment = {resume.PROJECT_KEY: str(project.path), **describe_environment(project.folder)}
            run_files.write_json(files.environment, environment)
        if is_verbose:
            print(f"run {formats.one_line(str(files.root))}", flush=True)
    try:
        with run_files.running(files) if _leads() else nullcontext():
            _launch(request, num_workers)
    except Stopped:
        if is_verbose and not is_worker():
            named = files.root.name if files.root.parent == Path(RUNS_FOLDER) else str(files.root)
            with suppress(OSError):  # Ctrl-C has also ended `tee`, or the terminal is gone
                print(f"resume it with: paceline train --resume {shlex.quote(named)}", flush=True)
        raise
    if is_verbose:
        with attempt("the summary"):
            print(f"\n{text_of(summarize(files))}", flush=True)
    return 0


def _launch(request: RunRequest, num_workers: int) -> None:
    """Run the workers. Only this process writes to its terminal, also the workers' output."""
    settings = request.project.settings
    if is_worker():
        Launch(1, min_workers=settings.min_workers).warn_if_fixed()
        train(request)
        return
    options = Launch(
        workers_to_start(num_workers),
        settings.max_restarts,
        request.files.ranks,
        is_command=True,
        min_workers=settings.min_workers,
        stall_s=settings.stall_s,
        is_quiet=request.quiet,
    )
    with run_folder() as folder, shown_progress(folder / LIVE_FILE) as display:
        if display is None:
            launch_workers(train, (request,), {}, options)
        else:
            request = replace(request, live_file=folder / LIVE_FILE)
            launch_workers(train, (request,), {}, options, display.update)


def _report(text: object, code: int) -> int:
    print_message("paceline train", in_command_words(str(text)))
    return code
