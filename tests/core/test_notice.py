"""Lines on stderr must not end a run."""

from __future__ import annotations

import io
import os
import sys

import pytest

from paceline.core.notice import notice


def test_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    notice("rank 1 left")
    assert capfd.readouterr().err == "paceline: rank 1 left\n"


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_fails(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    if is_closed:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    notice("rank 1 left")
    stream.close()
