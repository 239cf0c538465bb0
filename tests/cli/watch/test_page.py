"""The page of `paceline watch` in a real Chromium, over a live run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_page import needs_browser, opened_browser, training, watching
from made_runs import make_run, row
from waiting import wait_until

from paceline.checkpoint.folders import complete_steps

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_browser

HTML_NAME = "<img src=x onerror=document.title='broken'>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Finished runs, one of them named by HTML, with a metric that a careless page stumbles over."""
    folder = tmp_path / "runs"
    folder.mkdir()
    odd = [row(step, **{"__proto__": step * 2.0, HTML_NAME: 1.0}) for step in range(1, 21)]
    make_run(folder, "odd", odd, minutes=1).root.rename(folder / HTML_NAME)
    make_run(folder, "plain", minutes=2).config.write_text("trainer:\n  learning_rate: 0.25\n")
    return folder


def test_the_page_shows_a_live_run_and_controls_it(runs: Path) -> None:
    with opened_browser() as page, watching(runs) as address:
        page.goto(address)
        shows_names_as_text(page)
        with training(runs.parent) as files:
            page.locator("#runs a", has_text=files.root.name).click()
            grows_without_reload(page)
            page.locator("button", has_text="time").first.click()
            page.locator("[data-tool=log]").click()
            page.reload()
            has_the_view(page, axis="time")
            press(page, "save")
            page.locator("#checkpoints tbody tr").first.wait_for()
            assert complete_steps(files.checkpoints)
            press(page, "stop")
            page.locator(".summary .chip", has_text="stopped").wait_for()
            assert not page.locator("[data-action=stop]").is_visible()
        opens_from_disk(page, files.root, runs.parent / "run.html")


def shows_names_as_text(page: Page) -> None:
    """Also a search of the configurations, and the list's address."""
    page.locator("#runs a", has_text=HTML_NAME).click()
    page.locator("h1", has_text=HTML_NAME).wait_for()
    for name in ("__proto__", HTML_NAME):
        assert page.locator("figure h3", has_text=name).count() == 1
    assert end_of(page, "__proto__") == 20
    assert page.locator("main img").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("learning_rate: 0.25")
    page.locator("#runs [role=status]", has_text="1 of 2 runs").wait_for()
    page.locator("#search").fill("")


def grows_without_reload(page: Page) -> None:
    page.evaluate("window.isTheSame = true")
    page.locator("figure[data-name=loss]").wait_for()
    first = end_of(page, "loss")
    wait_until(lambda: end_of(page, "loss") > first + 4)
    page.locator(".lane[data-rank='1']").wait_for()
    assert page.locator(".lane").count() == 2
    assert re.fullmatch(r"now|\d+ (s|min).* ago", page.locator("[data-tile=last] b").inner_text())
    assert page.evaluate("window.isTheSame")


def has_the_view(page: Page, axis: str) -> None:
    page.locator(f"[data-value={axis}][aria-pressed=true]").wait_for()
    assert page.locator("[data-tool=log]").get_attribute("aria-pressed") == "true"
    assert "token" not in page.url


def press(page: Page, action: str) -> None:
    page.locator(f"[data-action={action}]").click()
    page.locator("dialog [data-answer=yes]").click()
    page.locator(".message", has_text="was asked after step").wait_for()


def opens_from_disk(page: Page, run: Path, path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "watch", str(run), "--export", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page.goto(path.as_uri())
    page.locator("h1", has_text=run.name).wait_for()
    wait_until(lambda: end_of(page, "loss") > 0)
    assert page.locator(".lane").count() == 2
    assert not page.locator("[data-action=stop]").is_visible()


def end_of(page: Page, name: str) -> float:
    """The x where the curves of a plot end; 0 before it is drawn."""
    found = page.locator(f"figure[data-name='{name}']")
    return float(found.first.get_attribute("data-end") or 0) if found.count() else 0.0
