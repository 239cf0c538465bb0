"""Generations as values: literal tables."""

from __future__ import annotations

import pytest

from paceline.run.membership.generation import Generation, Member

A, B, C = Member(0, 0), Member(0, 1), Member(0, 2)
D, E = Member(1, 0), Member(1, 1)
A2, B2 = Member(0, 0, 1), Member(0, 1, 1)
FIRST = Generation.first({0: 3, 1: 2})


def test_the_first_one_has_all_workers_in_the_order_of_nodes_and_slots() -> None:
    assert FIRST.members == (A, B, C, D, E)
    assert (FIRST.number, FIRST.is_urgent, FIRST.joined, FIRST.left) == (0, False, frozenset(), {})


@pytest.mark.parametrize(
    ("lost", "postponed", "members", "left"),
    [
        ({B: "died"}, (), (A, C, D, E), {B: "died"}),
        ({A: "died"}, (), (B, C, D, E), {A: "died"}),  # another one is rank 0
        ({A: "x", D: "y"}, (), (B, C, E), {A: "x", D: "y"}),
        ({D: "node", E: "node"}, (), (A, B, C), {D: "node", E: "node"}),
        ({B2: "never joined", C: "died"}, (), (A, B, D, E), {C: "died"}),
        ({C: "died"}, (E,), (A, B, D), {C: "died"}),  # E joins again later
        ({E: "died"}, (E,), (A, B, C, D), {E: "died"}),  # and a lost one does not
    ],
)
def test_the_one_after_a_loss(
    lost: dict[Member, str], postponed: tuple[Member, ...], members: tuple[Member, ...], left: dict[Member, str]
) -> None:
    following = FIRST.without(lost, postponed)
    assert following == Generation(
        1, members, left=left, postponed=frozenset(postponed) - frozenset(lost), is_urgent=True
    )


@pytest.mark.parametrize(
    ("leaving", "joining", "members", "joined", "left"),
    [
        ({}, [B2], (A, C, B2, D, E), {B2}, {}),  # after the other workers of its node
        ({}, [Member(2, 1), Member(2, 0)], (A, C, D, E, Member(2, 0), Member(2, 1)), {Member(2, 0), Member(2, 1)}, {}),
        ({A: "asked"}, [], (C, D, E), set(), {A: "asked"}),
        ({A: "asked", C: "asked"}, [A2], (D, E, A2), {A2}, {A: "asked", C: "asked"}),  # rank 0 has the state
        ({D: "asked"}, [B2], (A, C, B2, E), {B2}, {D: "asked"}),
        ({B: "asked"}, [C], None, None, None),  # B has left before, and C is in it
        ({}, [], None, None, None),
    ],
)
def test_the_one_after_a_step(
    leaving: dict[Member, str],
    joining: list[Member],
    members: tuple[Member, ...] | None,
    joined: set[Member],
    left: dict[Member, str],
) -> None:
    following = FIRST.without({B: "died"}).changed(leaving, joining)
    assert following == (None if members is None else Generation(2, members, frozenset(joined), left))


def test_those_who_were_postponed_are_named_until_they_have_joined() -> None:
    """Deaths may follow each other so quickly that a worker reads only the last generation."""
    joining = FIRST.changed({}, [B2, A2])
    assert joining is not None
    second = joining.without({C: "died"}, joining.joined).without({D: "died"})
    assert second.postponed == {A2, B2}
    third = second.without({E: "died", B2: "died"})
    assert (third.members, third.postponed) == ((A, B), {A2})
    again = third.changed({}, [A2])
    assert again is not None
    assert (again.joined, again.postponed) == ({A2}, frozenset())


def test_ranks() -> None:
    after = FIRST.without({A: "died"}).changed({}, [A2])
    assert after is not None
    assert after.members == (B, C, A2, D, E)
    assert [after.rank_of(member) for member in (A, B, A2, E)] == [None, 0, 2, 4]
    assert [after.local_ranks(member) for member in after.members] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert after.previous_ranks(FIRST) == (1, 2, None, 3, 4)
    assert FIRST.previous_ranks(after) == (None, 0, 1, 3, 4)


@pytest.mark.parametrize(
    "generation", [FIRST, FIRST.without({A: "was killed by SIGKILL"}, [E]), FIRST.changed({B: "asked"}, [A2])]
)
def test_json(generation: Generation) -> None:
    assert Generation.from_json(generation.to_json()) == generation
    assert Generation.from_json(generation.to_json().encode()) == generation


def test_members_as_text() -> None:
    assert str(Member(2, 3, 1)) == "2:3:1"
    assert Member.parse("2:3:1") == Member(2, 3, 1)
