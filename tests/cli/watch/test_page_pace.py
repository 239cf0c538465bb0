"""When the page draws, in Chromium: what is seen and has moved, at a pace, and at once what the user asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from live_page import needs_browser, opened_browser, watching
from made_runs import make_run
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_browser

COUNT_DRAWS = """
    window.draws = new Map();
    for (const name of ["clearRect", "putImageData"]) {
        const draw = CanvasRenderingContext2D.prototype[name];
        CanvasRenderingContext2D.prototype[name] = function (...values) {
            const {dataset = {}} = this.canvas.closest("figure, .lane") ?? {}, key = dataset.name ?? dataset.rank;
            window.draws.set(key, (window.draws.get(key) ?? 0) + 1);
            return draw.apply(this, values);
        };
    }
    window.frames = async count => {
        while (count-- > 0) await new Promise(requestAnimationFrame);
    };
    window.until = async isTrue => {
        while (!isTrue()) await window.frames(1);
    };
    window.settled = async () => {
        let before = -1;
        const sum = () => [...window.draws.values()].reduce((a, b) => a + b, 0);
        while (sum() !== before) {
            before = sum();
            await window.frames(10);
        }
    };
"""
# Two plots of 100,000 points; the second one is below the window.
TWO_PLOTS = """async () => {
    const {Board} = await import("/page/board.js");
    const {Panel} = await import("/page/panel.js");
    const {Series} = await import("/page/series.js");
    const values = new Map([["x", "step"], ["smooth", "0"], ["log", ""]]);
    const view = {get: name => values.get(name) ?? "", number: () => null, set: () => {}};
    const series = window.series = new Series();
    for (let x = 0; x < 1e5; x++) series.push(x, Math.sin(x));
    const board = window.board = new Board(view);
    const plot = name => new Panel(board, name, () => [{key: name, label: "loss", series, color: "#0072b2"}]).node;
    const room = document.createElement("div");
    room.style.height = "3000px";
    document.body.replaceChildren(plot("seen"), room, plot("unseen"));
    window.grow = count => {
        for (let i = 0; i < count; i++) series.push(series.length, 0.5);
        board.grow();
    };
    await window.settled();
    window.draws.clear();
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    runs = tmp_path_factory.mktemp("pace") / "runs"
    runs.mkdir()
    make_run(runs, "finished", minutes=2)
    with watching(runs) as address, opened_browser() as page:
        page.add_init_script(COUNT_DRAWS)
        page.goto(address())
        yield page


def test_the_page_of_a_finished_run_draws_nothing(page: Page) -> None:
    page.locator("#runs a", has_text="finished_").click()
    wait_until(lambda: page.evaluate("window.draws.get('loss') > 0 && window.draws.get('1') > 0"))
    assert page.evaluate("""async () => {
        await window.settled();
        window.draws.clear();
        await new Promise(done => setTimeout(done, 3000));
        return [window.draws.size, document.getAnimations().length];
    }""") == [0, 0]


def test_a_plot_that_cannot_be_seen_is_drawn_when_it_comes_into_view(page: Page) -> None:
    page.evaluate(TWO_PLOTS)
    assert (
        page.evaluate("""async () => {
        window.grow(5000);
        await window.until(() => window.draws.get("seen"));
        await window.frames(3);
        return window.draws.get("unseen") ?? 0;
    }""")
        == 0
    )
    page.evaluate("""async () => {
        scrollTo(0, document.body.scrollHeight);
        await window.until(() => window.draws.get("unseen"));
        scrollTo(0, 0);
    }""")


def test_a_plot_in_which_nothing_moves_by_a_pixel_is_not_drawn_again(page: Page) -> None:
    page.evaluate(TWO_PLOTS)
    assert (
        page.evaluate("""async () => {
        const value = document.querySelector("figure .legend b"), before = value.textContent;
        window.grow(1);
        await window.until(() => value.textContent !== before);  // the number is new
        const small = window.draws.get("seen") ?? 0;
        window.grow(1000);
        await window.until(() => window.draws.get("seen"));
        return small;
    }""")
        == 0
    )


def test_what_the_user_does_is_drawn_at_once_although_drawing_is_slow(page: Page) -> None:
    page.evaluate(TWO_PLOTS)
    waited, asked = page.evaluate("""async () => {
        const slow = () => {
            const until_ms = performance.now() + 200;
            while (performance.now() < until_ms);
        };
        for (let i = 0; i < 2; i++) {
            window.draws.clear();
            window.board.pace.soon(slow);
            window.grow(5000);
            await window.until(() => window.draws.get("seen"));
            await window.frames(1);
        }
        window.draws.clear();
        window.grow(5000);
        await window.frames(5);
        const waited = window.draws.get("seen") ?? 0;
        document.querySelector("figure").dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
        await window.frames(2);
        return [waited, window.draws.get("seen") ?? 0];
    }""")
    assert waited == 0
    assert asked >= 1


def test_the_page_is_drawn_less_often_while_nobody_touches_it(page: Page) -> None:
    """Drawing takes 200 ms, and a minute passes at once. A touch ends the longer wait."""
    page.evaluate(TWO_PLOTS)
    in_use, untouched, waited, touched, drawn = page.evaluate("""async () => {
        const {pace} = window.board, changes = [];
        pace.onchange = () => changes.push(pace.interval_s);
        let count = 0;
        const slow = () => {
            const until_ms = performance.now() + 200;
            while (performance.now() < until_ms);
            count++;
        };
        const now = performance.now.bind(performance);
        const drawLater = async later_ms => {
            performance.now = () => now() + later_ms;
            const before = count;
            pace.soon(slow);
            await window.until(() => count > before);
            await window.frames(3);  // the cost is known after the frame
        };
        try {
            for (let i = 0; i < 3; i++) await drawLater(10e3 * i);
            const inUse = pace.interval_s;
            await drawLater(100e3);
            const untouched = pace.interval_s, before = count;
            pace.soon(slow);
            await window.frames(5);
            const waited = count - before;
            pace.touch();
            await window.until(() => count > before);
            return [inUse, untouched, waited, pace.interval_s, changes];
        } finally {
            performance.now = now;
        }
    }""")
    assert (in_use, untouched, waited, touched) == (4, 16, 0, 4)
    assert drawn == [4, 16, 4]


def test_seconds_that_are_seldom_written_are_not_shown(page: Page) -> None:
    assert page.evaluate("""async () => {
        const {ago} = await import("/page/format.js");
        return [[0.5, 1], [3.5, 1], [3.5, 4], [9, 4], [70, 16]].map(([age, interval]) => ago(100, 100 + age, interval));
    }""") == ["now", "3 s ago", "seconds ago", "9 s ago", "1 min ago"]


def test_a_hidden_page_has_no_stream(page: Page) -> None:
    assert page.evaluate("""async () => {
        const {LiveSource} = await import("/page/source.js"), open = LiveSource.prototype.stream;
        let isHidden = false;
        const streams = [];
        Object.defineProperty(document, "hidden", {configurable: true, get: () => isHidden});
        LiveSource.prototype.stream = function (...values) {
            const close = open.apply(this, values), index = streams.push(true) - 1;
            return () => {
                streams[index] = false;
                close();
            };
        };
        const numOpen = () => streams.filter(isOpen => isOpen).length, found = [];
        try {
            for (isHidden of [false, true, false, true]) {
                document.dispatchEvent(new Event("visibilitychange"));
                await window.until(() => numOpen() === (isHidden ? 0 : 1));
                found.push(numOpen());
            }
            return found;
        } finally {
            LiveSource.prototype.stream = open;
            delete document.hidden;
            document.dispatchEvent(new Event("visibilitychange"));
        }
    }""") == [1, 0, 1, 0]
