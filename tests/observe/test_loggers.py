"""Loggers: tables, TensorBoard, services, and what happens when one of them fails."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from paceline.observe.loggers import (
    LOGGER_NAMES,
    CsvLogger,
    Loggers,
    MlflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    make_logger,
)
from paceline.observe.metrics import MetricsWriter, read_curves
from paceline.observe.run_files import RunFiles, prepare_run_folder


class Remembering:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.num_closed += 1


class Failing(Remembering):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        raise ConnectionError("no network")


class Counting(Remembering):
    def state_dict(self) -> dict[str, Any]:
        return {"lines": len(self.logged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.logged = [(0, {})] * state["lines"]


def test_loggers_receive_numbers_under_flat_names() -> None:
    logger = Remembering()
    loggers = Loggers([logger])
    others = {"note": "text", "lr": None, "is_skipped": True, "weights": torch.ones(2)}
    loggers.log(3, {"loss": torch.tensor(2.0), "eval": {"loss": np.float32(1.5)}, "shares": [6, 2], **others})
    assert logger.logged == [(3, {"loss": 2.0, "eval/loss": 1.5, "shares/0": 6, "shares/1": 2})]
    loggers.close()
    loggers.close()
    assert logger.num_closed == 1


def test_a_logger_that_raises_is_switched_off_with_one_warning() -> None:
    failing, other = Failing(), Remembering()
    loggers = Loggers([failing, other])
    with pytest.warns(UserWarning, match=r"the logger Failing failed at step 1 .*: ConnectionError: no network"):
        loggers.log(1, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loggers.log(2, {"loss": 1.0})
        loggers.log(3, {"loss": 1.0})
    assert len(failing.logged) == 1
    assert len(other.logged) == 3
    loggers.close()
    assert (failing.num_closed, other.num_closed) == (0, 1)


def test_a_strict_logger_ends_the_run() -> None:
    loggers = Loggers([Failing()], strict=True)
    with pytest.raises(ConnectionError, match="no network"):
        loggers.log(1, {})


def test_state_goes_to_the_logger_it_came_from() -> None:
    first = Loggers([Counting(), Remembering(), Counting()])
    first.log(1, {})
    state = first.state_dict()
    assert state == {"Counting-1": {"lines": 1}, "Counting-2": {"lines": 1}}
    again = [Counting(), Counting()]
    Loggers(again).load_state_dict({**state, "Counting-2": {"lines": 5}, "Gone": {}})
    assert [len(logger.logged) for logger in again] == [1, 5]


def test_state_that_a_logger_cannot_take_does_not_end_the_run() -> None:
    loggers = Loggers([Counting()])
    with pytest.warns(UserWarning, match=r"Counting failed in load_state_dict\(\) and is disabled"):
        loggers.load_state_dict({"Counting": {}})


def test_json_lines_are_a_logger(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    loggers = Loggers([MetricsWriter(path)])
    loggers.log(4, {"eval": {"loss": 0.5}})
    loggers.close()
    assert read_curves(path).last("eval/loss") == 0.5


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_column_may_appear_later(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    logger = CsvLogger(path)
    logger.log(1, {"loss": 2.0})
    logger.log(2, {"loss": 1.0, "eval/loss": math.nan, 'odd, "name"': 3.0})
    logger.log(3, {"eval/loss": 0.5})
    logger.close()
    assert path.read_text().splitlines() == [
        'step,loss,eval/loss,"odd, ""name"""',
        "1,2.0,,",
        "2,1.0,nan,3.0",
        "3,,0.5,",
    ]
    assert [path.name] == [entry.name for entry in tmp_path.iterdir()]


def test_a_csv_column_may_have_any_name(tmp_path: Path) -> None:
    path, name = tmp_path / "m.csv", "a\x0bb\u2028c\nd"
    logger = CsvLogger(path)
    for step in (1, 2):
        logger.log(step, {name: 1.0, f"new in {step}": 2.0})
    logger.close()
    assert [row[name] for row in table(path)] == ["1.0", "1.0"]


def test_a_csv_goes_on_behind_the_step_it_resumes_from(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    first = CsvLogger(path)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step), "lr": 0.5})
    first.close()
    path.write_text(f"{path.read_text()}40,1")  # killed in a line
    second = CsvLogger(path, start_step=20)
    second.log(30, {"loss": 3.0})
    second.close()
    assert [(row["step"], row["loss"], row["lr"]) for row in table(path)] == [
        ("10", "10.0", "0.5"),
        ("20", "20.0", "0.5"),
        ("30", "3.0", ""),
    ]


