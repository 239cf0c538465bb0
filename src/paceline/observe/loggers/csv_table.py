"""Metrics as a table that spreadsheets open."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO


class CsvLogger:
    """A row per logged step, a column per name. A name that appears later gets a column of its own: the file is
    written anew with the wider header, beside the old one, and takes its place.

    start_step: completed steps when the run starts or goes on; rows of later steps are taken out of an existing file.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        self._columns, rows = _read(path) if path.exists() else (["step"], [])
        self._file = self._rewritten([row for row in rows if int(row["step"]) <= start_step])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._columns and name != "step"]
        if new:
            self._file.close()
            _, rows = _read(self._path)
            self._columns += new
            self._file = self._rewritten(rows)
        csv.writer(self._file).writerow([step if name == "step" else values.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewritten(self, rows: Sequence[Mapping[str, str]]) -> TextIO:
        """The file with these rows, open for more."""
        beside = self._path.with_name(f".{self._path.name}.new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)
        return self._path.open("a", newline="", encoding="utf-8")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and whole rows: the last line of a process that was killed may be a piece."""
    text = path.read_text(encoding="utf-8", errors="replace")
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    columns = list(reader.fieldnames or ["step"])
    if "step" not in columns:
        raise ValueError(f"{path} has no column 'step', so it was not written here: choose another file")
    return columns, [row for row in reader if (row["step"] or "").isdecimal() and None not in row.values()]
