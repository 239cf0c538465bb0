"""The page of `paceline watch` in a real Chromium, over a live run."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from in_process import invoke
from live_page import needs_browser, opened_browser, training, watching
from made_runs import make_run, row
from waiting import wait_until

from paceline.checkpoint.folders import complete_steps
from paceline.observe.json_lines import parse_lines
from paceline.observe.metrics import flat_items
from paceline.observe.run_files import process_started, write_json

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_browser

HERE = {"pid": os.getpid(), "process_started": process_started(os.getpid()), "host": socket.gethostname()}

HTML_NAME = "<img src=x onerror=document.title='broken'>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Finished runs, one of them named by HTML, with a metric that a careless page stumbles over."""
    folder = tmp_path / "runs"
    folder.mkdir()
    odd = [row(step, **{"__proto__": step * 2.0, HTML_NAME: 1.0}) for step in range(1, 21)]
    make_run(folder, "odd", odd, minutes=1).root.rename(folder / HTML_NAME)
    smaller = make_run(folder, "smaller", minutes=0, status={**HERE, "state": "running"})
    left = {"left": [0], "joined": [], "size": 2, "reason": "killed by SIGKILL", "seconds": 0.1}
    smaller.events.write_text(json.dumps({"time": 1.0, "step": 12, "event": "world", "details": left}) + "\n")
    # The one evaluation is neither among its first lines nor among its last ones.
    lines = [row(step) | ({"eval": {"accuracy": 0.5}} if step == 700 else {}) for step in range(1, 1001)]
    plain = make_run(folder, "plain", lines, minutes=2)
    plain.config.write_text("trainer:\n  learning_rate: 0.25\n")
    write_json(plain.plan, {"advice": "Use 2xA.", "alternatives": [{"workers": "2xA", "samples_per_s": 31.0}]})
    for i, loss in enumerate(("NaN", "Infinity", "-Infinity")):
        make_run(folder, f"odd{i}" if i else "lost", [row(1, loss=loss)], minutes=3 + i)
    return folder


def test_the_page_shows_a_live_run_and_controls_it(runs: Path) -> None:
    with training(runs.parent) as started, watching(runs) as address, opened_browser() as page:
        page.goto(address())
        shows_names_as_text(page)
        keeps_the_lane_of_a_worker_that_left(page)
        searches_configurations(page)
        shows_what_was_planned_and_measured_once(page)
        thins_without_losing_extremes(page)
        reads_lines_as_the_server_does(page)
        shows_what_is_not_finite(page)
        says_when_a_run_is_gone(page, runs)
        files = started()
        page.locator("#runs a", has_text=files.root.name).click()
        grows_without_reload(page)
        fits_a_phone(page)
        obeys_the_keyboard(page)
        press(page, "save")
        page.locator("#checkpoints tbody tr").first.wait_for()
        assert complete_steps(files.checkpoints)
        press(page, "stop")
        page.locator(".summary .chip", has_text="stopped").wait_for()
        assert not page.locator("[data-action=stop]").is_visible()
        opens_from_disk(page, files.root, runs.parent / "run.html")


def shows_names_as_text(page: Page) -> None:
    page.locator("#runs a", has_text=HTML_NAME).click()
    page.locator("h1", has_text=HTML_NAME).wait_for()
    for name in ("__proto__", HTML_NAME):
        page.locator("figure h3", has_text=name).wait_for()
    wait_until(lambda: end_of(page, "__proto__") == 20)
    assert page.locator("main img").count() == 0


def keeps_the_lane_of_a_worker_that_left(page: Page) -> None:
    """Worker 0 of three left, and the others have moved up: its lane comes after theirs, until it left."""
    page.keyboard.press("g")
    page.locator("#runs a", has_text="smaller_").click()
    page.locator(".lane.gone[data-rank='0']", has_text="left after step 12").wait_for()
    assert page.locator(".lane").count() == 3
    assert "killed by SIGKILL" in page.locator(".lane.gone").inner_text()
    page.keyboard.press("g")


