"""Who is in the next generation: literal tables."""

from __future__ import annotations

import pytest

from paceline.run.membership.generation import Generation, Member
from paceline.run.membership.roster import Report, is_entered_by_all, next_generation

A, B, C = Member(0, 0), Member(0, 1), Member(1, 0)
B2, C2 = Member(0, 1, 1), Member(1, 0, 1)
FIRST = Generation.first({0: 2, 1: 1})
# B was lost and its replacement has been let in; not all have entered.
JOINING = Generation(2, (A, B2, C), joined=frozenset({B2}))


def all_in(generation: Generation, *others: Member) -> dict[Member, int]:
    return dict.fromkeys(generation.members, generation.number) | dict.fromkeys(others, -1)


def reports(entered: dict[Member, int], **node_0: object) -> dict[int, Report]:
    own = {node: {m: n for m, n in entered.items() if m.node == node} for node in (0, 1)}
    return {0: Report(entered=own[0], **node_0), 1: Report(entered=own[1])}  # type: ignore[arg-type]


def test_nothing_changes_without_a_reason() -> None:
    assert next_generation(FIRST, {}) is None
    assert next_generation(FIRST, reports(all_in(FIRST))) is None


@pytest.mark.parametrize("entered", [{}, all_in(FIRST)])
def test_a_loss_is_urgent_at_any_time(entered: dict[Member, int]) -> None:
    following = next_generation(FIRST, reports(entered, lost={B: "died"}))
    assert following == Generation(1, (A, C), left={B: "died"}, is_urgent=True)


def test_lost_members_of_earlier_generations_are_no_news() -> None:
    after = FIRST.without({B: "died"})
    assert next_generation(after, reports(all_in(after), lost={B: "died"})) is None


def test_a_lost_node() -> None:
    following = next_generation(FIRST, reports(all_in(FIRST)), {1: "no heartbeat for 1.0 s"})
    assert following == Generation(1, (A, B), left={C: "no heartbeat for 1.0 s"}, is_urgent=True)
    assert next_generation(following, reports(all_in(following)), {1: "no heartbeat for 1.0 s"}) is None


def test_who_is_ready_joins_when_all_have_entered() -> None:
    after = FIRST.without({B: "died"})
    late = reports({A: 1, C: 0, B2: -1}, lost={B: "died"}, ready=frozenset({B2}))
    assert next_generation(after, late) is None
    ready = reports({A: 1, C: 1, B2: -1}, lost={B: "died"}, ready=frozenset({B2}))
    assert next_generation(after, ready) == Generation(2, (A, B2, C), frozenset({B2}))


def test_the_ready_of_a_lost_node_do_not_join() -> None:
    after = FIRST.without({C: "lost"})
    heard = {**reports(all_in(after)), 1: Report(ready=frozenset({C2}))}
    assert next_generation(after, heard, {1: "no heartbeat"}) is None
    assert next_generation(after, heard) == Generation(2, (A, B, C2), frozenset({C2}))


def test_a_loss_during_a_join_postpones_those_who_join() -> None:
    heard = reports({A: 2, C: 1, B2: -1}, lost={A: "died"}, ready=frozenset({B2}))
    following = next_generation(JOINING, heard)
    assert following == Generation(3, (C,), left={A: "died"}, postponed=frozenset({B2}), is_urgent=True)
    # It is still ready, and joins the next time.
    again = reports({C: 3, B2: -1}, lost={A: "died"}, ready=frozenset({B2}))
    assert next_generation(following, again) == Generation(4, (C, B2), frozenset({B2}))


def test_those_who_were_postponed_and_die_are_not_waited_for() -> None:
    after = Generation(3, (A, C), left={}, postponed=frozenset({B2}), is_urgent=True)
    heard = reports({A: 3, C: 3}, lost={B2: "died"})
    assert next_generation(after, heard) is None
    following = next_generation(after, heard, {1: "no heartbeat"})
    assert following == Generation(4, (A,), left={C: "no heartbeat"}, is_urgent=True)


def test_a_loss_after_a_join_keeps_those_who_have_joined() -> None:
    heard = reports({A: 2, B2: 2, C: 2}, lost={A: "died"})
    assert next_generation(JOINING, heard) == Generation(3, (B2, C), left={A: "died"}, is_urgent=True)


def test_one_who_dies_while_it_joins_is_lost_and_not_postponed() -> None:
    heard = reports({A: 1, C: 2}, lost={B2: "died"})
    assert next_generation(JOINING, heard) == Generation(3, (A, C), left={B2: "died"}, is_urgent=True)


@pytest.mark.parametrize(("entered_by_c", "expected"), [(0, None), (-1, None)])
def test_nobody_leaves_before_all_have_entered(entered_by_c: int, expected: None) -> None:
    after = FIRST.without({B: "died"})
    heard = reports({A: 1, C: entered_by_c}, leaving={A: "asked"})
    assert next_generation(after, heard) is expected


def test_leaving_and_joining_at_once() -> None:
    heard = reports(all_in(FIRST, B2), leaving={B: "asked", B2: "asked too"}, ready=frozenset({B2}))
    assert next_generation(FIRST, heard) == Generation(1, (A, C), left={B: "asked"})


def test_the_last_with_the_state_leave_after_newcomers_have_it() -> None:
    alone = Generation(4, (A,))
    waiting = reports({A: 4, B2: -1}, leaving={A: "asked"}, ready=frozenset({B2}))
    following = next_generation(alone, waiting)
    assert following == Generation(5, (A, B2), frozenset({B2}))
    assert next_generation(following, reports({A: 5, B2: -1}, leaving={A: "asked"})) is None
    entered = reports({A: 5, B2: 5}, leaving={A: "asked"})
    assert next_generation(following, entered) == Generation(6, (B2,), left={A: "asked"})
    assert next_generation(alone, reports({A: 4}, leaving={A: "asked"})) is None


def test_is_entered_by_all() -> None:
    assert not is_entered_by_all(FIRST, {})
    assert is_entered_by_all(FIRST, reports(all_in(FIRST)))
    assert not is_entered_by_all(FIRST, reports({A: 0, B: 0, C: -1}))
    assert is_entered_by_all(FIRST, reports({A: 0, B: 0, C: -1}), {C: "died"})


def test_reports_as_json() -> None:
    report = Report({A: "died"}, {B: "asked"}, frozenset({B2, C2}), {A: 0, B: 3})
    assert Report.from_dict(report.to_dict()) == report
