"""For tests of the page: Chromium, `paceline watch`, and a run of two workers whose speed can be disturbed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from preloaded_python import PreloadedPython
from waiting import wait_until

from paceline.observe.run_files import RunFiles

if TYPE_CHECKING:
    from playwright.sync_api import Page

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\?token=\S+")
# A worker whose file `slow-reader-RANK` exists needs 20 ms longer to read a sample.
PARTS = """
import os, time, torch
from pathlib import Path
RANK = os.environ.get("RANK", "0")
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        if Path(f"slow-reader-{RANK}").exists(): time.sleep(0.02)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(64, generator=generator)
        return x, x.sum().reshape(1)
def build_model(): return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
def loss(model, batch):
    if SLEEPS: time.sleep(0.01)
    else:
        until = time.thread_time() + 0.01
        while time.thread_time() < until: pass
    return ((model(batch.x) - batch.y) ** 2).mean()
def metrics(model, batch): return {"loss": loss(model, batch), "__proto__": torch.tensor(1.0)}
"""
PROJECT = """
model: {factory: "parts:build_model"}
loss: parts:loss
metrics: parts:metrics
data: {train: {factory: "parts:Samples"}}
trainer: {max_steps: 100000, global_batch: 16, micro_batch: 2, learning_rate: 0.01, log_every: 2}
checkpoints: {every_steps: 100000}
"""


def missing_browser() -> str | None:
    """Why the page cannot be tested here; None if it can."""
    if chromium_path() is None:
        return "there is no Chromium: apt-get install -y chromium"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install 'paceline[browser]'"
    return None


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def opened_browser() -> Iterator[Page]:
    """A page at 1,280 pixels. Afterwards, fails if a script raised, or if something broke the page's policy."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        try:
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.set_default_timeout(60_000)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
            yield page
        finally:
            browser.close()
    assert not faults, faults


@contextmanager
def watching(runs: Path, *arguments: str) -> Iterator[Callable[[], str]]:
    """`paceline watch`. Gives a function that waits until it listens and returns its address."""
    command = [sys.executable, "-m", "paceline", "watch", str(runs), "--port", "0", *arguments]
    log = (runs.parent / "watch.log").open("w+")
    with log, _process(command, log, runs.parent) as process:

        def address() -> str:
            wait_until(lambda: ADDRESS.search(_text(log)) or process.poll() is not None)
            found = ADDRESS.search(_text(log))
            assert found, _text(log)
            return found[0]

        yield address


@contextmanager
def training(folder: Path, *arguments: str, sleeps: bool = True) -> Iterator[Callable[[], RunFiles]]:
    """`paceline train` of two workers in `folder`, for as long as the block.

    Gives a function that waits until the run takes requests and returns its files.
    sleeps: its micro-batches take 10 ms without using a core; otherwise 10 ms of CPU time, which a quota stretches.
    """
    (folder / "parts.py").write_text(PARTS.replace("SLEEPS", str(sleeps)))
    (folder / "small.yaml").write_text(PROJECT)
    before = set((folder / "runs").glob("small_*"))
    log = (folder / "train.log").open("w+")
    command = [sys.executable, "-m", "paceline", "train", "small.yaml", "--workers", "2", *arguments]
    with log, _process(command, log, folder) as process:

        def found() -> list[Path]:
            new = [path for path in (folder / "runs").glob("small_*") if path not in before]
            return [path for path in new if (path / "control/socket").exists()]

        def files() -> RunFiles:
            wait_until(lambda: found() or process.poll() is not None)
            assert process.poll() is None, _text(log)
            return RunFiles(found()[0])

        yield files


@contextmanager
def _process(command: list[str], log: Any, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    process = PreloadedPython(
        command, cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(log: Any) -> str:
    return Path(log.name).read_text()


needs_browser = pytest.mark.skipif(missing_browser() is not None, reason=missing_browser() or "")
