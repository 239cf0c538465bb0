"""What replays leave at one place: every step's own numbers reach the host, whenever somebody asks for them."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from paceline.run.capture.outbox import ROWS, Entry, Outbox


class Replays:
    """A graph that leaves two numbers that grow with every replay."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.left = [torch.zeros((), dtype=dtype), torch.zeros(1)]
        self.outbox = Outbox(self.left)

    def replay(self, value: float) -> list[Entry]:
        with self.outbox.lock:
            for place, left in zip(*self.outbox.pending(), strict=True):
                place.copy_(left)
            for left in self.left:
                left.fill_(value)
            return self.outbox.add()


@pytest.mark.parametrize("num_replays", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
def test_all_that_are_asked_for_at_the_end_are_their_own(num_replays: int) -> None:
    replays = Replays()
    entries = [replays.replay(float(step)) for step in range(num_replays)]
    assert [[entry.item() for entry in of_step] for of_step in entries] == [[s, s] for s in range(num_replays)]
    assert [of_step[0].tolist() for of_step in entries] == [[s] for s in range(num_replays)]


@pytest.mark.parametrize("interval", [1, 2, 7, ROWS, ROWS + 1])
def test_asking_early_disturbs_no_other(interval: int) -> None:
    replays, entries = Replays(), []
    for step in range(3 * ROWS):
        entries.append(replays.replay(float(step))[0])
        if step % interval == 0:
            assert entries[-1].item() == step
    assert [entry.item() for entry in entries] == list(range(3 * ROWS))


def test_numbers_that_were_copied_are_safe_from_another_graph() -> None:
    replays = Replays()
    loss, norm = replays.replay(7.0)
    replays.outbox.copy_pending()
    for left in replays.left:
        left.fill_(float("nan"))  # its memory now serves another graph
    assert (loss.item(), norm.item()) == (7.0, 7.0)


def test_nothing_has_arrived_before_it_was_sent() -> None:
    replays = Replays()
    first, *_ = replays.replay(1.0)
    assert not first.has_arrived
    for _ in range(ROWS - 1):
        replays.replay(2.0)
    assert not first.has_arrived
    later, *_ = replays.replay(3.0)  # begins another sheet
    assert first.has_arrived
    assert not later.has_arrived
    assert later.item() == 3.0
    assert later.has_arrived


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_of_any_type_stay_the_same(dtype: torch.dtype) -> None:
    value = torch.tensor(1 / 3, dtype=dtype).item()
    assert Replays(dtype).replay(value)[0].item() == value


def test_a_thread_may_ask_while_replays_go_on() -> None:
    replays = Replays()
    entries: list[Entry] = [replays.replay(0.0)[0]]
    wrong: list[tuple[int, float]] = []

    def ask() -> None:
        while len(entries) < 3000:
            step = len(entries) - 1
            if entries[step].item() != step:
                wrong.append((step, entries[step].item()))

    reader = Thread(target=ask)
    reader.start()
    for step in range(1, 3000):
        entries.append(replays.replay(float(step))[0])
    reader.join()
    assert not wrong
    assert [entry.item() for entry in entries] == list(range(3000))
