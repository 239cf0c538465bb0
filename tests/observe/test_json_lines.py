"""Files of JSON lines: torn lines, full disks, growing files, and text in any encoding."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from paceline.observe import json_lines
from paceline.observe.json_lines import LineReader, LineWriter, to_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_a_torn_line_longer_than_a_block_is_cut_off(path: Path) -> None:
    path.write_bytes(b'{"step":1}\n{"step":2,"x":"' + b"y" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b'{"step":1}\n'
    path.write_bytes(b"z" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b""


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_of_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LineWriter(path)
    writer.write({"step": 1})
    real = os.write

    def write_a_piece(descriptor: int, line: bytes) -> int:
        if not line.startswith(b"{"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, line[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_piece)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            writer.write({"step": 2})
    writer.write({"step": 3})
    assert path.read_text() == '{"step":1}\n{"step":3}\n'


def test_a_closed_file_says_so(path: Path) -> None:
    writer = LineWriter(path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed file"):
        writer.write({})


@pytest.mark.parametrize("block_bytes", [1, 7, 1000])
def test_a_reader_follows_a_growing_file(path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_READ_BYTES", block_bytes)
    path.write_bytes(b"")
    reader = LineReader(path)
    assert reader.read() == []
    for added, found in [(b'{"a":1}\n{"b', [{"a": 1}]), (b'":"NaN', []), (b'"}\n[1]\nx\n', ["b"]), (b"", [])]:
        with path.open("ab") as file:
            file.write(added)
        assert [list(record) if "b" in record else record for record in reader.read()] == [
            ["b"] if record == "b" else record for record in found
        ]
    assert reader.num_unreadable == 2


def test_the_tail_of_a_file_starts_with_a_whole_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "TAIL_BYTES", 20)
    path.write_text("".join(f'{{"n":{n}}}\n' for n in range(100)))
    assert LineReader(path, tail=True).read() == [{"n": 98}, {"n": 99}]


def test_paths_in_any_encoding_are_written_and_read_again() -> None:
    record = {"folder": os.fsdecode(b"caf\xe9"), "name": "café", "loss": float("nan")}
    for value in (record, {"folder": record["folder"]}):
        text = to_json(value)
        assert json.loads(text.encode())["folder"] == record["folder"]
    assert "café" in to_json(record)
