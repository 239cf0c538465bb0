"""`paceline runs status`, `save`, `stop` and `abort`: asking runs that go on, from another terminal."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from paceline.checkpoint.folders import complete_steps, step_folder
from paceline.cli.commands import (
    CommandError,
    add_command,
    add_json_option,
    add_runs_option,
    columns,
    print_raw,
    reporting,
)
from paceline.cli.logs.runs import LogsError, choose_run, find_runs
from paceline.observe import formats
from paceline.observe.json_lines import to_json
from paceline.observe.run_files import RunFiles, last_sign, read_status, state_of
from paceline.run.control import ControlError, NoAnswer, NobodyListens, ask, socket_path

NOT_RUNNING = 3
ABORT_WAIT_S = 30.0
DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.1
WATCH_S = 1.0
# More workers than this are not shown one by one.
MAX_WORKERS_SHOWN = 8

# What runs say of their own end.
_ENDED = ("finished", "stopped", "failed")

_NAMING = """\
RUN is a run's folder, its name, or the beginning of a name that no other
run has; without it, the only run that goes on. A run can be asked on the
host it runs on, by the user who started it.
"""
_EXIT_CODES = """\
exit codes:
  0    done
  1    the run does not answer, refuses, or there is no such run
  2    the command is wrong
  3    the run is not running
"""
_RUNS_EXAMPLE = f"""\
{_NAMING}
{_EXIT_CODES}
example:
  paceline runs status
  paceline runs save 2workers --wait
  paceline runs stop 2workers
"""
_STATUS_EXAMPLE = f"""\
RUN is a run's folder, its name, or the beginning of a name that no other
run has.

{_EXIT_CODES}
example:
  paceline runs status
  paceline runs status 2workers --json
  paceline runs status --watch
"""
_SAVE_EXAMPLE = f"""\
{_NAMING}
{_EXIT_CODES}
example:
  paceline runs save
  paceline runs save 2workers --wait
"""
_STOP_EXAMPLE = f"""\
The step under way is finished and saved. `paceline train` then ends with exit
code 75, and goes on with --resume.

{_NAMING}
{_EXIT_CODES}
example:
  paceline runs stop
  paceline runs stop 2workers --wait
"""
_ABORT_EXAMPLE = f"""\
Nothing is saved: what came after the newest checkpoint is lost. All workers
are ended, and not started again. `paceline train` then ends with exit code 1,
a script without a launcher with 137.

{_NAMING}
{_EXIT_CODES}
example:
  paceline runs abort 2workers
  paceline runs abort 2workers -y
"""


def add_parser(commands: Any) -> None:
    """Add `runs` to the parser's commands; each of its commands sets `run`, a function from options to exit code."""
    runs = add_command(commands, "runs", "ask runs that go on: status, save, stop, abort", _RUNS_EXAMPLE)
    kinds = runs.add_subparsers(metavar="COMMAND", required=True)

    status = add_command(kinds, "status", "tell how runs stand: step, loss, speed, time left", _STATUS_EXAMPLE)
    status.add_argument("named", nargs="*", metavar="RUN", help="the runs (default: all that go on)")
    add_json_option(status)
    status.add_argument("--watch", action="store_true", help="again every second, until all of them have ended")
    add_runs_option(status)
    status.set_defaults(run=reporting("runs status", _status, LogsError))

    save = add_command(kinds, "save", "have a run save a checkpoint after its next step", _SAVE_EXAMPLE)
    _add_run(save)
    _add_waiting(save, "wait until the checkpoint is complete, and print its path")
    save.set_defaults(run=reporting("runs save", _save, LogsError))

    stop = add_command(kinds, "stop", "have a run save and end after its next step", _STOP_EXAMPLE)
    _add_run(stop)
    _add_waiting(stop, "wait until the run has ended, and say how")
    stop.set_defaults(run=reporting("runs stop", _stop, LogsError))

    abort = add_command(kinds, "abort", "end a run at once, without saving", _ABORT_EXAMPLE)
    _add_run(abort)
    abort.add_argument("-y", "--yes", action="store_true", help="do not ask whether you are sure")
    abort.set_defaults(run=reporting("runs abort", _abort, LogsError))


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("named", nargs="?", metavar="RUN", help="the run (default: the only one that goes on)")
    add_runs_option(parser)


