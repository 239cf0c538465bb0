"""`paceline runs status`, `save`, `stop`, `leave` and `abort`: requests to running runs, from another terminal."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from paceline.checkpoint.folders import complete_steps, latest, step_folder
from paceline.cli import commands as cli
from paceline.cli.commands import CommandError, choose_run, find_runs
from paceline.observe import formats
from paceline.observe.run_files import RunFiles, last_sign, read_status, state_of
from paceline.run.control import ControlError, NoAnswer, NotListening, ask, socket_path

NOT_RUNNING = 3
ABORT_TIMEOUT_S = 30.0
DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.1
WATCH_S = 1.0
# The shares and waiting times of more workers are not printed.
MAX_WORKERS_SHOWN = 8

_EXIT_CODES = """
exit codes:
  0    done
  1    the run does not answer or refuses, or there is no such run
  2    invalid command line
  3    the run is not running
"""
_NOTE = f"""\
{cli.RUN_NOTE}Requests work on the run's host, for the user who started it.
{_EXIT_CODES}"""
_STOP_NOTE = f"""\
The run finishes its step and saves a checkpoint. `paceline train` then exits
with code 75; --resume continues the run.

{_NOTE}"""
_LEAVE_NOTE = f"""\
The other workers continue, and nothing is computed again. For runs whose
workers may change: `min_workers` in the project file, or --min-workers.

{_NOTE}"""
_ABORT_NOTE = f"""\
Saves nothing: progress since the newest checkpoint is lost. All workers are
killed and not restarted. `paceline train` then exits with code 1, a script
without a launcher with 137.

