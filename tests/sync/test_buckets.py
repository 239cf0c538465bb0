"""Flat buckets: layout, alignment, strides, plain and exact addition."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.comm.single import SingleCommunicator
from paceline.core.world import World
from paceline.sync.buckets import ALIGNMENT_BYTES, CPU_BLOCK, Bucket, ExactBucket, assign

COMMUNICATOR = SingleCommunicator(World())


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for i, shape in enumerate(shapes)}


def test_assign_goes_from_the_last_parameter_to_the_first_and_splits_by_size_and_type() -> None:
    some = parameters((100,), (50,), (10,))
    some["half"] = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    assert [list(group) for group in assign(some, bucket_bytes=200)] == [["half"], ["p2", "p1"], ["p0"]]


@pytest.mark.parametrize("bucket_type", [Bucket, ExactBucket])
def test_every_view_is_aligned_and_apart(bucket_type: type[Bucket]) -> None:
    bucket = bucket_type(parameters((3,), (5, 7), (1,), ()), torch.float32, COMMUNICATOR, 9)
    spans = sorted(
        (view.storage_offset(), view.storage_offset() + view.numel(), view.data_ptr()) for view in bucket.views
    )
    assert all(pointer % ALIGNMENT_BYTES == spans[0][2] % ALIGNMENT_BYTES for _, _, pointer in spans)
    assert all(stop <= start for (_, stop, _), (start, _, _) in itertools.pairwise(spans))
    assert bucket.tail.numel() == 9
    assert spans[-1][1] <= bucket.payload.numel()


@pytest.mark.parametrize("bucket_type", [Bucket, ExactBucket])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weighted_mean_reaches_the_parameter_in_its_own_type_and_layout(
    bucket_type: type[Bucket], dtype: torch.dtype
) -> None:
    weight = torch.randn(4, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last)
    bucket = bucket_type({"w": torch.nn.Parameter(weight)}, torch.float32, COMMUNICATOR, 0)
    first = torch.randn(4, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last)
    second = torch.randn(4, 3, 5, 5, dtype=dtype)  # not the parameter's layout
    bucket.add(0, first, 3.0, first=True)
    bucket.add(0, second, 5.0, first=False)
    bucket.publish([True], torch.tensor(8.0))
    gradient = bucket.parameters[0].grad
    assert gradient is not None
    assert gradient.dtype == dtype
    assert gradient.stride() == weight.stride()
    expected = (3 * first.double() + 5 * second.double()) / 8
    torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps * 4 + 1e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adding_all_gradients_at_once_gives_the_bits_of_adding_one_by_one(dtype: torch.dtype) -> None:
    shapes = [(3,), (5, 7), (), (4, 3, 2, 2)]
    one_by_one, at_once = (Bucket(parameters(*shapes, dtype=dtype), torch.float32, COMMUNICATOR, 2) for _ in range(2))
    for weight, first in ((1 / 3, True), (0.7, False)):
        gradients = [torch.randn(shape, dtype=dtype) for shape in shapes]
        gradients[3] = gradients[3].to(memory_format=torch.channels_last)
        for index, gradient in enumerate(gradients):
            one_by_one.add(index, gradient, weight, first=first)
        at_once.add_all(gradients, weight, first=first)
        assert torch.equal(one_by_one.flat, at_once.flat)


def test_exact_addition_over_several_blocks_is_elementwise() -> None:
    size = 2 * CPU_BLOCK + 17
    bucket = ExactBucket(parameters((size,)), torch.float32, COMMUNICATOR, 0)
    gradient = torch.randn(size)
    bucket.add(0, gradient, 2.0, first=True)
    bucket.add(0, gradient, 1.0, first=False)
    torch.testing.assert_close(bucket.views[0], 3 * gradient.double(), rtol=1e-9, atol=1e-9)


def test_unused_parameters_keep_none() -> None:
    bucket = Bucket(parameters((2,), (2,)), torch.float32, COMMUNICATOR, 0)
    bucket.publish([True, False])
    assert [p.grad is None for p in bucket.parameters] == [False, True]
