"""The benchmark of the timeline, in short: that it runs, and that what it calls recording is recorded."""

from __future__ import annotations

import argparse
import math

from bench import timeline


def test_a_short_run() -> None:
    parser = argparse.ArgumentParser()
    timeline.add_options(parser)
    options = parser.parse_args(["--turns", "1", "--steps", "20", "--turns-alone", "1", "--step-ms", "1"])
    result = timeline.run(options)
    assert set(result.detail["spread"]) == {timeline.WITHOUT, timeline.WITH, timeline.AGAIN}
    assert result.ours > 0 < result.limit
    # A difference of two measurements: in so few steps noise may make it negative.
    assert math.isfinite(result.detail["recording_cpu_us_per_step"])
    assert not any(" 0 bytes per step" in note for note in result.detail["notes"])
