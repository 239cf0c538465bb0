"""Which worker failed first, and the one error that says so."""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import WorkerError
from paceline.run.stopping import Stopped
from paceline.run.worker import (
    COMMUNICATION,
    FAILED,
    INTERRUPTED,
    LAUNCHING_FILES,
    NO_PROGRESS,
    STOPPED,
    report_file,
    stack_file,
)

_HINTS = {
    signal.SIGKILL: "out of memory? `dmesg` shows what the kernel killed",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up; its message is on stderr",
    signal.SIGBUS: "out of shared memory? `df /dev/shm` shows it",
}
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def read_reports(folder: Path, num_workers: int) -> dict[int, dict[str, Any]]:
    """How the workers say they ended, by rank; one that is running or was killed has said nothing."""
    paths = {rank: report_file(folder, rank) for rank in range(num_workers)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def first_failure(
    folder: Path, num_workers: int, exit_codes: Mapping[int, int], ended_by_us: Collection[int]
) -> BaseException | None:
    """The error to raise; None if all went well.

    `exit_codes` holds the workers that ended with an error, in the order they were noticed, negative for a signal.
    A worker's own exception comes first, then a death nobody here caused, then failed exchanges, which are mostly
    echoes of somebody's end; SIGTERM comes last, since with it the agent ends the others.
    """
    reports = read_reports(folder, num_workers)
    outcomes = (FAILED, NO_PROGRESS, COMMUNICATION, INTERRUPTED, STOPPED)
    told = {outcome: _by_time(reports, outcome) for outcome in outcomes}
    silent = [rank for rank in exit_codes if rank not in reports and rank not in ended_by_us]
    dead = [rank for rank in silent if exit_codes[rank] != -signal.SIGTERM]
    deaths = {rank: _death(folder, rank, exit_codes[rank]) for rank in dead}

    if told[FAILED]:
        return _raised(told[FAILED][0], reports, [error.args[0] for error in deaths.values()])
    if deaths:
        return next(iter(deaths.values()))
    if told[NO_PROGRESS]:
        return _raised(told[NO_PROGRESS][0], reports)
    if told[COMMUNICATION]:
        return _raised(told[COMMUNICATION][0], reports)
    if told[INTERRUPTED]:
        return KeyboardInterrupt()
    if told[STOPPED]:
        return Stopped(reports[told[STOPPED][0]]["step"])
    if silent:
        return _death(folder, silent[0], exit_codes[silent[0]])
    return None


def _by_time(reports: Mapping[int, dict[str, Any]], outcome: str) -> list[int]:
    ranks = [rank for rank, report in reports.items() if report["outcome"] == outcome]
    return sorted(ranks, key=lambda rank: float(reports[rank]["time_s"]))


def _raised(rank: int, reports: Mapping[int, dict[str, Any]], remarks: Collection[str] = ()) -> WorkerError:
    report = reports[rank]
    parts = [f"rank {rank} failed: {report['summary']}", report["traceback"].rstrip()]
    for peer, stack in report["peers"].items():
        if stack:
            parts.append(f"rank {peer} is still running and stands at:\n{_readable(stack)}")
        else:
            parts.append(f"rank {peer} is still running and does not say where: stopped, or not yet started")
    return WorkerError("\n\n".join([*parts, *remarks]), rank=rank, traceback_text=report["traceback"])


def _death(folder: Path, rank: int, exit_code: int) -> WorkerError:
    """The error for a worker that ended without a word of its own."""
    if exit_code >= 0:
        return WorkerError(f"rank {rank} exited with code {exit_code} before its work was done", rank=rank)
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = f" ({_HINTS[signal.Signals(number)]})" if number in _HINTS else ""
    path = stack_file(folder, rank)
    stack = _readable(path.read_text(errors="replace")) if path.exists() else ""
    where = f"\n\nit stood at:\n{stack}" if stack else ""
    return WorkerError(f"rank {rank} was killed by {name}{hint}{where}", rank=rank, traceback_text=stack)


def _readable(stack: str) -> str:
    """The user's frames of faulthandler's last dump, in a traceback's order and with their source lines."""
    frames = _FRAME.findall(stack.rpartition("(most recent call first)")[2])
    frames = [(file, int(line), name, None) for file, line, name in frames if file not in LAUNCHING_FILES]
    return "".join(traceback.format_list(frames[::-1])).rstrip()
