from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan import epoch as order
from paceline.plan.epoch import EpochOrder

LIMIT = order._MAX_SORTED


def whole(length: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> np.ndarray:
    return EpochOrder(length, seed=seed, epoch=epoch, shuffle=shuffle).indices(0, length)


def assert_permutation(indices: np.ndarray, length: int) -> None:
    assert indices.dtype == np.int64
    assert indices.flags.c_contiguous
    assert np.array_equal(np.sort(indices), np.arange(length))


def assert_uniform(counts: np.ndarray, expected: float) -> None:
    """Chi-square at most 4 standard deviations above its mean, which a fair draw exceeds about once in 2,000 times."""
    freedom = counts.size - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom)


# The order is part of what a seed means: these values must hold in every version.
@pytest.mark.parametrize(
    ("length", "seed", "epoch", "start", "expected"),
    [
        (10, 0, 0, 0, [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]),
        (10, 1, 0, 0, [9, 8, 7, 4, 2, 0, 3, 6, 5, 1]),
        (10, 0, 1, 0, [6, 0, 4, 5, 2, 7, 9, 1, 8, 3]),
        (65_536, 0, 0, 0, [35561, 30683, 21634, 29047, 23375, 43975]),
        (65_537, 0, 0, 0, [47374, 24180, 63917, 41045, 22016, 32484]),
        (65_537, 7, 3, 65_533, [5268, 34561, 53380, 20902]),
        (10**9, 7, 3, 0, [761772798, 463411063, 871672121, 597301568]),
        (10**12, -1, 0, 10**12 - 4, [164182452146, 419071131240, 325194090329, 902201775836]),
    ],
)
def test_golden_values(length: int, seed: int, epoch: int, start: int, expected: list[int]) -> None:
    indices = EpochOrder(length, seed=seed, epoch=epoch).indices(start, start + len(expected))
    assert indices.tolist() == expected


def test_splitmix_reference_values() -> None:
    outputs = order._splitmix(1234567, np.arange(3, dtype=np.uint64))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("length", [0, 1, 10, LIMIT, LIMIT + 1, 100_000])
def test_unshuffled_is_identity(length: int) -> None:
    indices = whole(length, shuffle=False)
    assert_permutation(indices, length)
    assert np.array_equal(indices, np.arange(length))


def test_every_small_length_is_permuted() -> None:
    for length in range(200):
        assert_permutation(whole(length, seed=length), length)


def test_network_permutes_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MAX_SORTED", 0)
    for length in range(1, 200):
        assert_permutation(whole(length, seed=length), length)


@pytest.mark.parametrize(
    "length",
    [
        LIMIT - 1,
        LIMIT,
        LIMIT + 1,
        LIMIT + 2,
        99_991,
        300**2 - 1,
        300**2,
        300**2 + 1,
        300 * 301,
        300 * 301 + 1,
        10**6 + 3,
    ],
)
def test_large_lengths_are_permuted(length: int) -> None:
    assert_permutation(whole(length, seed=5, epoch=2), length)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150_000), st.integers(), st.integers(0, 2**63 - 1))
def test_any_length_seed_and_epoch_is_permuted(length: int, seed: int, epoch: int) -> None:
    assert_permutation(whole(length, seed=seed, epoch=epoch), length)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([10, 1000, LIMIT, LIMIT + 1, 80_000]), st.booleans(), st.data())
def test_parts_in_any_order_equal_the_whole(length: int, shuffle: bool, data: st.DataObject) -> None:
    expected = whole(length, seed=3, epoch=1, shuffle=shuffle)
    parts = EpochOrder(length, seed=3, epoch=1, shuffle=shuffle)
    for _ in range(10):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, min(length, start + 3 * order._BLOCK)))
        assert np.array_equal(parts.indices(start, stop), expected[start:stop])


@pytest.mark.parametrize("length", [1000, 70_001])
def test_micro_batches_in_turn_equal_the_whole(length: int) -> None:
    parts = EpochOrder(length, seed=3, epoch=1)
    pieces = [parts.indices(start, min(start + 7, length)) for start in range(0, length, 7)]
    assert np.array_equal(np.concatenate(pieces), whole(length, seed=3, epoch=1))


def test_calls_within_a_block_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = EpochOrder(10**9, seed=0, epoch=0)
    parts.indices(16, 24)
    monkeypatch.setattr(EpochOrder, "_load", None)
    for start in range(24, order._BLOCK, 8):
        assert parts.indices(start, start + 8).size == 8