{_NOTE}"""


def add_parser(commands: Any) -> None:
    examples = ("status", "save 2workers --wait", "stop 2workers")
    group = cli.add_group(commands, "runs", "control running runs: status, save, stop, leave, abort", examples)

    def add(run: cli.Command, name: str, summary: str, notes: str, *examples: str) -> argparse.ArgumentParser:
        parser = cli.add_command(group, name, summary, notes, examples=examples, run=run)
        if name == "status":
            cli.add_run_argument(parser, "the runs (default: all that are running)", nargs="*")
        else:
            cli.add_run_argument(parser, "the run (default: the only one that is running)")
        return parser

    summary = "print step, loss, speed and remaining time"
    parser = add(_status, "status", summary, f"{cli.RUN_NOTE}{_EXIT_CODES}", "", "2workers --json", "--watch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", action="store_true", help="repeat every second until all runs have ended")
    saving = add(_save, "save", "save a checkpoint after the next step", _NOTE, "", "2workers --wait")
    saving.add_argument("--wait", action="store_true", help="wait until the checkpoint is complete, and print its path")
    stopping = add(_stop, "stop", "save and end a run after its next step", _STOP_NOTE, "", "2workers --wait")
    stopping.add_argument("--wait", action="store_true", help="wait until the run has ended, and print how it ended")
    for parser in (saving, stopping):
        what = "with --wait, give up after S seconds (default: %(default)g)"
        parser.add_argument("--timeout", type=cli.seconds, default=DEFAULT_TIMEOUT_S, metavar="S", help=what)
    parser = add(_leave, "leave", "let a worker leave a run after its next step", _LEAVE_NOTE, "2workers --rank 1")
    parser.add_argument("--rank", type=cli.integer(0), required=True, metavar="R", help="the worker's rank")
    parser = add(_abort, "abort", "kill a run without saving", _ABORT_NOTE, "2workers", "2workers -y")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def _status(options: argparse.Namespace) -> int:
    runs = [choose_run(name, options.runs) for name in options.named] or _live_runs(options.runs)
    while True:
        reports = [describe(files) for files in runs]
        if options.watch and sys.stdout.isatty():
            cli.raw(sys.stdout).write("\x1b[H\x1b[2J")  # clear the screen
        if options.json:
            cli.print_json(reports, indent=None if options.watch else 2)
        for i, report in enumerate(() if options.json else reports):
            print(end="\n" if i else "")
            cli.print_fields(_fields(report))
        are_live = [report["state"] == "live" for report in reports]
        if not options.watch:
            return 0 if all(are_live) else NOT_RUNNING
        print(end="" if sys.stdout.isatty() else "\n", flush=True)
        if not any(are_live):
            return 0
        sleep(WATCH_S)


def _check_timeout(options: argparse.Namespace) -> None:
    if not options.wait:
        cli.refuse_ignored(options, ("--timeout",), "without --wait")


def _save(options: argparse.Namespace) -> None:
    _check_timeout(options)
    files = _live_run(options)
    step = int(_request(files, "save")["step"])
    if not options.wait:
        print(f"{files.root.name} saves a checkpoint after step {step + 1} or shortly after it")
        return

    def newest() -> int:
        return max(complete_steps(files.checkpoints), default=-1)

    _poll(lambda: newest() > step or _state(files) != "live", options.timeout)
    has_ended = _state(files) != "live"
    if newest() > step - has_ended:  # a run that is just ending saves its current step, and no later one
        print(step_folder(files.checkpoints, newest()))
    elif has_ended:
        raise CommandError(f"{_not_running(files)}; it did not save step {step}")
    else:
        problem = f"saved no checkpoint after step {step} within {options.timeout:g} s and is still running"
        raise CommandError(f"{files.root.name} {problem}: see {files.ranks / 'rank-0.err'}")


def _stop(options: argparse.Namespace) -> int:
    _check_timeout(options)
    files = _live_run(options)
    step = int(_request(files, "stop")["step"])
    if not options.wait:
        print(f"{files.root.name} saves a checkpoint and ends after step {step + 1} or shortly after it")
        return 0
    _wait_for_end(files, options.timeout, "the request to stop")
    newest = latest(files.checkpoints)
    print(
        f"{files.root.name} {_state_text(describe(files))}{'' if newest is None else f'; newest checkpoint {newest}'}"
    )
    return 0 if _state(files) in ("stopped", "finished") else 1


def _leave(options: argparse.Namespace) -> None:
    files = _live_run(options)
    step = int(_request(files, "leave", rank=options.rank)["step"])
    print(f"rank {options.rank} leaves {files.root.name} after step {step + 1} or shortly after it")


def _abort(options: argparse.Namespace) -> None:
    files = _live_run(options)
    if not options.yes:
        if not sys.stdin.isatty():
            raise CommandError("no terminal to ask for confirmation on: give -y", 2)
        newest = latest(files.checkpoints)
        kept = "it has no checkpoint yet" if newest is None else f"its newest checkpoint is {newest.name}"
        answer = ""
        with suppress(EOFError):  # Ctrl-D
            answer = input(f"abort {files.root.name}? {kept} [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError(f"{files.root.name} was not aborted")
    with suppress(NotListening):  # it may end before it answers
        _request(files, "abort")
    _wait_for_end(files, ABORT_TIMEOUT_S, "the request to abort")
    print(f"{files.root.name} is aborted")


def _state(files: RunFiles) -> str:
    return state_of(files, read_status(files))


def _live_runs(folder: Path) -> list[RunFiles]:
    live = [files for files in find_runs(folder) if _state(files) == "live"]
    if not live:
        raise CommandError(f"no run in {folder} is running (`paceline logs list {folder}` lists all runs)", NOT_RUNNING)
    return live


def _live_run(options: argparse.Namespace) -> RunFiles:
    if options.named is not None:
        files = choose_run(options.named, options.runs)
        if _state(files) != "live":
            raise _not_running(files)
        return files
    live = _live_runs(options.runs)
    if len(live) > 1:
        names = "".join(f"\n  {files.root.name}" for files in live)
        raise CommandError(f"{len(live)} runs are running: choose one of them{names}", 2)
    return live[0]


def _not_running(files: RunFiles) -> CommandError:
    return CommandError(f"{files.root.name} is not running: {_state_text(describe(files))}", NOT_RUNNING)


def _request(files: RunFiles, command: str, **arguments: Any) -> dict[str, Any]:
    """Send a request to a run, and return its answer."""
    status = read_status(files)
    if status is not None and status.host != socket.gethostname():
        raise CommandError(f"{files.root.name} runs on {status.host}: use the command there")
    try:
        return ask(socket_path(files.root), {"command": command, **arguments})
    except NotListening as error:
        if _state(files) != "live":
            raise _not_running(files) from error
        raise NotListening(f"{error}. Runs take requests once their workers have started; try again") from error
    except NoAnswer as error:
        raise NoAnswer(f"{error}; {_kill_hint(files)}") from error


def _kill_hint(files: RunFiles) -> str:
    status = read_status(files)
    return "check its processes" if status is None else f"`kill -9 {status.pid}` ends it and its workers"


def _wait_for_end(files: RunFiles, timeout_s: float, request: str) -> None:
    if not _poll(lambda: _state(files) != "live", timeout_s):
        problem = f"{files.root.name} is still running {timeout_s:g} s after {request}"
        raise CommandError(f"{problem}: {_kill_hint(files)}")


def _poll(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Call `condition` until it is true or the time is over; returns its last result."""
    deadline_s = monotonic() + timeout_s
    while not (is_true := condition()) and monotonic() < deadline_s:
        sleep(POLL_S)
    return is_true