def _add_waiting(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--wait", action="store_true", help=what)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="with --wait, give up after so many seconds (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: choose a number of seconds above 0")
    return seconds


# Commands


def _status(options: argparse.Namespace) -> int:
    runs = [choose_run(name, options.runs) for name in options.named] or _live_runs(options.runs)
    if not runs:
        raise CommandError(_none_live(options.runs), NOT_RUNNING)
    reports = [describe(files) for files in runs]
    while options.watch:
        # On a terminal from the top of an empty screen.
        start, end = ("\x1b[H\x1b[2J", "\n") if sys.stdout.isatty() else ("", "\n\n")
        print_raw(start)
        print(_render(reports, as_json=options.json, indent=None), end=end, flush=True)
        if all(report["state"] != "live" for report in reports):
            return 0
        sleep(WATCH_S)
        reports = [describe(files) for files in runs]
    print(_render(reports, as_json=options.json, indent=2))
    return 0 if all(report["state"] == "live" for report in reports) else NOT_RUNNING


def _save(options: argparse.Namespace) -> int:
    files = _live_run(options)
    before = int(_ask(files, "save")["step"])
    if not options.wait:
        print(f"{files.root.name} saves after step {before + 1} or one of the next")
        return 0
    deadline_s = monotonic() + options.timeout
    while monotonic() < deadline_s:
        is_live = _state(files) == "live"
        # A run that ends just now saves the step it ends with, and no later one.
        steps = [step for step in complete_steps(files.checkpoints) if step > before - (not is_live)]
        if steps:
            print(step_folder(files.checkpoints, steps[-1]))
            return 0
        if not is_live:
            raise CommandError(f"{_not_running(files)}; there is no checkpoint of step {before} or later")
        sleep(POLL_S)
    raise CommandError(
        f"no checkpoint of a step after {before} was there within {options.timeout:g} s; the run goes on, "
        f"{files.ranks / 'rank-0.err'} may say why"
    )


def _stop(options: argparse.Namespace) -> int:
    files = _live_run(options)
    step = int(_ask(files, "stop")["step"])
    if not options.wait:
        print(f"{files.root.name} saves and ends after step {step + 1} or one of the next")
        return 0
    if not _wait_for_end(files, options.timeout):
        raise CommandError(f"{files.root.name} was asked to stop, and still runs after {options.timeout:g} s")
    steps = complete_steps(files.checkpoints)
    saved = f"; newest checkpoint {step_folder(files.checkpoints, steps[-1])}" if steps else ""
    print(f"{files.root.name} {_ending(files)}{saved}")
    return 0 if _state(files) in ("stopped", "finished") else 1


def _abort(options: argparse.Namespace) -> int:
    files = _live_run(options)
    if not options.yes and not _is_sure(files):
        print(f"{files.root.name} goes on", file=sys.stderr)
        return 1
    with suppress(NobodyListens):  # it may be gone before it has said so
        _ask(files, "abort")
    if not _wait_for_end(files, ABORT_WAIT_S):
        raise CommandError(f"{files.root.name} still runs after {ABORT_WAIT_S:g} s: {_kill_hint(files)}")
    print(f"{files.root.name} is aborted")
    return 0


def _is_sure(files: RunFiles) -> bool:
    if not sys.stdin.isatty():
        raise CommandError("nobody can be asked whether you are sure: give -y", 2)
    steps = complete_steps(files.checkpoints)
    kept = f"its newest checkpoint is of step {steps[-1]}" if steps else "it has no checkpoint yet"
    answer = input(f"end {files.root.name} at once? {kept} [y/N] ")
    return answer.strip().lower() in ("y", "yes")


# Which run


def _live_runs(folder: Path) -> list[RunFiles]:
    return [files for files in find_runs(folder) if _state(files) == "live"]


def _live_run(options: argparse.Namespace) -> RunFiles:
    """The one that is meant, which goes on."""
    if options.named is not None:
        files = choose_run(options.named, options.runs)
        if _state(files) != "live":
            raise CommandError(f"{files.root.name} is {_not_running(files)}", NOT_RUNNING)
        return files
    live = _live_runs(options.runs)
    if not live:
        raise CommandError(_none_live(options.runs), NOT_RUNNING)
    if len(live) > 1:
        names = "\n".join(f"  {files.root.name}" for files in live)
        raise CommandError(f"{len(live)} runs go on: name one of them\n{names}", 2)
    return live[0]


def _none_live(folder: Path) -> str:
    return f"no run in {folder} is running (`paceline logs list {folder}` shows all that there are)"


# How it stands


def describe(files: RunFiles) -> dict[str, Any]:
    """How a run stands: in its own words if it answers, else from its files. `state` is that of `paceline logs`.

    `ended` is when it last gave a sign if it did not say.
    """
    status = read_status(files)
    state = state_of(files, status)
    report: dict[str, Any] = {"run": files.root.name, "folder": str(files.root), "state": state}
    if status is not None:
        report |= {"started": status.started, "ended": status.ended, "reason": status.reason, "host": status.host}
        report |= {"total_steps": status.total_steps}
    if state != "live":
        return report | {"ended": report.get("ended") or last_sign(files)}
    try:
        return report | _ask(files, "status")
    except (CommandError, ControlError) as error:
        return report | {"no_answer": str(error)}


def _state(files: RunFiles) -> str:
    return state_of(files, read_status(files))


def _ask(files: RunFiles, command: str) -> dict[str, Any]:
    status = read_status(files)
    if status is not None and status.host != socket.gethostname():
        raise CommandError(f"{files.root.name} runs on {status.host}: give the command there")
    try:
        return ask(socket_path(files.root), {"command": command})
    except NobodyListens as error:
        if _state(files) != "live":
            raise CommandError(f"{files.root.name} is {_not_running(files)}", NOT_RUNNING) from error
        raise NobodyListens(f"{error}. A run can be asked once its workers have started; try again") from error
    except NoAnswer as error:
        raise NoAnswer(f"{error}; {_kill_hint(files)}") from error


def _not_running(files: RunFiles) -> str:
    return f"not running: {_ending(files)}"


def _ending(files: RunFiles) -> str:
    """How and when the run ended: "finished at 2026-11-15 12:00:00"."""
    return _state_text(describe(files))


def _wait_for_end(files: RunFiles, timeout_s: float) -> bool:
    deadline_s = monotonic() + timeout_s
    while _state(files) == "live":
        if monotonic() > deadline_s:
            return False
        sleep(POLL_S)
    return True


def _kill_hint(files: RunFiles) -> str:
    status = read_status(files)
    return "look at its processes" if status is None else f"`kill -9 {status.pid}` ends it, workers and all"


# In words


def _render(reports: Sequence[Mapping[str, Any]], *, as_json: bool, indent: int | None) -> str:
    if not as_json:
        return "\n\n".join(_text(report) for report in reports)
    documents = [json.loads(to_json(report)) for report in reports]
    return json.dumps(documents, indent=indent, ensure_ascii=False)


def _text(report: Mapping[str, Any]) -> str:
    rows = [("run", str(report["run"])), ("state", _state_text(report))]
    if "step" in report:
        rows += _progress_rows(report)
    if "no_answer" in report:
        rows.append(("no answer", report["no_answer"]))
    return columns(rows)


def _state_text(report: Mapping[str, Any]) -> str:
    if report["state"] == "live":
        since = f" for {formats.duration(time() - report['started'])}" if report.get("started") else ""
        return f"live{since}" + (f", process {report['pid']} on {report['host']}" if "pid" in report else "")
    reason = f" ({report['reason']})" if report.get("reason") else ""
    when = formats.moment(report["ended"])
    return f"{report['state']}{reason}, {'at' if report['state'] in _ENDED else 'last sign at'} {when}"


def _progress_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = report.get("total_steps")
    rows = [("step", f"{report['step']}{'' if total is None else f' of {total}'}, epoch {report['epoch']}")]
    if report.get("loss") is not None:
        rows.append(("loss", f"{formats.loss(float(report['loss']))} at step {report['loss_step']}"))
    if report.get("samples_per_s") is not None:
        rows.append(("speed", f"{formats.rate(report['samples_per_s'])} samples/s"))
    if report.get("eta_s") is not None:
        rows.append(("time left", formats.duration(report["eta_s"])))
    rows.append(("workers", _workers_text(report)))
    rows.append(("checkpoint", Path(report["checkpoint"]).name if report.get("checkpoint") else "none yet"))
    return rows


def _workers_text(report: Mapping[str, Any]) -> str:
    shares, waiting = report.get("shares") or (), report.get("waiting") or ()
    text = f"{report['workers']}"
    if 1 < len(shares) <= MAX_WORKERS_SHOWN:
        text += f", shares {':'.join(map(str, shares))}"
    if 1 < len(waiting) <= MAX_WORKERS_SHOWN:
        text += f", waiting {' '.join(f'{part:.0%}' for part in waiting)}"
    return text
