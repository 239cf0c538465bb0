"""Metrics as a CSV table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from paceline.observe.json_lines import replace_file


class CsvLogger:
    """One row per logged step, one column per name. A new name adds a column: the file is rewritten and replaced
    atomically.

    start_step: completed steps when the run starts or is resumed; rows of later steps are removed.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        self._columns, rows = _read(path) if path.exists() else (["step"], [])
        self._file = self._rewrite([row for row in rows if int(row["step"]) <= start_step])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._columns and name != "step"]
        if new:
            self._file.close()
            _, rows = _read(self._path)
            self._columns += new
            self._file = self._rewrite(rows)
        csv.writer(self._file).writerow([step if name == "step" else values.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> TextIO:
        """Write these rows; returns the file, open for appending."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(self._path, text.getvalue().encode())
        return self._path.open("a", newline="", encoding="utf-8")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and complete rows: a killed process may leave a partial last line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    columns = list(reader.fieldnames or ["step"])
    if "step" not in columns:
        raise ValueError(f"{path} has no column 'step', so CsvLogger did not write it: choose another file")
    return columns, [row for row in reader if (row["step"] or "").isdecimal() and None not in row.values()]