def searches_configurations(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("learning_rate: 0.25")
    page.locator("#runs [role=status]", has_text="1 of ").wait_for()
    assert page.locator("#runs tbody tr").all_inner_texts()[0].strip().startswith("plain_")
    page.locator("#search").fill("")


def shows_what_was_planned_and_measured_once(page: Page) -> None:
    assert not page.locator("#plan").is_visible()  # of a run that nothing was planned for
    page.locator("#runs a", has_text="plain_").click()
    page.locator("#plan p", has_text="Use 2xA.").wait_for()
    assert page.locator("#plan tbody td").all_inner_texts()[:3] == ["2xA", "", "31"]
    page.locator("figure[data-name=accuracy]").wait_for()
    page.go_back()


def thins_without_losing_extremes(page: Page) -> None:
    """The lowest and the highest value of each of 100 pixels are drawn, of 50,000 points with gaps."""
    missed = page.evaluate("""async () => {
        const {Series, thin} = await import("/page/series.js");
        const series = new Series(), [from, to, pixels] = [4800, 44800, 100];
        for (let x = 0; x < 50000; x++) series.push(x, x % 1000 < 50 ? NaN : Math.sin(x * x) * 1e3);
        const [indices, n] = thin(series, from, to, pixels), drawn = new Set(indices.slice(0, n)), missed = [];
        for (let pixel = 0; pixel < pixels; pixel++) {
            let low = -1, high = -1;
            for (let i = from + 400 * pixel; i < from + 400 * (pixel + 1); i++) {
                if (Number.isNaN(series.y[i])) continue;
                if (low < 0 || series.y[i] < series.y[low]) low = i;
                if (high < 0 || series.y[i] > series.y[high]) high = i;
            }
            if (low >= 0 && !(drawn.has(low) && drawn.has(high))) missed.push(pixel);
        }
        return [missed, n];
    }""")
    assert missed[0] == []
    assert missed[1] <= 2 * 100 + 4


def reads_lines_as_the_server_does(page: Page) -> None:
    """Numbers by flat name; what is no number, and lines without a step, are skipped; a resume drops points."""
    odd = {"loss": "NaN", "__proto__": 2.0, "eval": {"loss": [3.0]}, "on": True, "note": "4", "no": None}
    lines = [{"step": 1, "loss": 0.5}, {"step": 2, **odd}, {"step": -1, "loss": 9}, {"step": True, "loss": 9}, [3], 4]
    later = [{"step": 3, "loss": 0.25}, {"resumed_from": 2}, {"step": 3, "resumed_from": 0, "lanes": {"data": [0.125]}}]
    texts = [*map(json.dumps, lines), '{"step": 3, "lo', "", "null", *map(json.dumps, later)]
    found = page.evaluate(
        """async lines => {
            const {Curves} = await import("/page/curves.js");
            const curves = new Curves();
            curves.addLines(lines);
            const points = ({raw}) => [...raw.x.slice(0, raw.length)].map((x, i) => [x, String(raw.y[i])]);
            return [...curves.byName].map(([name, curve]) => [name, points(curve)]);
        }""",
        texts,
    )
    assert dict(found) == {
        "loss": [[1, "0.5"], [2, "NaN"]],
        "__proto__": [[2, "2"]],
        "eval/loss/0": [[2, "3"]],
        "resumed_from": [[3, "0"]],
        "lanes/data/0": [[3, "0.125"]],
    }
    names = [
        flat for line in (*lines[:2], later[-1]) for flat, _ in flat_items(parse_lines([json.dumps(line).encode()])[0])
    ]
    assert {*names} == {"step", *dict(found)}


def shows_what_is_not_finite(page: Page) -> None:
    page.locator("[data-column=loss] button").click()
    losses = page.locator("#runs tbody tr td:nth-child(5)").all_inner_texts()
    assert (losses[0], losses[-2:]) == ("−∞", ["∞", "NaN"])
    page.locator("[data-column=started] button").click()


def says_when_a_run_is_gone(page: Page, runs: Path) -> None:
    (files,) = runs.glob("lost_*")
    page.locator("#runs a", has_text=files.name).click()
    wait_until(lambda: end_of(page, "loss") == 1)
    with (files / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(2)) + "\n")
    wait_until(lambda: end_of(page, "loss") == 2)  # the stream is open
    files.rename(runs.parent / "elsewhere")
    page.locator(".notice", has_text="the run's folder is gone").wait_for()
    page.wait_for_timeout(2500)  # longer than a browser waits before it connects again
    assert page.locator(".notice").inner_text() == "the run's folder is gone"
    page.keyboard.press("g")


def grows_without_reload(page: Page) -> None:
    page.locator("figure[data-name=loss] canvas").wait_for()
    page.locator(".lane[data-rank='1'] canvas").wait_for()
    page.evaluate("window.before = [...document.querySelectorAll('figure[data-name=loss] canvas, .lane canvas, h1')]")
    first = end_of(page, "loss")
    wait_until(lambda: end_of(page, "loss") > first + 4)
    assert page.locator(".lane").count() == 2
    assert re.fullmatch(r"now|\d+ (s|min).* ago", page.locator("[data-tile=last] b").inner_text())
    # Neither reloaded nor built anew, which would flicker.
    assert page.evaluate("window.before.length === 4 && window.before.every(node => node.isConnected)")


def fits_a_phone(page: Page) -> None:
    size = page.viewport_size
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.scrollingElement.scrollWidth") == 380
    page.set_viewport_size(size)


def obeys_the_keyboard(page: Page) -> None:
    """Axis, logarithm and range by keys, and all of them again after a reload."""
    for key in "xxl":
        page.keyboard.press(key)
    page.locator("figure[data-name=loss]").focus()
    page.keyboard.press("+")
    wait_until(lambda: "from=" in page.evaluate("location.hash"))
    page.reload()
    page.locator("[data-value=time][aria-pressed=true]").wait_for()
    assert page.locator("[data-tool=log]").get_attribute("aria-pressed") == "true"
    assert page.locator("[data-tool=all]").is_enabled()
    assert "token" not in page.url


def press(page: Page, action: str) -> None:
    page.locator(f"[data-action={action}]").click()
    page.locator("dialog [data-answer=yes]").click()
    page.locator(".message", has_text="was asked after step").wait_for()


def opens_from_disk(page: Page, run: Path, path: Path) -> None:
    exported = invoke("watch", run, "--export", path)
    assert exported.code == 0, exported.err
    data = re.search(r'id="paceline-data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert data is not None
    assert path.stat().st_size - len(data[1]) <= 300_000
    page.goto(path.as_uri())
    page.locator("h1", has_text=run.name).wait_for()
    wait_until(lambda: end_of(page, "loss") > 0)
    assert page.locator(".lane").count() == 2
    assert not page.locator("[data-action=stop]").is_visible()


def end_of(page: Page, name: str) -> float:
    """The x where the curves of a plot end; 0 before it is drawn."""
    found = page.locator(f"figure[data-name='{name}']")
    return float(found.first.get_attribute("data-end") or 0) if found.count() else 0.0
