"""A worker dies in a step, for every way in which data is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
from elastic_runs import NUM_SAMPLES, Case, Death, Samples, Stream, check, expected, launch, setup
from models import vectors

import pytest


def test_feeds(tmp_path: Path) -> None:
    x, y = vectors(NUM_SAMPLES)
    cases = {
        "sharded": Case([Death(7, step=2)]),
        "sharded, last micro-batch of an epoch": Case([Death(6, step=2)], data=Samples),
        "dispatched, the reader dies": Case([Death(0, step=1)], {"feed": "dispatched"}),
        "dispatched, another one dies": Case([Death(5, step=4)], {"feed": "dispatched"}),
        "stream with a shuffle buffer": Case([Death(1, step=2)], {"shuffle_buffer": 20}, Stream),
        "readers": Case([Death(4, step=4)], {"readers": 1}, Samples),
    }
    size = 8
    for (name, case), outcomes in zip(cases.items(), launch([*cases.values()], size), strict=True):
        print(name, [o["events"] for o in outcomes])
        size -= len(case.deaths)
        check(outcomes, expected(case), size)
