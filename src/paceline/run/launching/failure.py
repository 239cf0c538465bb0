"""Which worker failed first, and the one error that says so."""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import WorkerError
from paceline.run.launching.worker import (
    ABORTED,
    COMMUNICATION,
    DONE,
    FAILED,
    INTERRUPTED,
    LAUNCHING_FILES,
    NO_PROGRESS,
    STOPPED,
    report_file,
    stack_file,
)
from paceline.run.saving.stopping import Stopped

_HINTS = {
    signal.SIGKILL: "out of memory? `dmesg` shows what the kernel killed",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up; its message is on stderr",
    signal.SIGBUS: "out of shared memory? `df /dev/shm` shows it",
}
# How workers end without a word of their own.
DIED = "died"
ENDED = "ended"  # by the SIGTERM with which the agent ends the others
ASKED = "asked"  # so was their launcher, by a signal

# What comes first is the cause. Failed exchanges are mostly echoes of somebody's end, here or on another node.
_ORDER = (FAILED, DIED, ABORTED, NO_PROGRESS, ASKED, COMMUNICATION, INTERRUPTED, STOPPED, ENDED)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """How workers failed, in plain values that can be sent to another node. `kind` is one of `_ORDER`."""

    kind: str
    rank: int
    text: str = ""
    traceback_text: str = ""
    step: int = 0

    def error(self) -> BaseException:
        if self.kind == INTERRUPTED:
            return KeyboardInterrupt()
        if self.kind == STOPPED:
            return Stopped(self.step)
        return WorkerError(self.text, rank=self.rank, traceback_text=self.traceback_text)

    def add(self, *remarks: str) -> Ending:
        return replace(self, text="\n\n".join([self.text, *remarks]))


def first(endings: Iterable[Ending]) -> Ending | None:
    """The cause among the endings of one start; of several of a kind the one that stands first."""
    return min(endings, key=lambda ending: _ORDER.index(ending.kind), default=None)


def read_reports(folder: Path, num_workers: int, first_rank: int = 0) -> dict[int, dict[str, Any]]:
    """How this node's workers say they ended, by rank; one that is running or was killed has said nothing."""
    paths = {rank: report_file(folder, rank) for rank in range(first_rank, first_rank + num_workers)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def first_failure(
    folder: Path, num_workers: int, exit_codes: Mapping[int, int], ended_by_us: Collection[int], first_rank: int = 0
) -> BaseException | None:
    """The error to raise for the workers of this node; None if all went well. See `first_ending`."""
    ending = first_ending(folder, num_workers, exit_codes, ended_by_us, first_rank)
    return None if ending is None else ending.error()


def first_ending(
    folder: Path, num_workers: int, exit_codes: Mapping[int, int], ended_by_us: Collection[int], first_rank: int = 0
) -> Ending | None:
    """How the workers of this node failed; None if all went well.

    `exit_codes` holds the workers that ended with an error, in the order they were noticed, negative for a signal.
    """
    reports = read_reports(folder, num_workers, first_rank)
    silent = [rank for rank in exit_codes if rank not in reports and rank not in ended_by_us]
    deaths = [_death(folder, rank, exit_codes[rank]) for rank in silent]
    told = sorted((rank for rank in reports if reports[rank]["outcome"] != DONE), key=lambda r: reports[r]["time_s"])
    ending = first([*(_told(rank, reports[rank]) for rank in told), *deaths])
    if ending is None or ending.kind != FAILED:
        return ending
    return ending.add(*(death.text for death in deaths if death.kind == DIED))


def _told(rank: int, report: Mapping[str, Any]) -> Ending:
    parts = [f"rank {rank} failed: {report['summary']}", report["traceback"].rstrip()]
    for peer, stack in report["peers"].items():
        if stack:
            parts.append(f"rank {peer} is still running and stands at:\n{_readable(stack)}")
        else:
            parts.append(f"rank {peer} is still running and does not say where: stopped, or not yet started")
    return Ending(report["outcome"], rank, "\n\n".join(parts), report["traceback"], report.get("step", 0))


def _death(folder: Path, rank: int, exit_code: int) -> Ending:
    """The ending of a worker without a word of its own."""
    if exit_code >= 0:
        return Ending(DIED, rank, f"rank {rank} exited with code {exit_code} before its work was done")
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = f" ({_HINTS[signal.Signals(number)]})" if number in _HINTS else ""
    path = stack_file(folder, rank)
    stack = _readable(path.read_text(errors="replace")) if path.exists() else ""
    where = f"\n\nit stood at:\n{stack}" if stack else ""
    kind = ENDED if number == signal.SIGTERM else DIED
    return Ending(kind, rank, f"rank {rank} was killed by {name}{hint}{where}", stack)


def _readable(stack: str) -> str:
    """The user's frames of faulthandler's last dump, in a traceback's order and with their source lines."""
    frames = _FRAME.findall(stack.rpartition("(most recent call first)")[2])
    frames = [(file, int(line), name, None) for file, line, name in frames if file not in LAUNCHING_FILES]
    return "".join(traceback.format_list(frames[::-1])).rstrip()
