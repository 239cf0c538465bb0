"""A worker dies in a step, for every way in which data is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
from elastic_runs import NUM_SAMPLES, Case, Death, Samples, Stream, check, expected, launch, vectors

from paceline.data.sources.arrow import ArrowSource


def test_a_step_is_begun_again(tmp_path: Path) -> None:
    x, y = vectors(NUM_SAMPLES)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), 12), "y": y.numpy()})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    cases = [
        Case([Death(8, step=1)]),
        Case([Death(7, step=2)], data=Samples),  # in the last step of an epoch
        Case([Death(0, step=1)], {"feed": "dispatched"}),  # the reader
        Case([Death(6, step=4)], {"feed": "dispatched"}),
        Case([Death(1, step=2)], {"shuffle_buffer": 20}, Stream),
        Case([Death(5, step=4)], {"readers": 1}, Samples),
        Case([Death(4, step=3)], data=partial(ArrowSource, str(tmp_path / "data.arrow"))),
    ]
    for number, (case, outcomes) in enumerate(zip(cases, launch(cases, 9), strict=True)):
        check(outcomes, expected(case), 8 - number)
