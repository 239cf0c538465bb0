"""Reading workers' files: whatever is in them, torn, condensed, or still being written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.json_lines import LineReader
from paceline.observe.timeline.condensing import Stretch
from paceline.observe.timeline.layout import FILES, FOLDER, KINDS, SAMPLED, VERSION, end_of


@dataclass
class Session:
    """One process's part of a run, as it was recorded; see `layout`. `end`: None unless the process said it ended."""

    rank: int
    size: int
    host: str
    device: str
    unix_time: float
    steps: list[list[int]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)
    samples: list[list[Any]] = field(default_factory=list)
    end: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if isinstance(line.get("end"), int):
            self.end = line["end"]
        self.steps += _rows(line.get("steps"), _is_step)
        self.spans += _rows(line.get("spans"), _is_span)
        self.stretches += _rows(line.get("stretches"), _is_stretch)
        self.events += _rows(line.get("events"), _is_event)
        self.samples += _rows(line.get("samples"), _is_sample)

    @property
    def last_sign(self) -> int:
        """The end, or the last thing it wrote down."""
        ends = [self.end or 0, *(stretch[4] for stretch in self.stretches[-1:]), *map(end_of, self.steps[-1:])]
        ends += [row[0] for row in self.samples[-1:]] + [row[2] for row in self.events[-1:]]
        ends += [start + duration for _, _, start, duration in self.spans[-1:]]
        return int(max(ends))


def timeline_files(folder: Path) -> list[Path]:
    """The workers' files in a run's folder, or in the folder that was given as `timeline`."""
    return sorted((folder / FOLDER).glob(FILES)) or sorted(folder.glob(FILES))


def read_sessions(files: Iterable[Path]) -> list[Session]:
    """All workers' sessions, by rank and time."""
    sessions = [session for path in files for session in _read(path)]
    return sorted(sessions, key=lambda session: (session.rank, session.unix_time))


def _read(path: Path) -> list[Session]:
    sessions: list[Session] = []
    for line in LineReader(path).read():
        if "session" in line:
            sessions.append(_begun(line["session"], path))
        elif sessions:
            sessions[-1].add(line)
    return sessions


def _begun(header: Any, path: Path) -> Session:
    try:
        if header["version"] != VERSION:
            raise ValueError(
                f"{path} has version {header['version']}, this paceline reads version {VERSION}: use the paceline "
                "that recorded it"
            )
        return Session(
            int(header["rank"]),
            int(header["size"]),
            str(header["host"]),
            str(header["device"]),
            float(header["unix_time"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no timeline: its first line does not say whose it is") from error


def _rows(rows: Any, is_known: Any) -> list[Any]:
    return [row for row in rows if isinstance(row, list) and is_known(row)] if isinstance(rows, list) else []


def _are_whole(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


def _is_step(row: list[Any]) -> bool:
    # step, start, and one duration less than moments: 5 of them without a pass, 3 more with each.
    return len(row) >= 7 and (len(row) - 7) % 3 == 0 and _are_whole(row)


def _is_span(row: list[Any]) -> bool:
    return len(row) == 4 and row[0] in KINDS and _are_whole(row[1:])


def _is_stretch(row: list[Any]) -> bool:
    return len(row) == 5 + len(KINDS) and _are_whole(row)


def _is_event(row: list[Any]) -> bool:
    return len(row) == 4 and isinstance(row[0], str) and _are_whole(row[1:3]) and isinstance(row[3], dict)


def _is_sample(row: list[Any]) -> bool:
    return len(row) == 2 + len(SAMPLED) and all(value is None or isinstance(value, int | float) for value in row)
