"""Each verdict, just below its limit and at it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from paceline.core.events import Event
from paceline.observe.verdicts.diagnose import diagnose
from paceline.observe.verdicts.evidence import Evidence, Line, Lines, WorkerFacts, WorkerPart
from paceline.observe.verdicts.verdict import Change, Limits, Verdict

NUM_LINES = 12


def part(micro_batches: float = 40, **values: float) -> WorkerPart:
    """A worker that computes 90% of the time."""
    usual = {"speed": 50.0, "computing": 0.9, "data": 0.01, "waiting": 0.02, "exchange": 0.03}
    return WorkerPart(micro_batches, **{**usual, **values})


def run(*workers: WorkerPart, before: Sequence[WorkerPart] = (), **facts: Any) -> Evidence:
    """Lines of ten steps and one second each. before: the workers in the first half."""
    first = [Line(10, 0, 0.0, 3.0, workers=workers)]
    half = NUM_LINES // 2
    rest = [
        Line(10 * n + 10, 10 * n, 1.0, 3.0 - n / 10, 0.01, 800.0, workers=before if before and n <= half else workers)
        for n in range(1, NUM_LINES)
    ]
    return Evidence(**{"lines": [*first, *rest], "first_loss": 3.0, **facts})


def losses(*values: float, **facts: Any) -> Evidence:
    lines = [Line(10 * n, 10 * n - 10, 1.0, value, lr=0.1) for n, value in enumerate(values, 1)]
    return Evidence(**{"lines": lines, "first_loss": values[0], **facts})


def became_slow(*seconds: float) -> Evidence:
    """Lines of 0.1 s, then lines of so many seconds in which a worker is slow, then one of 0.1 s as it was at first."""
    usual = [replace(line, seconds=0.1) for line in 3 * run(part(), part()).lines]
    slow = [replace(run(part(), part(speed=10)).lines[-1], seconds=each) for each in seconds]
    return Evidence(lines=[*usual, *slow, usual[-1]])


def on(host: str = "a", **values: Any) -> WorkerFacts:
    return WorkerFacts(host=host, device="cuda:0", **values)


def every_s(seconds: float) -> list[Line]:
    return [replace(line, seconds=seconds) for line in run(part()).lines]


def kinds(evidence: Evidence) -> list[str]:
    return [verdict.kind for verdict in diagnose(evidence)]


LEFT = Event("world", 5, {"left": [1], "joined": [], "size": 1})
FINE = ["nothing wrong"]
FALLING = (5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
# What is observed, and the kinds of all verdicts.
TABLE = {
    "two equal workers": (run(part(), part()), FINE),
    "a single worker": (run(part()), FINE),
    "1.29 times slower": (run(part(), part(speed=50 / 1.29)), FINE),
    "1.31 times slower": (run(part(), part(speed=50 / 1.31)), ["slow worker"]),
    "slow since the middle": (run(part(), part(speed=10), before=(part(), part())), ["slow worker"]),
    "slow in two of three lines": (
        Evidence(lines=[*run(part(), part(speed=10)).lines[:-1], run(part(), part()).lines[-1]]),
        FINE,
    ),
    "slow in a single long line": (became_slow(10.0), FINE),
    "slow in two long lines after many short ones": (became_slow(1.0, 1.0), ["slow worker"]),
    "slow for less than most of the time": (became_slow(0.7, 0.7), FINE),
    "another world before": (run(part(), part(), before=(part(), part(), part(speed=1))), FINE),
    "alone before": (run(part(), part(speed=10), before=(part(),)), ["slow worker"]),
    "slow before, not now": (run(part(), part(), before=(part(), part(speed=10))), FINE),
    "slow, but works little": (run(part(), part(speed=10, computing=0.25, data=0.04)), FINE),
    "slow, and works": (run(part(), part(speed=10, computing=0.25, data=0.06)), ["slow worker"]),
    "two of four are slow": (run(part(), part(), part(speed=20), part(speed=25)), ["slow worker", "slow worker"]),
    "waiting 19%": (run(part(waiting=0.19), part(waiting=0.19)), FINE),
    "waiting 21%": (run(part(waiting=0.21), part(waiting=0.21)), ["unbalanced"]),
    "waiting for a slow worker": (run(part(waiting=0.9), part(speed=10)), ["slow worker"]),
    "data 14%": (run(part(data=0.14), part(data=0.14)), FINE),
    "data 16%": (run(part(data=0.16), part(data=0.16)), ["data-bound"]),
    "data 16% of one of two": (run(part(data=0.16), part(data=0.14)), FINE),
    "data 16% of a single worker": (run(part(data=0.16)), ["data-bound"]),
    "slow by its data": (run(part(), part(speed=20, computing=0.3, data=0.6)), ["data-bound"]),
    "exchange 24%": (run(part(exchange=0.24), part(exchange=0.24)), FINE),
    "exchange 26%": (run(part(exchange=0.26), part(exchange=0.26)), ["exchange-bound"]),
    "GPU 69%": (run(part(), workers=[on(gpu=69)]), ["host-bound GPU"]),
    "GPU 71%": (run(part(), workers=[on(gpu=71)]), FINE),
    "GPU 20%, waits for others": (run(part(waiting=0.28), part(), workers=[on(gpu=20)]), FINE),
    "GPU 20%, waits for others a little": (run(part(waiting=0.24), workers=[on(gpu=20)]), ["host-bound GPU"]),
    "GPU memory 96%": (run(part(), workers=[on(gpu_memory_bytes=96, gpu_memory_total_bytes=100)]), ["memory"]),
    "GPU memory 94%": (run(part(), workers=[on(gpu_memory_bytes=94, gpu_memory_total_bytes=100)]), FINE),
    "host memory 96%": (run(part(), host_memory_bytes=96, host_memory_total_bytes=100), ["memory"]),
    "host memory 94%": (run(part(), host_memory_bytes=94, host_memory_total_bytes=100), FINE),
    "host memory was full": (run(part(), state="finished", host_memory_bytes=99, host_memory_total_bytes=100), FINE),
    "loss falls": (losses(*FALLING), FINE),
    "loss 1.9 times its minimum": (losses(*FALLING, *5 * [1.9], first_loss=2.0), FINE),
    "loss 2.1 times its minimum": (losses(*FALLING, *5 * [2.1]), ["diverging"]),
    "loss up by little of what it fell": (losses(*FALLING, *5 * [2.1], first_loss=5.5), FINE),
    "diverging after a first loss of inf": (losses(*FALLING, *5 * [9.0], first_loss=inf), ["diverging"]),
    "a single high loss": (losses(*FALLING, 50.0), FINE),
    "negative loss rises": (losses(*(-x for x in FALLING), *5 * [-9.0], *5 * [2.0]), ["diverging"]),
    "loss is NaN": (losses(*FALLING, nan), ["diverging"]),
    "loss is infinite at first": (losses(inf), ["diverging"]),
    "no line for 4.9 s": (run(part(), silent_s=4.9), FINE),
    "no line for 5.1 s": (run(part(), silent_s=5.1), ["stalled"]),
    "no line for 11.9 s, usually 4 s": (Evidence(lines=every_s(4.0), silent_s=11.9), FINE),
    "no line for 12.1 s, usually 4 s": (Evidence(lines=every_s(4.0), silent_s=12.1), ["stalled"]),
    "no line for long, but it has ended": (run(part(), silent_s=9e9, state="finished"), FINE),
    "a worker silent for 2.9 s": (run(part(), part(), silent_s=2.9, workers=[on(silent_s=0), on(silent_s=2.9)]), FINE),
    "a worker silent for 3.1 s": (
        run(part(), part(), silent_s=3.1, workers=[on(silent_s=0), on(silent_s=3.1)]),
        ["stalled"],
    ),
    "a worker that left is silent": (
        run(part(), silent_s=1.0, workers=[on(silent_s=0), on(silent_s=99)]),
        FINE,
    ),
    "starts again, no line for 59 s": (run(part(), silent_s=59.0, is_starting=True), FINE),
    "starts again, no line for 61 s": (run(part(), silent_s=61.0, is_starting=True), ["stalled"]),
    "a worker left": (run(part(), world_event=LEFT), ["worker left"]),
    "a worker left, and no line since": (
        run(part(), part(), world_event=replace(LEFT, step=NUM_LINES * 10)),
        ["worker left"],
    ),
    "a worker left, then the run was resumed with all": (run(part(), part(), world_event=LEFT), FINE),
    "a worker left with its full GPU": (
        run(part(), workers=[on(), on(gpu_memory_bytes=96, gpu_memory_total_bytes=100)]),
        FINE,
    ),
    "failed": (run(part(), state="failed", reason="ValueError: no"), ["failed"]),
    "crashed": (run(part(), state="crashed"), ["failed"]),
    "nothing yet": (Evidence(), ["too early"]),
    "two lines": (Evidence(lines=run(part()).lines[:3]), ["too early"]),
    "waits 1 min for its third line": (Evidence(lines=run(part()).lines[:2], silent_s=59.0), ["too early"]),
    "waits longer for its third line": (Evidence(lines=run(part()).lines[:2], silent_s=61.0), ["stalled"]),
}


@pytest.mark.parametrize(("evidence", "expected"), TABLE.values(), ids=TABLE)
def test_limits(evidence: Evidence, expected: list[str]) -> None:
    assert kinds(evidence) == expected


def first(evidence: Evidence) -> Verdict:
    return diagnose(evidence)[0]


def test_the_sentence_about_a_slow_worker() -> None:
    hosts = [on("a"), on("a"), on("b"), on("b")]
    fast, slow = part(100), part(30, speed=50 / 2.1)
    changed = run(fast, fast, fast, slow, before=(fast, fast, fast, fast), workers=hosts)
    verdict = first(changed)
    assert verdict.text == (
        "worker 3 on host b is 2.1 times slower than the others since step 70; it gets 9% of the work"
    )
    assert (verdict.rank, verdict.since_step, verdict.severity) == (3, 70, "warning")
    assert verdict.figures["slower"] == pytest.approx(2.1)
    assert verdict.figures["share"] == pytest.approx(30 / 330)
    assert verdict.lost == pytest.approx((1 - 1 / 2.1) / 4)
    always = first(run(fast, fast, fast, slow))
    assert always.text.startswith("worker 3 is 2.1 times slower than the others since the start; ")
    assert (always.since_step, always.severity) == (None, "info")  # such as a slower device: the plan takes care of it
    tail = first(run(fast, slow, is_whole=False))
    assert " since step 10 or earlier; " in tail.text


@pytest.mark.parametrize("index", range(2, NUM_LINES - 2))
def test_the_step_since_which_a_worker_is_slow(index: int) -> None:
    fine, slow = run(part(), part()).lines, run(part(), part(speed=20)).lines
    verdict = first(Evidence(lines=[*fine[:index], *slow[index:]]))
    assert verdict.since_step == slow[index].since_step


def test_a_slow_worker_that_others_wait_for_is_a_warning() -> None:
    slow = part(speed=20)
    assert first(run(part(waiting=0.09), slow)).severity == "info"
    assert first(run(part(waiting=0.11), slow)).severity == "warning"
    assert first(run(part(waiting=0.11), slow)).text.endswith(", and the others wait for it 11% of their time")


def test_one_slow_line_does_not_move_the_step_since_which_a_worker_is_slow() -> None:
    evidence = run(part(), part(speed=20))
    lines = list(evidence.lines)
    lines[4] = run(part(), part()).lines[4]
    assert " since the start; " in first(Evidence(lines=lines)).text
    lines[3] = lines[4]
    assert " since step 40; " not in first(Evidence(lines=lines)).text
    lines[5] = lines[4]
    assert first(Evidence(lines=lines)).since_step == 60


CONFIG = {
    "trainer.global_batch": 64,
    "trainer.micro_batch": 16,
    "trainer.readers": None,
    "trainer.shares": "measured",
    "trainer.overlap": True,
    "trainer.compile": False,
    "trainer.capture": "auto",
    "trainer.gradient_checkpointing": False,
    "trainer.learning_rate": 0.003,
    "trainer.max_grad_norm": None,
    "trainer.warmup_steps": 0,
    "trainer.strategy.kind": "gradients",
}
SLOW = (part(), part(speed=20))
WAITED_FOR = (part(waiting=0.5), part(speed=20))
GPU_FULL = {"workers": [on(gpu_memory_bytes=99, gpu_memory_total_bytes=100)]}
HOST_FULL = {"host_memory_bytes": 99, "host_memory_total_bytes": 100}
# Workers, facts, settings that differ from CONFIG, and what to change.
REMEDIES = {
    "balanced": (SLOW, {}, {}, {"": None}),
    "too few micro-batches": (WAITED_FOR, {}, {}, {"trainer.micro_batch": 4}),
    "enough micro-batches": (WAITED_FOR, {}, {"trainer.micro_batch": 4}, {"": None}),
    "equal shares": (WAITED_FOR, {}, {"trainer.shares": "equal"}, {"trainer.shares": "measured"}),
    "unbalanced": (2 * (part(waiting=0.3),), {}, {}, {"trainer.micro_batch": 4}),
    "no readers": ((part(data=0.6),), {"cores": 8}, {}, {"trainer.readers": 2}),
    "too few readers": ((part(data=0.6),), {"cores": 16}, {"trainer.readers": 4}, {"trainer.readers": 10}),
    "too few cores": ((part(data=0.6),), {"cores": 4}, {"trainer.readers": 4}, {"": None}),
    "some cores": ((part(data=0.6),), {"cores": 8}, {"trainer.readers": 4}, {"trainer.readers": 8, "": None}),
    "exchange": (
        2 * (part(exchange=0.4),),
        {},
        {"trainer.overlap": False},
        {"trainer.overlap": True, "trainer.global_batch": 512, "trainer.strategy": "{kind: cadence}"},
    ),
    "exchange of a cadence": (
        2 * (part(exchange=0.4),),
        {},
        {"trainer.strategy.kind": "cadence"},
        {"trainer.global_batch": 512},
    ),
    "host-bound": ((part(),), {"workers": [on(gpu=30)]}, {}, {"trainer.compile": True, "trainer.micro_batch": 32}),
    "host-bound, not captured": (
        (part(),),
        {"workers": [on(gpu=30)]},
        {"trainer.compile": True, "trainer.micro_batch": 64, "trainer.capture": "off"},
        {"trainer.capture": "auto"},
    ),
    "GPU memory": ((part(),), GPU_FULL, {}, {"trainer.micro_batch": 8, "trainer.gradient_checkpointing": True}),
    "host memory": ((part(),), HOST_FULL, {"trainer.readers": 8}, {"trainer.readers": 4}),
    "host memory without readers": ((part(),), HOST_FULL, {}, {"": None}),
}


@pytest.mark.parametrize(("workers", "facts", "settings", "expected"), REMEDIES.values(), ids=REMEDIES)
def test_what_to_change(
    workers: Sequence[WorkerPart], facts: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    verdict = first(run(*workers, settings={**CONFIG, **settings}, **facts))
    assert {change.setting: change.value for change in verdict.changes} == expected


def test_what_to_change_when_the_loss_diverges() -> None:
    diverged = losses(*FALLING, *5 * [9.0], settings=CONFIG)
    changes = {"trainer.learning_rate": 0.001, "trainer.max_grad_norm": 1.0, "trainer.warmup_steps": 100}
    assert {change.setting: change.value for change in first(diverged).changes} == changes
    assert str(first(diverged).changes[0]) == "trainer.learning_rate: 0.001 (a third of 0.003)"
    clipped = losses(*FALLING, *5 * [9.0], settings={"trainer.max_grad_norm": 1.0, "trainer.warmup_steps": 5})
    assert first(clipped).changes == (Change("", None, "lower the learning rate: 0.033, a third of 0.1"),)


def test_all_settings_to_change_exist() -> None:
    from paceline.cli.config.schema import ProjectSettings, settings_of

    trainer = settings_of(settings_of(ProjectSettings)["trainer"].type)
    named = {name for row in REMEDIES.values() for name in row[3]} | set(CONFIG)
    named = {name.removesuffix(".kind") for name in named - {""}}
    assert {name for name in named if name.partition(".")[2] not in trainer} == set()


@pytest.mark.parametrize("odd", [1.5, 1e308, inf, nan, -1, 2**62 - 1, "x", True, None, [8]])
def test_damaged_settings_have_no_remedy(odd: Any) -> None:
    """All verdicts together, with settings that no run accepts."""
    full = on(gpu=10.0, gpu_memory_bytes=9.9e9, gpu_memory_total_bytes=1e10)
    waiting = part(waiting=0.5, exchange=0.3, data=0.2, computing=0.1)
    for lines in (run(waiting, waiting).lines, run(part(), part(speed=1, waiting=0.0)).lines, losses(1.0, nan).lines):
        found = diagnose(Evidence(lines=lines, workers=[full, full], settings=dict.fromkeys(CONFIG, odd)))
        assert not any(change.value in (0, 1e308) for verdict in found for change in verdict.changes)


@pytest.mark.parametrize("time", [inf, nan, 1e308])
def test_lines_with_damaged_times_are_not_judged(time: float) -> None:
    values = {"loss": 1.0, "lanes": {"computing": [0.5], "data": [0.5], "exchange": [0.0]}, "shares": [1]}
    lines = [{"step": step, "time": step if step < 10 else step * (time / 100), **values} for step in range(1, 14)]
    verdict = first(Evidence(lines=Lines(lines).newest()))
    assert verdict.text == "the run waits for data 50% of the time"


def test_workers_that_left_and_came_back() -> None:
    gone = Event("world", 60, {"size": 2, "left": [1], "reason": "rank 1 was killed by signal 9"})
    joined = Event("world", 80, {"size": 3, "left": [], "joined": [2], "reason": ""})
    verdict = first(run(part(), part(), world_event=gone))
    assert verdict.text == "worker 1 left after step 60 (rank 1 was killed by signal 9); the other 2 continue"
    assert (verdict.kind, verdict.rank, verdict.severity) == ("worker left", None, "error")  # 1 is another worker now
    last = Event("world", 60, {"size": 2, "left": [2], "reason": "rank 2 was killed by signal 9"})
    assert first(run(part(), part(), world_event=last)).rank == 2
    assert verdict.lost == pytest.approx(1 / 3)
    assert kinds(run(part(), part(), world_event=joined)) == FINE
    assert kinds(run(part(), part(), world_event=Event("world", 60, {"size": -1, "left": [1]}))) == ["worker left"]
    replaced = Event("world", 60, {"size": 3, "left": [1], "joined": [1], "reason": "killed"})
    assert kinds(run(part(), part(), world_event=replaced)) == FINE


def test_the_most_severe_verdict_comes_first_then_the_most_expensive() -> None:
    two = run(part(data=0.2, exchange=0.4), part(data=0.2, exchange=0.4))
    assert kinds(two) == ["exchange-bound", "data-bound"]
    stalled = run(*two.lines[-1].workers, silent_s=99.0, workers=[on(silent_s=0.0), on(silent_s=98.0)])
    assert kinds(stalled) == ["stalled", "exchange-bound", "data-bound"]


DAMAGED: list[Any] = [
    {},
    {"step": 5},
    {"step": -1, "time": 1.0, "loss": 1.0},
    {"step": 5, "time": "x", "loss": 1.0},
    {"step": 5, "time": 1.0, "loss": "x", "samples_per_s": None, "shares": 3, "lanes": [1], "speeds": {}},
    {
        "step": 6,
        "time": 2.0,
        "loss": 1.0,
        "shares": [1, "x"],
        "speeds": [1.0],
        "lanes": {"data": "x", "computing": [1]},
    },
    {"step": 7, "time": 1.0, "loss": nan, "shares": [0, 0], "waiting": [nan, inf], "speeds": [0, -1]},
]


def test_damaged_lines_give_no_error() -> None:
    lines = Lines(DAMAGED).newest()
    assert [line.step for line in lines] == [5, 6, 7]
    assert kinds(Evidence(lines=lines * 5)) == ["diverging"]


def test_the_page_has_all_limits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    shown = {name: float(value) for name, value in re.findall(r"\| `(\w+)` ([\d.]+) \|", page)}
    assert shown == asdict(Limits())
