"""What a person sees of `paceline train` on terminals of 80 and 200 columns, against the files in `snapshots`.

To write them anew: PACELINE_WRITE_SNAPSHOTS=1 pytest tests/cli/test_terminal.py, and look at them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from in_process import invoke
from terminal import Terminal, normalized

SNAPSHOTS = Path(__file__).parent / "snapshots"
PARTS = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional

calls = 0


def data():
    x = torch.arange(96.0).reshape(32, 3) / 96
    return x, x.sum(dim=1, keepdim=True)


def loss(model, batch):
    \"\"\"Blocks in the second step of a process, until the test lets it go on.\"\"\"
    global calls
    calls += 1
    while calls == 2 and not Path("go").exists():
        time.sleep(0.005)
    return functional.mse_loss(model(batch.x), batch.y)


def broken(model, batch):
    raise ValueError("no such column: price")
"""
CONFIG = """
model: {factory: "torch.nn:Linear", arguments: {in_features: 3, out_features: 1}}
data: {train: {factory: "terminal_parts:data"}}
loss: terminal_parts:loss
trainer: {global_batch: 8, micro_batch: 4, epochs: 50, learning_rate: 0.01, shares: equal}
workers: 2
devices: cpu
"""


def check(name: str, columns: int, screen: str) -> None:
    lines = screen.splitlines()
    bars = [line for line in lines if "━" in line]
    assert max(map(len, bars), default=0) < columns - 1, "room for ^C"
    assert not any("━" in line and "paceline" in line for line in lines), screen
    shown, path = normalized(screen), SNAPSHOTS / f"{name}-{columns}.txt"
    if os.environ.get("PACELINE_WRITE_SNAPSHOTS"):
        path.write_text(f"{shown}\n")
    # Standard output and error of a worker are two files: lines of the same moment may appear in either order.
    assert sorted(shown.splitlines()) == sorted(path.read_text().splitlines()), shown


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.soak)])
def test_transcripts(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("terminal_parts.py").write_text(PARTS)
    Path("small.yaml").write_text(CONFIG)
    with Terminal(columns, tmp_path) as terminal:
        terminal.type("train small.yaml", "Enter")
        check("progress", columns, terminal.wait_for(r"1/200  loss .*samples/s"))
        terminal.type("C-c")
        terminal.wait_for(r"Ctrl-C: stopping after this step")
        Path("go").touch()
        screen = terminal.wait_for(r"exit code \d+")
        check("ctrl-c", columns, screen)
        assert screen.index("stopping after") < screen.index("stopped after") < screen.index("resume it with")
        assert invoke("logs", "list").out.count(" stopped ") == 1
        terminal.clear()
        # Resumed as the last line says, with the output on /dev/tty.
        Path("go").unlink()
        terminal.type("train --resume small >/dev/tty", "Enter")
        terminal.wait_for(r"\d+/200  loss .*samples/s")
        assert "saves a checkpoint and ends after step" in invoke("runs", "stop").out
        Path("go").touch()
        check("stop", columns, terminal.wait_for(r"exit code \d+"))
        terminal.clear()
        terminal.type("train small.yaml loss=terminal_parts:broken", "Enter")
        check("failure", columns, terminal.wait_for(r"exit code \d+"))
