"""The benchmark of lost workers: how its notes are read, and a kill of ours."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from bench import survive, survive_hosts
from bench.harness import Result
from bench.namespaces import missing_slow_link
from bench.survive_log import Cost, Kill, Note, StepLog, WorkerNotes, costs

MISSING = missing_slow_link()


def steps(
    first_s: float, first: int, count: int, *, world: int, size: int, step_s: float = 0.1, samples: int = 12
) -> list[Note]:
    return [Note(first_s + i * step_s, first + i, world, size, samples, completed=True) for i in range(count)]


def test_notes_are_read_while_their_worker_writes(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.note(1, 0, 3, 12)
    log.note(2, 0, 3, 12, completed=False)
    (own,) = WorkerNotes.of_all(tmp_path)
    assert own.is_alive
    assert [note[1:] for note in own.all()] == [(1, 0, 3, 12, True), (2, 0, 3, 12, False)]
    assert own.from_end(2) == own.all()[0]
    assert own.from_end(3) is None


def test_a_survivor_is_measured_to_its_first_step_in_the_next_world_beyond_a_normal_one() -> None:
    lost, survivor = steps(0.0, 1, 5, world=0, size=3), steps(0.0, 1, 6, world=0, size=3)
    survivor += steps(1.0, 7, 5, world=1, size=2, step_s=0.2)
    (cost,) = costs([Kill(0.45, world=0)], [lost, survivor], global_batch=12)
    # The step that ended at 0.5 was completed with the lost worker; one of two workers takes 0.2 s.
    assert cost == Cost(pytest.approx(1.0 - 0.45 - 0.2), 0, 0, 0)


def test_steps_that_are_done_again_are_counted_for_every_kill() -> None:
    before = steps(0.0, 1, 13, world=0, size=3)
    between = steps(10.0, 11, 8, world=1, size=3)
    after = steps(20.0, 11, 3, world=2, size=3)
    everybody = 3 * [before] + 3 * [between] + 3 * [after]  # who is restarted is another worker
    found = costs([Kill(1.25, world=0), Kill(10.75, world=1)], everybody, global_batch=12)
    assert [cost.num_repeated for cost in found] == [3, 8]
    assert [cost.num_untrained for cost in found] == [0, 0]


def test_a_step_that_a_survivor_takes_over_from_another_is_not_done_again() -> None:
    ahead = steps(0.0, 1, 6, world=0, size=3) + steps(1.0, 7, 3, world=1, size=2)
    behind = steps(0.0, 1, 5, world=0, size=3) + steps(0.9, 6, 4, world=1, size=2)
    lost = steps(0.0, 1, 5, world=0, size=3)
    (cost,) = costs([Kill(0.45, world=0)], [lost, ahead, behind], global_batch=12)
    assert (cost.num_repeated, cost.num_untrained) == (0, 0)
    (cost,) = costs([Kill(0.45, world=0)], [ahead[:6], behind, behind], global_batch=12)  # only the lost one had it
    assert cost.num_repeated == 1


def test_samples_of_dropped_and_of_smaller_steps_are_never_trained() -> None:
    survivor = steps(0.0, 1, 5, world=0, size=3)
    survivor.append(Note(0.5, 5, 0, 3, 12, completed=False))
    survivor += steps(5.0, 6, 4, world=1, size=2, samples=8)
    (cost,) = costs([Kill(0.45, world=0)], [survivor], global_batch=12)
    assert (cost.num_dropped, cost.num_repeated) == (1, 0)
    assert cost.num_untrained == 12 + 4 * 4


def test_the_goal_is_missed_by_a_slow_tail_alone() -> None:
    seconds = {survive.OURS: [0.1, 0.1, 0.1], survive.TORCHFT: [5.0, 5.0, 5.0]}
    result = Result.of("survive", "s", seconds, ours=survive.OURS, limit=survive.TORCHFT, better="lower", settings={})
    result.detail["p90"] = {survive.OURS: 2.0}
    assert survive.slower_of_goals(result) == 2.0
    result.detail["p90"] = {survive.OURS: 0.1}
    assert survive.slower_of_goals(result) == 0.2


@pytest.mark.parametrize(
    "name",
    [
        survive.OURS,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (survive.RESTART, survive.TORCHRUN, survive.TORCHFT)),
    ],
)
def test_the_loss_of_a_worker_has_its_price(name: str) -> None:
    (cost,) = survive.lose_workers(name, "mlp", 1, random.Random(1))
    assert math.isfinite(cost.seconds)  # beyond a normal step: the others may have been near the end of theirs
    if name == survive.OURS:
        assert (cost.num_repeated, cost.num_dropped, cost.num_untrained) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_host_goes_on_when_its_link_is_cut_and_the_other_one_comes_back() -> None:
    found = survive_hosts.cut_links(2, random.Random(1))
    assert len(found) == 2
    assert all(cost.seconds > 0 for cost in found)
    assert survive.lost(found) == {"steps_repeated": 0, "steps_dropped": 0, "samples_untrained": 0}
