"""The page's curves, run by Node.js: what replaces what."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
SCRIPT = """
globalThis.document = {getElementById: () => null};
const {Curves} = await import(MODULE);
const curves = new Curves();
for (const [method, argument] of CALLS) curves[method](argument);
const {raw} = curves.byName.get("loss");
console.log(JSON.stringify([...raw.x.subarray(0, raw.length)].map((x, i) => [x, raw.y[i]])));
"""


def points(*calls: tuple[str, Any]) -> list[list[float]]:
    module = f"file://{files('paceline.cli.watch').joinpath('page', 'curves.js')}"
    script = SCRIPT.replace("MODULE", json.dumps(module)).replace("CALLS", json.dumps(calls))
    assert NODE is not None
    command = [NODE, "--input-type=module", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True, timeout=60)
    found: list[list[float]] = json.loads(done.stdout)
    return found


def answer(first: int, last: int, *series: tuple[int, float], **facts: bool) -> tuple[str, Any]:
    steps, values = ([point[i] for point in series] for i in (0, 1))
    loss = {"name": "loss", "steps": steps, "values": values, "is_thinned": False}
    return "add", {"from": first, "to": last, "last_step": last, "is_sampled": False, **facts, "series": [loss]}


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_an_answer_replaces_what_a_sample_showed() -> None:
    """Step 15 was superseded, which the sample did not see. Step 40 came meanwhile."""
    sampled = answer(0, 30, (1, 1.0), (15, 99.0), (30, 3.0), is_sampled=True)
    found = points(sampled, ("addLines", ['{"step":40,"loss":4}']), answer(0, 30, (1, 1.0), (16, 2.0), (30, 3.0)))
    assert found == [[1, 1.0], [16, 2.0], [30, 3.0], [40, 4.0]]
    assert points(answer(0, 2, (1, 1.0), (2, 2.0)), answer(3, 4, (4, 4.0))) == [[1, 1.0], [2, 2.0], [4, 4.0]]
