"""Moving batches to the device. The meta device stands for a GPU."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.data.feeds.device import tensors_in, to_device

CPU, META = torch.device("cpu"), torch.device("meta")


class Nested(NamedTuple):
    tokens: Any
    rest: Any


@dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


@dataclass(slots=True)
class Records:
    inner: list[Record]
    ids: torch.Tensor


class Opaque:
    def __init__(self) -> None:
        self.tensor = torch.ones(1)


def test_tensors_move_wherever_they_are_nested() -> None:
    opaque = Opaque()
    batch = {
        "named": Nested(torch.ones(2), [torch.ones(3), (torch.ones(4), "text")]),
        "deep": {"list": [{"x": torch.ones(5)}]},
        "number": 7,
        "nothing": None,
        "array": np.ones(2),
        "opaque": opaque,
    }
    moved = to_device(batch, META)
    assert list(moved) == list(batch)
    assert type(moved["named"]) is Nested
    assert moved["named"].tokens.device == META
    assert type(moved["named"].rest) is list
    assert moved["named"].rest[0].device == META
    assert type(moved["named"].rest[1]) is tuple
    assert moved["named"].rest[1][0].device == META
    assert moved["named"].rest[1][1] == "text"
    assert moved["deep"]["list"][0]["x"].device == META
    assert moved["number"] == 7
    assert moved["nothing"] is None
    assert moved["array"] is batch["array"]
    assert moved["opaque"] is opaque
    assert opaque.tensor.device == CPU
    assert batch["named"].tokens.device == CPU, "the batch that was given stays as it was"
    assert batch["deep"]["list"][0]["x"].device == CPU


class Annotated(UserDict[str, Any]):
    note: str = ""


def annotated(items: dict[str, Any]) -> Annotated:
    made = Annotated(items)
    made.note = "kept"
    return made


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, lambda items: defaultdict(list, items), annotated, MappingProxyType]
)
def test_mappings_keep_their_type(make: Callable[..., Any]) -> None:
    batch = make({"x": torch.ones(2), "y": 1})
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert moved["x"].device == META
    assert moved["y"] == 1
    assert batch["x"].device == CPU
    assert getattr(moved, "default_factory", None) is getattr(batch, "default_factory", None)
    assert getattr(moved, "note", None) == getattr(batch, "note", None)


def test_tensors_in_data_classes_move_too() -> None:
    batch = Records([Record(torch.ones(2), "first")], torch.ones(3))
    moved = to_device(batch, META)
    assert type(moved) is Records
    assert type(moved.inner[0]) is Record
    assert moved.inner[0].name == "first"
    assert [tensor.device for tensor in tensors_in(moved)] == [META, META]
    assert [tensor.device for tensor in tensors_in(batch)] == [CPU, CPU]
    assert to_device(Record, META) is Record, "a class has no tensors"


def test_a_packed_sequence_keeps_its_lengths_on_the_host() -> None:
    moved = to_device([pack_sequence([torch.ones(3), torch.ones(2)])], META)[0]
    assert type(moved) is PackedSequence
    assert moved.data.device == META
    assert moved.batch_sizes.tolist() == [2, 2, 1]


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, CPU) is tensor
    assert to_device((tensor,), CPU)[0] is tensor


def test_all_tensors_of_a_nested_batch_are_found() -> None:
    first, second = torch.ones(1), torch.ones(2)
    assert [
        t is found for t, found in zip((first, second), tensors_in({"a": [first, "b"], "c": (second, 3)}), strict=True)
    ]
    assert tensors_in("no tensors") == []
