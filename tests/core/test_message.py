"""Messages restore the value that was sent, and no message can make the receiver run code."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paceline.core.message import decode, encode


class Pair(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", "a b")


@dataclasses.dataclass
class Item:
    values: torch.Tensor
    name: str = "none"

    def __post_init__(self) -> None:
        RUN.append(self.name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    pair: Pair


RUN: list[str] = []  # what ran while a message was read


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "text", b"bytes", True, float("inf"), (1, (2,)), {"a": {3: []}}],
        Pair(1, Pair("x", None)),
        Old(1, [2]),
        Frozen(Pair((), {})),
        OrderedDict(b=1, a=2),
        [np.float32(2.5), np.int64(3)],
    ],
)
def test_plain_values_arrive(value: Any) -> None:
    found = decode(encode(value, "value", with_classes=True))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (7,)])
def test_tensors_arrive_aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    item = Item((torch.arange(15)[: int(np.prod(shape))].reshape(shape) % 2).to(dtype), "item")
    array = np.arange(6).reshape(2, 3)[:, ::2]
    RUN.clear()
    found = decode(encode([item, array], "value", with_classes=True))
    assert not RUN
    assert type(found[0]) is Item
    assert torch.equal(found[0].values, item.values)
    assert found[0].values.dtype is dtype
    assert not found[0].values.numel() or found[0].values.data_ptr() % 64 == 0
    assert np.array_equal(found[1], array)


class Other:
    pass


@pytest.mark.parametrize("value", [Other(), {1}, [lambda: 0], np.array([Other()])])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^value.* cannot be stored"):
        encode(value, "value", with_classes=True)


def test_objects_with_more_than_their_fields_are_refused() -> None:
    item = Item(torch.zeros(1))
    item.more = 1
    with pytest.raises(TypeError, match="cannot be stored without pickle"):
        encode(item, "value", with_classes=True)


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:eval", "subprocess:Popen", "nothing:there", "os", "", "builtins:dict"]
)
def test_only_named_tuples_and_data_classes_are_created(name: str) -> None:
    header = json.dumps({"structure": {"$": "instance", "class": name, "fields": ["true"]}, "tensors": []}).encode()
    raw = len(header).to_bytes(8, "little") + header
    with pytest.raises(ValueError, match="not a named tuple or data class that this process has defined"):
        decode(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null"]
)
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="was not written by"):
        decode(torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8))


def test_a_shared_tensor_is_sent_once() -> None:
    tied = torch.arange(1000.0)
    message = encode({"embedding": tied, "head": tied, "empty": [torch.zeros(0)] * 2}, "value")
    assert message.numel() < 2 * tied.nbytes
    found = decode(message)
    assert torch.equal(found["head"], tied)
    assert found["head"].data_ptr() == found["embedding"].data_ptr()
    assert [len(each) for each in found["empty"]] == [0, 0]
