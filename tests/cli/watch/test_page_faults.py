"""The page names the worker that holds a run back within 5 s, in each of 20 injected faults."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest
from live_page import needs_browser, opened_browser, training, watching
from waiting import wait_until

from bench.cpu_quota import cpu_quota, missing_cpu_quota
from paceline.observe.run_files import RunFiles

if TYPE_CHECKING:
    from playwright.sync_api import Page

LIMIT_S = 5.0
NUM_OF_EACH = 5

pytestmark = [
    needs_browser,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(missing_cpu_quota() is not None, reason=missing_cpu_quota() or ""),
]


@contextmanager
def slow_worker(files: RunFiles, rank: int) -> Iterator[None]:
    with cpu_quota(0.08) as quota:
        quota.add(pid_of(files, rank))
        yield


@contextmanager
def slow_reader(files: RunFiles, rank: int) -> Iterator[None]:
    flag = files.root.parents[1] / f"slow-reader-{rank}"
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


@contextmanager
def stopped_worker(files: RunFiles, rank: int) -> Iterator[None]:
    pid = pid_of(files, rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def killed_worker(files: RunFiles, rank: int) -> Iterator[None]:
    os.kill(pid_of(files, rank), signal.SIGKILL)
    yield


def test_the_culprit_is_named_within_5_s_of_20_faults(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    took_s: list[tuple[str, float]] = []
    with watching(runs) as address, opened_browser() as page:
        page.goto(address())
        with training(tmp_path, sleeps=False) as started:
            files = started()
            show(page, files)
            for number in range(NUM_OF_EACH):
                for fault in (slow_worker, slow_reader, stopped_worker):
                    wait_until(lambda: nobody_is_named(page), timeout_s=120)
                    took_s.append((fault.__name__, time_until_named(page, files, fault, number % 2)))
        for _ in range(NUM_OF_EACH):
            with training(tmp_path, sleeps=False) as started:
                files = started()
                show(page, files)
                took_s.append(("killed_worker", time_until_named(page, files, killed_worker, 1)))
    late = [each for each in took_s if each[1] > LIMIT_S]
    assert len(took_s) == 20
    assert not late, f"{len(late)} of 20 took longer than {LIMIT_S:.0f} s: {late}"


def show(page: Page, files: RunFiles) -> None:
    """Open the run's page, and wait until the run is in full swing."""
    page.goto(page.url.partition("#")[0] + f"#run={files.root.name}")
    page.locator(".lane[data-rank='1']").wait_for()
    tile = page.locator("[data-tile=step] b")
    wait_until(lambda: int(tile.inner_text().replace(",", "") or 0) > 60)


def time_until_named(page: Page, files: RunFiles, fault: Callable, rank: int) -> float:
    """Seconds from the fault until the page's sentence names the worker and its lane is marked."""
    lane = page.locator(f".lane.culprit[data-rank='{rank}'], .lane.gone[data-rank='{rank}']")
    sentence = page.locator(".verdict .sentence", has_text=re.compile(rf"(worker|rank) {rank}\b", re.IGNORECASE))
    start_s = monotonic()
    with fault(files, rank):
        sentence.first.wait_for(timeout=30_000)
        lane.wait_for(timeout=30_000)
        took_s = monotonic() - start_s
    print(f"{fault.__name__} {rank}: {took_s:.1f} s", flush=True)
    return took_s


def nobody_is_named(page: Page) -> bool:
    return page.locator(".lane.culprit, .verdict.warning, .verdict.error").count() == 0


def pid_of(files: RunFiles, rank: int) -> int:
    return json.loads((files.ranks / f"rank-{rank}.json").read_text())["pid"]