def test_a_long_csv_goes_on_without_being_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step,loss\r\n" + "".join(f"{step},1.0\r\n" for step in range(1, 20_001)) + "20001,1.", newline="")
    tracemalloc.start()
    logger = CsvLogger(path, start_step=19_999)
    logger.log(20_000, {"loss": 2.0, "lr": 0.5})
    logger.close()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    found = table(path)
    assert (len(found), found[-2]["step"]) == (20_000, "19999")
    assert found[-1] == {"step": "20000", "loss": "2.0", "lr": "0.5"}


def test_a_csv_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("name,age\nann,3\n")
    with pytest.raises(ValueError, match="has no column 'step'"):
        CsvLogger(path)
    assert path.read_text() == "name,age\nann,3\n"


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.num_finished = 0

    def init(self, **settings: Any) -> Any:
        self.inits.append(settings)
        return SimpleNamespace(
            id=settings.get("id", "id-1"),
            log=lambda values, step: self.logged.append((values, step)),
            finish=lambda: setattr(self, "num_finished", self.num_finished + 1),
        )


def test_wandb_begins_with_the_first_numbers_and_goes_on_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = WandbLogger("run-a", {"lr": 0.1}, project="stories")
    assert wandb.inits == []
    logger.log(5, {"loss": 1.0})
    logger.log(6, {"loss": 0.5})
    logger.close()
    assert wandb.inits == [{"name": "run-a", "config": {"lr": 0.1}, "project": "stories"}]
    assert wandb.logged == [({"loss": 1.0}, 5), ({"loss": 0.5}, 6)]
    assert wandb.num_finished == 1
    again = WandbLogger("run-a")
    again.load_state_dict(logger.state_dict())
    again.log(7, {})
    assert wandb.inits[1] == {"name": "run-a", "config": {}, "id": "id-1", "resume": "allow"}


def test_the_next_rank_0_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no checkpoint. A run that starts again, in the same folder, has a new one."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    files = RunFiles(tmp_path)
    for start_step in (0, 7, 0):
        make_logger("wandb", files, start_step).log(start_step + 1, {})
    assert [init.get("id") for init in wandb.inits] == [None, "id-1", None]


class FakeTrackio(ModuleType):
    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **settings: Any) -> Any:
        print("* Trackio project initialized")
        self.calls.append(("init", settings))
        return SimpleNamespace(
            name=settings["name"],
            log=lambda values, step: self.calls.append(("log", values, step)),
            finish=lambda: self.calls.append(("finish",)),
        )


def test_trackio_begins_with_the_first_numbers_and_goes_on_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    logger = TrackioLogger("run-a", {"lr": 0.1}, auto_log_cpu=False)
    assert trackio.calls == []
    logger.log(5, {"loss": 1.0})
    logger.close()
    logger.close()
    settings = {"project": "paceline", "name": "run-a", "config": {"lr": 0.1}, "auto_log_cpu": False}
    assert trackio.calls == [("init", settings), ("log", {"loss": 1.0}, 5), ("finish",)]
    assert capsys.readouterr().out == ""  # stdout may show progress
    again = TrackioLogger("another-folder", project="stories")
    again.load_state_dict(logger.state_dict())
    again.log(6, {})
    resumed = {"project": "stories", "name": "run-a", "config": {}, "resume": "allow"}
    assert trackio.calls[3:] == [("init", resumed), ("log", {}, 6)]


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_stores_what_was_logged(tmp_path: Path) -> None:
    program = """if True:
        import trackio
        from paceline.observe.loggers import TrackioLogger
        from trackio.sqlite_storage import SQLiteStorage

        first = TrackioLogger("run-a", {"lr": 0.1}, auto_log_cpu=False)
        first.log(10, {"loss": 2.0, "eval/loss": 1.5})
        first.close()
        again = TrackioLogger("moved", auto_log_cpu=False)
        again.load_state_dict(first.state_dict())
        again.log(20, {"loss": 1.0, "bad": float("nan")})
        again.close()
        (run,) = trackio.Api().runs("paceline")
        lines = SQLiteStorage.get_logs("paceline", run.name)
        print([(line["step"], line.get("loss"), line.get("eval/loss")) for line in lines])
    """
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("[(10, 2.0, 1.5), (20, 1.0, None)]\n"), done.stderr


class FakeMlflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []

    def MlflowClient(self, tracking_uri: str | None) -> Any:
        calls = self.calls

        class Client:
            def get_experiment_by_name(self, name: str) -> Any:
                return SimpleNamespace(experiment_id="e0") if name == "Default" else None

            def create_experiment(self, name: str) -> str:
                calls.append(("experiment", name))
                return "e1"

            def create_run(self, experiment: str, run_name: str) -> Any:
                calls.append(("run", experiment, run_name, tracking_uri))
                return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

            def log_param(self, run: str, key: str, value: Any) -> None:
                calls.append(("parameter", run, key, value))

            def log_metric(self, run: str, key: str, value: float, step: int) -> None:
                calls.append(("metric", run, key, value, step))

            def update_run(self, run: str, status: str) -> None:
                calls.append(("update", run, status))

            def set_terminated(self, run: str) -> None:
                calls.append(("terminated", run))

        return Client()


def test_mlflow_logs_parameters_and_metrics_and_goes_on_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logger = MlflowLogger("run-a", {"lr": 0.1}, tracking_uri="file:x", experiment="stories")
    assert mlflow.calls == []
    logger.log(5, {"loss": 1.0})
    logger.close()
    logger.close()
    assert mlflow.calls == [
        ("experiment", "stories"),
        ("run", "e1", "run-a", "file:x"),
        ("parameter", "r1", "lr", 0.1),
        ("metric", "r1", "loss", 1.0, 5),
        ("terminated", "r1"),
    ]
    mlflow.calls.clear()
    again = MlflowLogger("run-a", {"lr": 0.1})
    again.load_state_dict(logger.state_dict())
    again.log(6, {"loss": 0.5})
    assert mlflow.calls == [("update", "r1", "RUNNING"), ("metric", "r1", "loss", 0.5, 6)]
    mlflow.calls.clear()
    MlflowLogger("run-b").log(1, {})
    assert mlflow.calls == [("run", "e0", "run-b", None)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_logged_and_later_steps_are_purged_on_resumption(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLogger(tmp_path)
    for step in (10, 20, 30):
        first.log(step, {"loss": float(step), "eval/loss": 1.0})
    first.close()
    second = TensorBoardLogger(tmp_path, start_step=20)
    second.log(30, {"loss": 3.0})
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 10.0), (20, 20.0), (30, 3.0)]


class FakeSummaryWriter:
    made: ClassVar[list[tuple[str, int]]] = []
    scalars: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.made.append((folder, purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_tensorboard_is_told_where_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeSummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logger = TensorBoardLogger(tmp_path, start_step=20)
    logger.log(21, {"eval/loss": 0.5})
    logger.close()
    assert FakeSummaryWriter.made == [(str(tmp_path), 21)]
    assert FakeSummaryWriter.scalars == [("eval/loss", 0.5, 21)]


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return prepare_run_folder(tmp_path / "a")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_extra(name: str, files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{name} is not installed.*pip install 'paceline\[{name}\]'"):
        make_logger(name, files)


def test_something_missing_inside_a_package_is_not_taken_for_the_package(
    files: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match="No module named 'something_it_needs'"):
        make_logger("wandb", files)


def test_loggers_are_made_by_name(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setitem(sys.modules, "mlflow", FakeMlflow())
    monkeypatch.setitem(sys.modules, "trackio", FakeTrackio())
    make_logger("csv", files).close()
    assert (files.root / "metrics.csv").is_file()
    assert isinstance(make_logger("wandb", files, config={"a": 1}, project="p"), WandbLogger)
    assert isinstance(make_logger("mlflow", files, experiment="e"), MlflowLogger)
    assert isinstance(make_logger("trackio", files, project="p"), TrackioLogger)
    assert LOGGER_NAMES == ("csv", "tensorboard", "wandb", "mlflow", "trackio")


def test_wrong_names_and_settings_are_errors(files: RunFiles) -> None:
    with pytest.raises(ValueError, match=r"logger 'cvs' is unknown \(did you mean 'csv'\?\): choose one of csv, t"):
        make_logger("cvs", files)
    with pytest.raises(ValueError, match=r"logger 'csv' does not take \{'color': 1\}"):
        make_logger("csv", files, color=1)
