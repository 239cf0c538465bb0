"""Teams of workers in processes of their own: they take turns, and one's failure ends the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from bench import teams
from bench.teams import Team, Turns, run_teams
from bench.workers import gloo_group


def note(folder: Path, name: str, num_turns: int, turns: Turns) -> tuple[int, dict[str, list[float]]]:
    """Begin and end of each of this worker's turns, in a file per team; its process, and what it measured."""

    def measured() -> float:
        with (folder / f"{name} {distributed.get_rank()}").open("a") as file:
            begin = time.monotonic()
            time.sleep(0.05)
            print(begin, time.monotonic(), file=file)
        return 7.0

    with gloo_group():
        return os.getpid(), turns.alternate(lambda: {name: measured}, num_turns)


def turns_in(file: Path) -> list[tuple[float, ...]]:
    return [tuple(map(float, line.split())) for line in file.read_text().splitlines()]


def test_teams_alternate_and_never_overlap(tmp_path: Path) -> None:
    one, two = run_teams(Team(note, 1, (tmp_path, "one", 3)), Team(note, 2, (tmp_path, "two", 3)))
    assert [measured for _, measured in one] == [{"one": [7.0] * 3}]
    assert [measured for _, measured in two] == [{"two": [7.0] * 3}] * 2
    assert len({pid for pid, _ in one + two}) == 3
    first = turns_in(tmp_path / "one 0")
    for rank in range(2):
        second = turns_in(tmp_path / f"two {rank}")
        moments = [moment for pair in zip(first, second, strict=True) for turn in pair for moment in turn]
        assert moments == sorted(moments)


def fail(*_: Any) -> None:
    raise KeyError("what went wrong")


def test_a_team_that_fails_ends_the_other(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)worker 0 of 1 failed: .*KeyError: 'what went wrong'"):
        run_teams(Team(fail, 1, ()), Team(note, 2, (tmp_path, "two", 3)))
    assert time.monotonic() - started < teams.TIMEOUT_S / 2
