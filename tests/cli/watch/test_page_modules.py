"""Parts of the page that need no browser, run by Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")
POINTS = """
const curves = new Curves();
for (const [method, argument] of calls) curves[method](argument);
const {raw} = curves.byName.get("loss");
return [...raw.x.subarray(0, raw.length)].map((x, i) => [x, raw.y[i]]);
"""


def run(module: str, imported: str, body: str, **arguments: Any) -> Any:
    """What a function with this body returns."""
    path = json.dumps(f"file://{files('paceline.cli.watch').joinpath('page', module)}")
    script = f"""
        globalThis.document = {{getElementById: () => null}};
        const {{{imported}}} = await import({path}), {{{", ".join(arguments)}}} = {json.dumps(arguments)};
        console.log(JSON.stringify((() => {{ {body} }})()));
    """
    assert NODE is not None
    command = [NODE, "--input-type=module", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def points(*calls: tuple[str, Any]) -> Any:
    return run("curves.js", "Curves", POINTS, calls=calls)


def answer(first: int, last: int, *series: tuple[int, float], **facts: bool) -> tuple[str, Any]:
    steps, values = ([point[i] for point in series] for i in (0, 1))
    loss = {"name": "loss", "steps": steps, "values": values, "is_thinned": False}
    return "add", {"from": first, "to": last, "last_step": last, "is_sampled": False, **facts, "series": [loss]}


def test_an_answer_replaces_what_a_sample_showed() -> None:
    """Step 15 was superseded, which the sample did not see. Step 40 came meanwhile."""
    sampled = answer(0, 30, (1, 1.0), (15, 99.0), (30, 3.0), is_sampled=True)
    found = points(sampled, ("addLines", ['{"step":40,"loss":4}']), answer(0, 30, (1, 1.0), (16, 2.0), (30, 3.0)))
    assert found == [[1, 1.0], [16, 2.0], [30, 3.0], [40, 4.0]]
    assert points(answer(0, 2, (1, 1.0), (2, 2.0)), answer(3, 4, (4, 4.0))) == [[1, 1.0], [2, 2.0], [4, 4.0]]


def test_a_worker_that_left_has_a_lane_until_the_run_is_resumed_with_as_many() -> None:
    event = {"event": "world", "step": 900, "details": {"left": [3], "joined": [], "size": 3}}

    def ranks(num_workers: int) -> Any:
        workers = [{"rank": rank, "is_alive": True} for rank in range(num_workers)]
        shown = {"state": "live", "num_workers": num_workers, "workers": workers}
        body = "return departed(shown, events).map(worker => worker.rank);"
        return run("lanes.js", "departed", body, shown=shown, events=[event])

    assert (ranks(3), ranks(4)) == ([3], [])


def test_numbers_that_round_up_to_the_next_unit_have_that_unit() -> None:
    body = "return [...sizes.map(bytes), ...rates.map(value => rate(value)), ...times.map(duration)];"
    numbers = {"sizes": [999.4e6, 999.7e6, 999_700], "rates": [12_345, 999_700], "times": [0.9994, 0.9996, 9.97]}
    found = run("format.js", "bytes, rate, duration", body, **numbers)
    assert found[:3] == ["999 MB", "1.00 GB", "1.00 MB"]
    assert found[3:] == ["12.3k samples/s", "1M samples/s", "999 ms", "1.0 s", "10 s"]
