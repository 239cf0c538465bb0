"""A GPU's moments in the host's time; with marks that a test sets, so that no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from paceline.observe.timeline.recorder import NoTimeline, Recorder
from paceline.run.step import stopwatch
from paceline.run.step.stopwatch import CudaStopwatch


class Recorded(Recorder):
    def __init__(self) -> None:
        self.steps: list[tuple[int, list[float]]] = []

    def step(self, step: int, moments: Sequence[float]) -> None:
        self.steps.append((step, [round(moment, 6) for moment in moments]))


class Mark:
    """A place in the stream that the device passes at a time of its own clock."""

    def __init__(self, passed_s: float) -> None:
        self.passed_s = passed_s

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Mark) -> float:
        return 1e3 * (other.passed_s - self.passed_s)


def one_step(watch: CudaStopwatch, number: int) -> None:
    watch.begin_step()
    for _ in range(4):  # plan there, starts, data there, backward done
        watch.mark()
    watch.send(1)
    for _ in range(2):  # the exchange's result, optimizer done
        watch.mark()
    watch.completed(number)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def marks_at(monkeypatch: pytest.MonkeyPatch, device_s: Sequence[float], host_s: Sequence[float]) -> None:
    device: Iterator[float] = iter(device_s)
    host: Iterator[float] = iter(host_s)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mark(next(device)))
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(host))


# begins, plan there, starts, data there, backward done, exchange begins, its result, optimizer done, replicas met
STEP = (0.0, 0.1, 0.1, 0.2, 1.2, 1.2, 1.5, 1.7, 1.7)


def test_the_first_step_is_recorded_and_not_taken_for_usual(
    monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    device = [70 + at for at in STEP] + [72 + at for at in STEP] + [74 + at for at in STEP]
    #        step 1 set, step 2 set, step 1 seen, step 3 set, step 2 seen, step 3 seen
    marks_at(monkeypatch, device, [5.0, 5.5, 99.0, 6.0, 99.0, 99.0])
    watch = CudaStopwatch(recorded, 1)
    one_step(watch, 1)
    one_step(watch, 2)
    one_step(watch, 3)
    watch.flush()
    assert [step for step, _ in recorded.steps] == [1, 2, 3]
    assert recorded.steps[0][1] == [5.0, 5.1, 5.1, 5.2, 6.2, 6.2, 6.5, 6.7, 6.7]
    assert recorded.steps[1][1][0] == 7.0
    assert recorded.steps[2][1][0] == 9.0


def test_the_device_cannot_have_been_somewhere_before_or_after_the_host_knows(
    monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    device = [70 + at for at in STEP] + [72 + at for at in STEP] + [74 + at for at in STEP]
    # By counting, step 2 would begin at 7.0, but it was set at 8.0; step 3 at 10.0, but its end was seen at 10.7.
    marks_at(monkeypatch, device, [5.0, 8.0, 99.0, 8.1, 99.0, 10.7])
    watch = CudaStopwatch(recorded, 1)
    for number in (1, 2, 3):
        one_step(watch, number)
    watch.flush()
    assert [moments[0] for _, moments in recorded.steps] == [5.0, 8.0, 9.0]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_is_told_to_the_others_does_not_depend_on_a_timeline(
    monkeypatch: pytest.MonkeyPatch, recorded: Recorded, is_recorded: bool
) -> None:
    marks_at(monkeypatch, [at + 2 * n for n in range(3) for at in STEP], [0.0] * 20)
    watch = CudaStopwatch(recorded if is_recorded else NoTimeline(), 1)
    one_step(watch, 1)
    one_step(watch, 2)
    watch.begin_step()
    watch.mark()
    timing = watch.send(0)
    assert (timing.micro_batch, timing.sync, timing.rest, timing.feed) == pytest.approx((1.1, 0.3, 0.2, 0.1))