@pytest.mark.parametrize("length", [100, LIMIT + 1])
def test_epochs_and_seeds_differ(length: int) -> None:
    orders = [whole(length, seed=seed, epoch=epoch)[:50] for seed in (-1, 0, 1, 2) for epoch in (0, 1, 2)]
    assert len({tuple(indices.tolist()) for indices in orders}) == 12


@pytest.mark.parametrize(("num_seeds", "num_epochs"), [(24_000, 1), (1, 4_800)])
def test_permutations_of_four_are_equally_frequent(num_seeds: int, num_epochs: int) -> None:
    seen = Counter(
        tuple(whole(4, seed=seed, epoch=epoch).tolist()) for seed in range(num_seeds) for epoch in range(num_epochs)
    )
    assert len(seen) == 24
    assert_uniform(np.array(list(seen.values())), num_seeds * num_epochs / 24)


def test_network_places_samples_uniformly() -> None:
    num_seeds, length, bins = 3_000, LIMIT + 1, 8
    positions = [0, 1, 255, 256, 257, 4000]  # neighbours in a row and in a column of the network
    drawn = np.empty((num_seeds, len(positions) + 1), np.int64)
    for seed in range(num_seeds):
        epoch_order = EpochOrder(length, seed=seed, epoch=0)
        drawn[seed, :-1] = epoch_order.indices(0, order._BLOCK)[positions]
        drawn[seed, -1] = epoch_order.indices(length - 1, length)[0]
    binned = drawn * bins // length
    for column in binned.T:
        assert_uniform(np.bincount(column, minlength=bins), num_seeds / bins)
    for first, second in [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (0, 5), (0, 6)]:
        pairs = np.bincount(binned[:, first] * bins + binned[:, second], minlength=bins**2)
        assert_uniform(pairs, num_seeds / bins**2)


def test_network_leaves_no_more_neighbours_than_chance() -> None:
    """A random permutation keeps one pair (i, i+1) together on average; too few rounds keep twice as many or more."""
    num_seeds, length = 60, LIMIT + 1
    kept = sum(int((np.diff(whole(length, seed=seed)) == 1).sum()) for seed in range(num_seeds))
    assert abs(kept - num_seeds) < 4 * math.sqrt(num_seeds)


@pytest.mark.parametrize("lag", [1, 2, 1000, 3163])
@pytest.mark.parametrize("length", [10**7, 10**12])
def test_no_serial_correlation(length: int, lag: int) -> None:
    indices = EpochOrder(length, seed=1, epoch=0).indices(0, 100_000).astype(np.float64)
    correlation = np.corrcoef(indices[:-lag], indices[lag:])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(indices.size)


@pytest.mark.parametrize("length", [10**9, 10**12, 2**63 - 1])
def test_enormous_lengths_are_quick_and_small(length: int) -> None:
    starts = np.random.default_rng(0).integers(0, length // 2000, 200) * 2000
    tracemalloc.start()
    began_s = time.perf_counter()
    epoch_order = EpochOrder(length, seed=0, epoch=0)
    indices = [epoch_order.indices(start, start + 1000).copy() for start in starts.tolist()]
    elapsed_s = time.perf_counter() - began_s
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    drawn = np.concatenate(indices)
    assert peak_bytes < drawn.nbytes + 2**20
    assert elapsed_s < 5
    # 200,000 independent draws of 10**9 would have some 20 repetitions.
    assert np.unique(drawn).size == drawn.size
    assert drawn.min() >= 0
    assert drawn.max() < length
    assert_uniform(np.bincount((drawn / length * 100).astype(np.int64), minlength=100), drawn.size / 100)


@pytest.mark.parametrize("length", [-1, 2**63])
def test_bad_length(length: int) -> None:
    with pytest.raises(ValueError, match=rf"length={length} is not a number of samples: choose 0 <= length < 2\*\*63"):
        EpochOrder(length, seed=0, epoch=0)


@pytest.mark.parametrize("epoch", [-1, 2**63])
def test_bad_epoch(epoch: int) -> None:
    with pytest.raises(ValueError, match=rf"epoch={epoch} is not an epoch's number"):
        EpochOrder(8, seed=0, epoch=epoch)


@pytest.mark.parametrize("length", [0, 10, LIMIT + 1])
def test_bad_positions(length: int) -> None:
    epoch_order = EpochOrder(length, seed=0, epoch=0)
    epoch_order.indices(0, length)
    for start, stop in [(-1, 0), (0, length + 1), (length + 1, length + 1), (1, 0)]:
        with pytest.raises(ValueError, match=rf"start={start}, stop={stop} are not in an epoch of {length} samples"):
            epoch_order.indices(start, stop)
