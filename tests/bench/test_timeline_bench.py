"""The benchmark of the timeline, in short: that it runs, and that what it calls recording is recorded."""

from __future__ import annotations

import argparse

from bench import timeline


def test_a_short_run() -> None:
    parser = argparse.ArgumentParser()
    timeline.add_options(parser)
    options = parser.parse_args(["--turns", "1", "--steps", "20", "--turns-alone", "1", "--step-ms", "1"])
    result = timeline.run(options)
    assert set(result.detail["spread"]) == {timeline.WITHOUT, timeline.WITH, timeline.AGAIN}
    assert result.ours > 0 < result.limit
    assert result.detail["recording_cpu_us_per_step"] > 0
    assert not any(" 0 bytes per step" in note for note in result.detail["notes"])
