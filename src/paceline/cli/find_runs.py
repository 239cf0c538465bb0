"""Finding run folders, and the runs that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from paceline.cli.commands import CommandError
from paceline.observe.run_files import RunFiles, read_status
from paceline.observe.summary import started_at


def find_runs(folder: Path) -> list[RunFiles]:
    """The runs in a folder, the oldest first. Other entries are skipped."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise CommandError(f"{folder} {problem}: choose the folder that holds your runs")
    try:
        runs = [files for path in folder.iterdir() if (files := RunFiles(path)).is_run]
    except OSError as error:
        raise CommandError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(runs, key=lambda files: (started_at(files, read_status(files)) or 0.0, files.root.name))


def choose_run(named: str | None, folder: Path) -> RunFiles:
    """The run with this path, name in `folder`, or unambiguous prefix of a name. None is the newest run."""
    if named is None:
        return all_runs(folder)[-1]
    path = Path(named)
    if RunFiles(path).is_run:
        return RunFiles(path)
    if path.is_dir() and ("/" in named or not folder.is_dir()):
        raise CommandError(f"{path} is not a run: it has neither status.json nor metrics.jsonl")
    runs = find_runs(folder)
    exact = [files for files in runs if files.root.name == named]
    found = exact or [files for files in runs if files.root.name.startswith(named)]
    if len(found) == 1:
        return found[0]
    if found:
        names = "".join(f"\n  {files.root.name}" for files in found)
        raise CommandError(f"{named!r} matches {len(found)} runs: give more of the name{names}")
    nearest = get_close_matches(named, [files.root.name for files in runs], n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise CommandError(f"there is no run {named!r} in {folder}{hint} (`paceline logs list {folder}` lists all runs)")


def choose_runs(named: Sequence[str], folder: Path) -> list[RunFiles]:
    """Several runs by name, without duplicates; the newest run if no name is given."""
    chosen = [choose_run(name, folder) for name in named] or [choose_run(None, folder)]
    return list({files.root.resolve(): files for files in chosen}.values())


def all_runs(folder: Path) -> list[RunFiles]:
    """As `find_runs`, but a folder without runs is an error."""
    runs = find_runs(folder)
    if not runs:
        raise CommandError(f"there is no run in {folder}: a run's folder has a status.json or a metrics.jsonl")
    return runs
