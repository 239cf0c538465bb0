"""Logging never ends a run: with each output failing in turn, training goes on to the same weights."""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from models import digest
from safetensors.torch import load_file
from train_project import run_here, write_project
from waiting import wait_until

from paceline.checkpoint.folders import complete_steps
from paceline.cli.main import main
from paceline.cli.train import monitoring
from paceline.observe import metrics, run_files
from paceline.observe.run_files import RunFiles
from paceline.observe.timeline import recorder
from paceline.run import monitor

FULL = OSError(errno.ENOSPC, "No space left on device")


def weights(folder: Path) -> str:
    return digest(load_file(folder / f"step-{complete_steps(folder)[-1]:08d}" / "model.safetensors"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"), "failing_outputs_parts")


@pytest.fixture(scope="module")
def undisturbed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("undisturbed")
    return weights(run_here(project, root).checkpoints)


def fail(*_: Any, **__: Any) -> Any:
    raise FULL


class FailingLogger:
    def log(self, step: int, values: Any) -> None:
        raise FULL

    def close(self) -> None:
        raise FULL

    def state_dict(self) -> dict[str, Any]:
        raise FULL

    def load_state_dict(self, state: Any) -> None:
        raise FULL


# What is broken, what the one warning about it says, and settings that bring it into play.
BROKEN: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "opening the metrics": (metrics.LineWriter, "__init__", r"metrics.jsonl cannot be written", ()),
    "a line of metrics": (metrics.MetricsWriter, "log", r"metrics.jsonl cannot be written", ()),
    "the timeline": (
        recorder.LineWriter,
        "write",
        r"the timeline ends here",
        ("trainer.timeline=true",),
    ),
    "making a logger": (monitoring, "make_logger", r"cannot create the logger csv", ("loggers=[csv]",)),
    "a logger": (monitoring, "make_logger", r"the logger FailingLogger failed", ("loggers=[csv]",)),
    "the progress": (None, "", r"progress can no longer be shown", ()),
    "the picture": (monitoring, "draw", r"cannot write the plot", ()),
    "the report": (monitor, "write_json", r"report.json cannot be written", ()),
    "the status": (monitor, "note_total_steps", r"status.json cannot be written", ()),
    "the control socket": (monitor, "ControlServer", r"cannot reach this run", ()),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_output_that_fails_is_warned_about_once_and_changes_nothing(
    broken: str,
    project: Path,
    undisturbed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, name, message, settings = BROKEN[broken]
    if owner is not None:
        monkeypatch.setattr(owner, name, (lambda *_, **__: FailingLogger()) if broken == "a logger" else fail)
    live_file = Path("/dev/full") if broken == "the progress" else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        files = run_here(project, tmp_path / "run", *settings, live_file=live_file, draws=broken == "the picture")
    assert weights(files.checkpoints) == undisturbed
    told = [str(warning.message) for warning in seen] + caplog.messages + capfd.readouterr().out.splitlines()
    about = [text for text in told if message.replace("\\", "") in text]
    assert len(about) == 1, told
    assert "No space left on device" in about[0]


@contextmanager
def small_disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """A file system of that size, in this session's own mount namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size_kb}k".encode()) != 0:
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        assert libc.umount2(bytes(folder), 2) == 0


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
def test_a_full_disk_under_the_run_folder(
    workers: int, project: Path, undisturbed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checkpoints lie elsewhere; everything else fails to be written, also what the workers print."""
    checkpoints = tmp_path / "checkpoints"
    with small_disk(tmp_path / "disk", 256) as disk:
        fill(disk)
        overrides = [f"checkpoints.folder={checkpoints}", "trainer.timeline=true", "loggers=[csv]"]
        command = ["train", str(project), "--workers", str(workers), "--run-folder", str(disk / "run"), *overrides]
        code = main(command)
        output = capfd.readouterr()
        assert code == 0, output
        assert RunFiles(disk / "run").metrics.stat().st_size == 0
    assert weights(checkpoints) == undisturbed
    assert "Traceback" not in output.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_disk_that_fills_up_during_the_run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints fail too, and `on_error: continue` goes on without them."""
    trained: list[str] = []
    finish, after_step = monitor.Monitor.finish, monitor.Monitor.after_step

    def fill_and_go_on(self: monitor.Monitor, record: Any) -> None:
        if record.step == 8 and self._files.root.parent.name == "disk":
            wait_until(lambda: complete_steps(self._files.checkpoints) == [5])  # one is saved before the disk is full
            fill(self._files.root.parent)
        after_step(self, record)

    def finish_and_keep(self: monitor.Monitor, last_words: str | None) -> None:
        finish(self, last_words)
        trained.append(digest(self._run.model.state_dict()))

    monkeypatch.setattr(monitor.Monitor, "finish", finish_and_keep)
    monkeypatch.setattr(monitor.Monitor, "after_step", fill_and_go_on)
    settings = ["checkpoints.every_steps=5", "checkpoints.on_error=continue", "trainer.log_every=1", "trainer.epochs=6"]
    run_here(project, tmp_path / "enough", *settings)
    with small_disk(tmp_path / "disk", 400) as disk, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        files = run_here(project, disk / "run", *settings)
        assert complete_steps(files.checkpoints)
    about = [str(warning.message) for warning in seen if "metrics.jsonl cannot be written" in str(warning.message)]
    assert len(about) == 1, [str(warning.message) for warning in seen]
    assert trained[0] == trained[1]


def test_the_status_of_a_run_is_best_effort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = run_files.prepare_run_folder(tmp_path / "run")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.warns(UserWarning, match=r"status.json cannot be written, training continues: .*No space") as seen:  # noqa: SIM117
        with run_files.running(files):
            pass
    assert len(seen) == 2  # at the beginning and at the end
    assert not list(files.root.glob(".*.new"))