def describe(files: RunFiles) -> dict[str, Any]:
    """A run's status, from the run itself if it answers, else from its files. `state` is as in `paceline logs`.

    `ended` is the time of the last write if the run did not record its end.
    """
    status = read_status(files)
    report: dict[str, Any] = {"run": files.root.name, "folder": str(files.root), "state": state_of(files, status)}
    if status is not None:
        names = ("started", "ended", "reason", "host", "total_steps")
        report |= {name: getattr(status, name) for name in names}
    if report["state"] != "live":
        return report | {"ended": report.get("ended") or last_sign(files)}
    try:
        return report | _request(files, "status")
    except (CommandError, ControlError) as error:
        return report | {"no_answer": str(error)}


def _state_text(report: Mapping[str, Any]) -> str:
    """ "live for 3:05, process 7 on host-1", "finished, at 2026-11-15 12:00:00"."""
    if report["state"] == "live":
        since = f" for {formats.duration(max(time() - report['started'], 0.0))}" if report.get("started") else ""
        return f"live{since}" + (f", process {report['pid']} on {report['host']}" if "pid" in report else "")
    reason = f" ({report['reason']})" if report.get("reason") else ""
    when = "at" if report["state"] in ("finished", "stopped", "failed") else "last write at"
    return f"{report['state']}{reason}, {when} {formats.moment(report['ended'])}"


def _fields(report: Mapping[str, Any]) -> dict[str, str]:
    fields = {"run": str(report["run"]), "state": _state_text(report)}
    if "step" in report:
        total = "" if report.get("total_steps") is None else f" of {report['total_steps']}"
        fields["step"] = f"{report['step']}{total}, epoch {report['epoch']}"
        if report.get("loss") is not None:
            fields["loss"] = f"{formats.loss(float(report['loss']))} at step {report['loss_step']}"
        if report.get("samples_per_s") is not None:
            fields["speed"] = f"{formats.rate(report['samples_per_s'])} samples/s"
        if report.get("eta_s") is not None:
            fields["time left"] = formats.duration(report["eta_s"])
        fields["workers"] = f"{report['workers']}"
        if 1 < len(report.get("shares") or ()) <= MAX_WORKERS_SHOWN:
            fields["workers"] += f", shares {':'.join(map(str, report['shares']))}"
        if 1 < len(report.get("waiting") or ()) <= MAX_WORKERS_SHOWN:
            fields["workers"] += f", waiting {' '.join(f'{part:.0%}' for part in report['waiting'])}"
        fields["checkpoint"] = Path(report["checkpoint"]).name if report.get("checkpoint") else "none yet"
    return fields | ({"no answer": report["no_answer"]} if "no_answer" in report else {})
