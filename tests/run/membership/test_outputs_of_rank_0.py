"""Rank 0 is lost: the next one goes on with the run folder, its metrics without a hole or a double line."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from elastic_runs import Case, Death, Points, check, expected, launch, loop

import paceline as pl
from paceline.core.events import Events
from paceline.core.world import World
from paceline.observe.json_lines import LineReader
from paceline.observe.loggers import Loggers
from paceline.observe.metrics import read_curves
from paceline.observe.run_files import RunFiles, read_status, state_of
from paceline.run.launching.output import LOGS_VARIABLE
from paceline.run.monitor import MainMonitor, Monitor
from paceline.run.step.hooks import Hooks

LOG_EVERY = 2


def train(here: Points, trainer: pl.Trainer, folder: str) -> None:
    """A worker that dies at such a point lets the others complete their step first."""

    def die_after_others(name: str, step: int) -> None:
        if here.will_die(name, step):
            for rank in range(1, trainer.world.size):
                while not (Path(folder) / f"completed-{rank}-{step + 1}").exists():
                    time.sleep(0.001)
        here(name, step)

    trainer.on_gradients(lambda _: die_after_others("update", trainer.position.step))
    trainer.every(1, lambda record: (Path(folder) / f"completed-{trainer.world.rank}-{record.step}").touch())
    loop(here, trainer)


def lines(files: RunFiles) -> list[dict[str, Any]]:
    return [line for line in LineReader(files.metrics).read() if "loss" in line]


def test_the_next_rank_0_records_the_run(tmp_path: Path) -> None:
    """One dies before it has logged a step that the others have completed, one in the middle of a step."""
    (tmp_path / "marks").mkdir()
    recording = {"run": pl.Recording(tmp_path, name="disturbed", log_every=LOG_EVERY, quiet=True)}
    deaths = [Death(0, "update", 1), Death(1, step=4)]
    case = Case(deaths, recording, train=partial(train, folder=str(tmp_path / "marks")))
    [outcomes] = launch([case], 3)
    alone = {"run": pl.Recording(tmp_path, name="alone", log_every=LOG_EVERY, quiet=True)}
    want = expected(Case((), alone, train=partial(train, folder=str(tmp_path / "marks"))))
    check(outcomes, want, 1)
    files = RunFiles(tmp_path / "disturbed")
    assert read_status(files) is not None
    assert state_of(files, read_status(files)) == "finished"
    found, undisturbed = read_curves(files.metrics), read_curves(RunFiles(tmp_path / "alone").metrics)
    steps = undisturbed.series("loss")[0].tolist()
    assert steps == [1, 2, 4, 6]
    for name in ("loss", "samples", "lr", "epoch"):
        of_step = dict(zip(*(each.tolist() for each in found.series(name)), strict=True))
        assert [of_step.get(step) for step in steps] == undisturbed.series(name)[1].tolist(), name
    assert max(Counter(line["step"] for line in lines(files)).values()) == 1
    events = [line for line in LineReader(files.events).read() if line["event"] == "world"]
    assert [event["details"]["left"] for event in events] == [[0], [0]]


def test_the_next_rank_0_shows_the_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Here and in the file of rank 0's output, which `paceline train` shows: the loss of the worker, and the end."""
    recording = {"quiet": False, "run": pl.Recording(tmp_path, name="run", log_every=LOG_EVERY)}
    case = Case([Death(0, step=2)], recording)
    [outcomes] = launch([case], 3, logs=tmp_path / "logs")
    shown = capfd.readouterr().out
    assert (tmp_path / "logs" / "rank-0.out").read_text() in shown
    steps = [line.split()[1] for line in shown.splitlines() if line.startswith("step ")]
    assert [steps[0], steps[-1]] == ["1/6", "6/6"], shown
    assert steps == sorted(set(steps)), "no step twice"
    [moved] = [number for number, line in enumerate(shown.splitlines()) if "rank 0 was killed by SIGKILL" in line]
    last = next(number for number, line in enumerate(shown.splitlines()) if "6/6" in line)
    assert moved < last
    assert [outcome["member"][0] for outcome in outcomes] == [1, 2]


def test_the_next_rank_0_needs_no_output_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk was full, or its host had another one."""
    monitor: Any = object.__new__(Monitor)
    monitor._files, monitor._logged_step, monitor.loggers = RunFiles(tmp_path), 0, Loggers([])
    monitor.note = lambda _: None
    run = SimpleNamespace(world=World(), rejoining=object(), loop=SimpleNamespace(hooks=Hooks(lambda: None, Any)))
    run.world, run.events = World(rank=1, size=2), Events()
    next_one = MainMonitor(cast("Any", run), cast("Any", SimpleNamespace(has_tokens=False)), lambda: monitor)
    run.world = World()
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.warns(UserWarning, match=r"cannot be written, training continues: FileNotFoundError") as warned:
        run.events.emit("world", generation=1, size=1, left=[0], joined=[], reason="died", seconds=0.1)
    assert len(warned) == 2
    assert next_one._monitor is monitor
