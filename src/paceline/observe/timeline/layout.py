"""What a timeline's files hold.

    timeline/rank-0.jsonl      one file per worker, JSON lines (see paceline.observe.json_lines)

Times are whole microseconds since the session began; a session is one process's part of the run. A line is one of
    {"session": {...}}         a worker begins: who and where it is, and the Unix time of its microsecond 0
    {"steps": [...], "spans": [...], "events": [...], "samples": [...]}      what happened in the last second or so
    {"stretches": [...], "events": [...], "samples": [...]}                  the same of long ago, condensed
    {"end": microseconds}      the session ended, well or by an error
in which
    a step is       [step, start, then the time from each of its moments to the next]
    a span is       [kind, step, start, duration]
    an event is     [name, step, time, details]
    a sample is     [time, seconds it stands for, then a value or null for each of SAMPLED]
    a stretch is    [first step, last step, number of steps, start, end, then the microseconds in each of KINDS]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

VERSION = 1
FOLDER = "timeline"
FILES = "rank-*.jsonl"

# What a worker measures by itself. "writing" is a checkpoint on its way to the disk, behind the training.
KINDS = ("compute", "data", "sync", "optimizer", "checkpoint", "evaluation", "writing")

# What a worker samples every second. CPU in percent of one core, for the host of all cores; memory in bytes.
SAMPLED = ("cpu", "memory", "host_cpu", "host_memory", "gpu", "gpu_memory")

_BEFORE = ("data", "")
_PASS = ("data", "compute", "")
_AFTER = ("sync", "optimizer", "sync")
_MOMENTS_WITHOUT_PASSES = len(_BEFORE) + len(_AFTER) + 1


def kinds_between(num_moments: int) -> tuple[str, ...]:
    """What a worker does between each two moments of a step; "" for what belongs to no kind.

    The moments: the step begins, its plan is there; of each pass over micro-batches that it begins, its data is there,
    its backward is done; then the exchange begins, its result is there, the optimizer is done, and the replicas met,
    where they are averaged.
    """
    num_passes, left = divmod(num_moments - _MOMENTS_WITHOUT_PASSES, len(_PASS))
    if num_passes < 0 or left:
        raise ValueError(f"a step of {num_moments} moments: {_MOMENTS_WITHOUT_PASSES}, and {len(_PASS)} for each pass")
    return _BEFORE + num_passes * _PASS + _AFTER


def parts_of(step: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of each part of a recorded step, in order, without what belongs to no kind."""
    start, *durations = step[1:]
    for kind, duration in zip(kinds_between(len(durations) + 1), durations, strict=True):
        if kind:
            yield kind, start, start + duration
        start += duration


def end_of(step: Sequence[int]) -> int:
    return sum(step[1:])
