"""DeferredReader: which items are read when."""

from __future__ import annotations

import pytest

from paceline.core.deferred import DeferredReader


@pytest.mark.parametrize(
    ("lag", "batch", "read_after_each"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6]),
        (2, 1, [0, 0, 1, 2, 3, 4]),
        (0, 3, [0, 0, 3, 3, 3, 6]),
        (2, 2, [0, 0, 0, 2, 2, 4]),
    ],
)
def test_items_are_read_late_and_in_order(lag: int, batch: int, read_after_each: list[int]) -> None:
    read: list[int] = []
    reader = DeferredReader(read.append, lag, batch=batch)
    counts = []
    for item in range(6):
        reader.add(item)
        counts.append(len(read))
    assert counts == read_after_each
    reader.flush()
    assert read == list(range(6))


def test_an_item_that_is_not_ready_holds_back_the_later_ones() -> None:
    read: list[int] = []
    ready = {1, 2}
    reader = DeferredReader(read.append, is_ready=ready.__contains__)
    for item in (1, 0, 2):
        reader.add(item)
    assert read == [1]
    ready.add(0)
    reader.add(2)
    assert read == [1, 0, 2, 2]
    reader.add(5)
    reader.clear()
    reader.flush()
    assert read == [1, 0, 2, 2]
