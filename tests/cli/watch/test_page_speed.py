"""Dragging a plot of a million points in Chromium: as many frames as without."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest
from live_page import needs_browser, opened_browser, watching

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [needs_browser, pytest.mark.slow]

MILLION_POINTS = """async () => {
    const {Board} = await import("/page/board.js");
    const {Panel} = await import("/page/panel.js");
    const {Series} = await import("/page/series.js");
    const values = new Map([["x", "step"], ["smooth", "0"], ["log", ""]]);
    const view = {get: name => values.get(name) ?? "", number: () => null, set: () => {}};
    const series = new Series(1e6);
    for (let x = 0; x < 1e6; x++) series.push(x, Math.sin(x / 1e5) + Math.sin(x * x) / 10);
    window.board = new Board(view);
    const line = {key: "loss", label: "loss", series, color: "#0072b2"};
    document.body.replaceChildren(new Panel(window.board, "loss", () => [line], {height: 400}).node);
    window.board.setRange(200000, 800000);
    window.frames_ms = [];
    let last_ms = null;
    const note = now_ms => {
        if (last_ms !== null) window.frames_ms.push(now_ms - last_ms);
        last_ms = now_ms;
        requestAnimationFrame(note);
    };
    requestAnimationFrame(note);
}"""


def test_dragging_a_million_points_drops_no_frames(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with watching(runs) as address, opened_browser() as page:
        page.goto(address())
        page.evaluate(MILLION_POINTS)
        area = page.locator("figure .u-over").bounding_box()
        assert area is not None
        middle, y = area["x"] + area["width"] / 2, area["y"] + 100
        idle_ms = median(frames(page, lambda number: page.mouse.move(middle + number, y)))
        page.keyboard.down("Shift")
        page.mouse.move(middle, y)
        page.mouse.down()
        before = page.evaluate("window.board.range()")
        dragged_ms = median(frames(page, lambda number: page.mouse.move(middle - number, y)))
        assert page.evaluate("window.board.range()")[0] > before[0]
    print(f"a frame takes {idle_ms:.1f} ms, while dragging {dragged_ms:.1f} ms")
    assert dragged_ms <= 1.15 * idle_ms


def frames(page: Page, move) -> list[float]:
    """Milliseconds from frame to frame while the pointer moves."""
    page.evaluate("window.frames_ms.length = 0")
    for number in range(120):
        move(number)
    return page.evaluate("window.frames_ms")
