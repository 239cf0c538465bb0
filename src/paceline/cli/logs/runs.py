"""Which run folders there are, and which one somebody means."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from paceline.observe.run_files import RUNS_FOLDER, RunFiles, read_status
from paceline.observe.summary import started_at


class LogsError(Exception):
    """What the user should know instead of a traceback."""


def find_runs(folder: Path) -> list[RunFiles]:
    """The runs in a folder, the oldest first. Other things in there are passed over."""
    if not folder.is_dir():
        raise LogsError(
            f"there is no folder {folder}: name the one with your runs, or train first"
            if not folder.exists()
            else f"{folder} is no folder: name the one with your runs"
        )
    try:
        runs = [files for path in folder.iterdir() if (files := RunFiles(path)).is_run]
    except OSError as error:
        raise LogsError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(runs, key=lambda files: (started_at(files, read_status(files)) or 0.0, files.root.name))


def choose_run(named: str | None, folder: Path = Path(RUNS_FOLDER)) -> RunFiles:
    """A run by its path, its name in `folder`, or a beginning of that which no other run has; None: the newest."""
    if named is None:
        return _newest(folder)
    path = Path(named)
    if RunFiles(path).is_run:
        return RunFiles(path)
    if path.is_dir() and ("/" in named or not folder.is_dir()):
        raise LogsError(f"{path} is no run: it has neither status.json nor metrics.jsonl")
    runs = find_runs(folder)
    exact = [files for files in runs if files.root.name == named]
    beginning = [files for files in runs if files.root.name.startswith(named)]
    found = exact or beginning
    if len(found) == 1:
        return found[0]
    raise LogsError(_several(named, found) if found else _none(named, folder, runs))


def choose_runs(named: Sequence[str], folder: Path, *, all_of_them: bool) -> list[RunFiles]:
    """The runs that were named, each once; all; or the newest."""
    if all_of_them:
        runs = find_runs(folder)
        if not runs:
            raise LogsError(_no_runs(folder))
        return runs
    chosen = [choose_run(name, folder) for name in named] or [choose_run(None, folder)]
    return list({files.root.resolve(): files for files in chosen}.values())


def _newest(folder: Path) -> RunFiles:
    runs = find_runs(folder)
    if not runs:
        raise LogsError(_no_runs(folder))
    return runs[-1]


def _no_runs(folder: Path) -> str:
    return f"there is no run in {folder}: a run's folder has a status.json or a metrics.jsonl"


def _several(named: str, found: Sequence[RunFiles]) -> str:
    names = "\n".join(f"  {files.root.name}" for files in found[-10:])
    more = f"\n  and {len(found) - 10} older ones" if len(found) > 10 else ""
    return f"{named!r} could be any of {len(found)} runs: write more of the name\n{names}{more}"


def _none(named: str, folder: Path, runs: Sequence[RunFiles]) -> str:
    nearest = get_close_matches(named, [files.root.name for files in runs], n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"there is no run {named!r} in {folder}{hint} (`paceline logs list {folder}` shows all)"
