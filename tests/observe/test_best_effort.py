"""Outputs that must not end a run: warned about once, tried again, and what was lost is counted."""

from __future__ import annotations

import errno
import io
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.events import Event, Events
from paceline.observe.best_effort import BestEffort, SafeStream
from paceline.observe.events import EventLog
from paceline.observe.json_lines import LineReader, LineWriter
from paceline.observe.metrics import MetricsWriter, read_curves
from paceline.observe.progress import Progress

FULL = OSError(errno.ENOSPC, "No space left on device")


def use_twice(output: BestEffort[Any], action: Callable[[Any], object]) -> None:
    output.use(action)
    output.use(action)


def test_a_failure_is_warned_about_once_and_the_output_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    output = BestEffort(path, lambda: MetricsWriter(path), MetricsWriter.close)
    output.use(lambda writer: writer.log(1, {"loss": 3.0}))

    def fail(_: Any) -> None:
        raise FULL

    with pytest.warns(UserWarning, match=rf"{path} cannot be written, training continues: .*No space left") as seen:
        use_twice(output, fail)
    assert len(seen) == 1
    output.use(lambda writer: writer.log(4, {"loss": 2.0}))
    with pytest.warns(UserWarning, match=rf"{path}: 2 of 4 records were lost"):
        output.close()
    assert read_curves(path).series("time")[0].tolist() == [1, 4]


def test_what_cannot_be_opened_is_opened_later(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "metrics.jsonl"
    with pytest.warns(UserWarning, match="No such file"):
        output = BestEffort(path, lambda: MetricsWriter(path, start_step=0), MetricsWriter.close)
    output.use(lambda writer: writer.log(1, {}))
    path.parent.mkdir()
    output.use(lambda writer: writer.log(2, {}))
    with pytest.warns(UserWarning, match="1 of 2 records were lost"):
        output.close()
    assert read_curves(path).series("time")[0].tolist() == [2]


def test_warnings_that_are_errors_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = BestEffort(tmp_path, lambda: LineWriter(tmp_path), LineWriter.close)
        output.use(lambda lines: lines.write({}))
        output.close()
    assert f"{tmp_path} cannot be written, training continues: IsADirectoryError" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_request_to_end_is_no_failure(tmp_path: Path, error: BaseException) -> None:
    output = BestEffort(tmp_path / "x", lambda: LineWriter(tmp_path / "x"), LineWriter.close)

    def interrupted(_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        output.use(interrupted)
    output.close()


def test_an_event_log_on_a_full_disk_loses_events_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    events = Events()
    events.listen(log.write)
    with pytest.warns(UserWarning, match=rf"{path} cannot be written.*No space left on device"):
        events.emit("shares", to=[1, 2])
    events.emit("shares", to=[2, 1])
    with pytest.warns(UserWarning, match="2 of 2 records were lost"):
        log.close()
    log.write(Event("late", 3))  # after closing: nothing


def test_events_are_written_down_whatever_their_details(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    details: dict[str, Any] = {"shares": (6, 2), "drift": math.nan, "path": Path("a"), "tensor": torch.ones(2)}
    log.write(Event("plan", 7, details))
    log.close()
    (record,) = LineReader(path).read()
    assert (record["event"], record["step"]) == ("plan", 7)
    assert record["details"]["shares"] == [6, 2]
    assert record["details"]["path"] == "a"
    assert record["details"]["tensor"] == "tensor([1., 1.])"
    assert math.isnan(record["details"]["drift"])
    assert isinstance(record["time"], float)


class BrokenStream(io.StringIO):
    """A terminal that is gone, or a pipe whose reader has left."""

    def __init__(self, error: Exception, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._error = error
        self._is_terminal = is_terminal
        self.num_tries = 0

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.num_tries += 1
        raise self._error


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), FULL, ValueError("closed file")])
@pytest.mark.parametrize("keep_lines", [True, False])
def test_progress_that_cannot_be_shown_ends_silently(keep_lines: bool, error: Exception, is_terminal: bool) -> None:
    stream = BrokenStream(error, is_terminal=is_terminal)
    progress = Progress(10, every_steps=1, keep_lines=keep_lines, stream=stream)
    with pytest.warns(UserWarning, match="progress can no longer be shown, training continues") as seen:
        progress.show(1, 1.0)
    assert len(seen) == 1
    progress.show(2, 1.0)
    progress.note("done")
    progress.close()
    assert stream.num_tries == 1


def test_a_stream_shows_what_its_encoding_lacks_as_escapes() -> None:
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("epoch \N{GREEK SMALL LETTER ALPHA}", file=stream, flush=True)
    assert raw.getvalue() == b"epoch \\u03b1\n"


def test_a_file_that_grows_too_large_is_a_failure_like_others(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, in a child process: the limit holds for all of a process's files."""
    import resource
    import signal

    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            path = tmp_path / "metrics.jsonl"
            output = BestEffort(path, lambda: MetricsWriter(path), MetricsWriter.close)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for step in range(100):
                    output.use(lambda writer, step=step: writer.log(step, {"loss": 1.0}))
            code = 0 if len(seen) == 1 and "File too large" in str(seen[0].message) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_curves(tmp_path / "metrics.jsonl").num_lines == 1
