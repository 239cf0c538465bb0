"""Batches between processes: the same values and types, aligned."""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.feeds.packing import pack, unpack

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Tagged:
    values: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).view(2, 3),
        Point(torch.rand(3, 5), torch.tensor(7)),
        {"a": [torch.rand(2, dtype=torch.bfloat16), "text"], "b": (1, None, 2.5)},
        Tagged(torch.ones(3, dtype=torch.bool), "name"),
        [np.arange(5, dtype=np.int16), np.array(["a", "b"]), np.arange(3, dtype=np.uint64)],
        torch.empty(0, 4),
        "no tensors",
        torch.rand(4, 6).t(),
        (torch.rand(700, 700), torch.rand(5)),  # large: mapped, not copied
    ],
)
def test_packing_gives_back_what_was_packed_aligned(batch: Any) -> None:
    assert_same(unpack(*pack(batch)), batch)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert found.data_ptr() % 64 == 0 or not found.numel()
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, Tagged):
        assert_same((found.values, found.name), (expected.values, expected.name))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


class Plain:
    """An object of a user's class."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_of_any_picklable_object_go_through_shared_memory() -> None:
    sizes, descriptor = pack([Plain(torch.arange(1000.0)), torch.zeros(2, requires_grad=True)])
    assert sizes[0] < 1000  # the pickle
    assert sizes[1:] == [4000, 8]
    plain, leaf = unpack(sizes, descriptor)
    assert torch.equal(plain.tensor, torch.arange(1000.0))
    assert not leaf.requires_grad
    plain.tensor.zero_()  # writable


def test_only_large_batches_keep_a_mapping() -> None:
    num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept = [unpack(*pack(torch.zeros(size))) for size in (10, 1 << 20)]
    assert [tensor.sum() for tensor in kept] == [0, 0]
    assert len(os.listdir("/proc/self/fd")) <= num_files + 1  # noqa: PTH208 - mmap holds its own descriptor


def test_views_of_complex_tensors_are_resolved() -> None:
    batch = torch.view_as_complex(torch.rand(4, 2)).conj()
    assert torch.equal(unpack(*pack(batch)), batch)
