"""State trees are restored with all types and bits, or refused with the path of the unsupported value."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from bitwise import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.tree import DTYPES, flatten, unflatten


def round_trip(tree: Any) -> Any:
    flat = flatten(tree, "state")
    # Through text, as on the disk; and contiguous, as the file stores them.
    structure = json.loads(json.dumps(flat.structure, allow_nan=False))
    return unflatten(structure, {name: tensor.contiguous() for name, tensor in flat.tensors.items()})


TREES: dict[str, Any] = {
    "nothing": None,
    "a number": 3,
    "bool is not int": [True, 1, False, 0],
    "float is not int": [1.0, 1, -0.0, 1e-300, 0.1],
    "not finite": [float("inf"), float("-inf"), float("nan")],
    "large integers": [2**53, 2**53 + 1, -(2**64), 2**127 - 1, 7**6000],
    "text": ["", 'é\n"', "\ud800", "$"],
    "tuples": ((), (1, (2.0, [3, (4,)]))),
    "empty containers": [{}, [], (), OrderedDict()],
    "int keys": {0: "a", 1: {2: "b"}, "0": "c", -1: None},
    "the key that marks": {"$": "tuple", "items": [1]},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter({30: 1, 80: 2}),
    "0-dim": torch.tensor(3.5),
    "empty tensors": [torch.empty(0), torch.empty(3, 0, dtype=torch.int64)],
    "dtypes": {name: torch.tensor([0, 1, 1]).to(dtype) for name, dtype in DTYPES.items()},
    "nan bits": torch.tensor([float("nan"), float("inf"), -0.0]),
    "complex": [
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(1j, dtype=torch.complex128),
    ],
    "not contiguous": [torch.arange(12).view(3, 4).t(), torch.arange(10)[::3], torch.ones(1).expand(3)],
    "names that collide": {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(2)},
    "keys that collide": {0: torch.zeros(1), "0": torch.ones(1)},
    "torch values": [torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "numpy values": [
        np.float32(0.1),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.complex64(1j),
    ],
    "numpy arrays": [
        np.arange(6).reshape(2, 3),
        np.zeros((0, 2), np.float16),
        np.array(1.5),
        np.arange(4, dtype=np.uint32),
    ],
    "numpy views": [np.arange(6)[::-1], np.arange(12).reshape(3, 4).T, np.broadcast_to(np.float32(1), (2, 2))],
    "bytes": [b"\x00\xff", bytearray(b"ab")],
    "python's generator": random.Random(1).getstate(),
    "numpy's generators": [np.random.RandomState(1).get_state(), np.random.default_rng(1).bit_generator.state],
}


@pytest.mark.parametrize("name", TREES)
def test_round_trip_of_every_type(name: str) -> None:
    assert same(round_trip({"x": TREES[name]}), {"x": TREES[name]})
    assert same(round_trip(TREES[name]), TREES[name])


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.just("$"), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_round_trip_of_any_plain_tree(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def test_round_trip_of_torch_state_dicts() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        for part in (
            model,
            optimizer,
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ):
            assert same(round_trip(dict(part.state_dict())), dict(part.state_dict()))


def test_tensor_names_equal_the_state_dict_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(flatten(model.state_dict(), "model").tensors) == list(model.state_dict())
    assert list(flatten({"state": {0: {"exp_avg": torch.ones(1)}}}, "optimizer").tensors) == ["state.0.exp_avg"]


def test_shared_tensors_stay_shared_and_keep_all_names() -> None:
    tied = torch.randn(3)
    flat = flatten({"embed": tied, "head": tied, "view": tied.view(3, 1), "equal": tied.clone()}, "model")
    assert list(flat.tensors) == ["embed", "head", "view", "equal"]
    assert flat.tensors["embed"] is flat.tensors["head"]
    back = unflatten(flat.structure, {name: tensor.clone() for name, tensor in flat.tensors.items()})
    assert back["embed"] is back["head"]
    back["embed"].zero_()
    assert torch.equal(back["view"].flatten(), tied)
    assert torch.equal(back["equal"], tied)


def test_tensors_are_not_copied() -> None:
    parameter = nn.Parameter(torch.randn(3))
    flat = flatten({"p": parameter}, "model")
    assert flat.tensors["p"].data_ptr() == parameter.data_ptr()
    assert not flat.tensors["p"].requires_grad


Point = namedtuple("Point", "x y")


class Settings(dict):  # type: ignore[type-arg]
    pass


def cycle() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


REFUSED: dict[str, tuple[Any, str]] = {
    "function": ({"hooks": [print, lambda: 0]}, r"optimizer\['hooks'\]\[0\] is a builtin_function_or_method"),
    "lambda": ({"state": {3: {"fn": lambda: 0}}}, r"optimizer\['state'\]\[3\]\['fn'\] is a function, which cannot be"),
    "object": ((1, object()), r"optimizer\[1\] is a object, which cannot be stored without pickle"),
    "namedtuple": ({"p": Point(1, 2)}, r"optimizer\['p'\] is a test_tree.Point"),
    "subclass": ({"p": Settings()}, r"optimizer\['p'\] is a test_tree.Settings"),
    "set": ({"p": {1}}, r"optimizer\['p'\] is a set"),
    "key": ({"p": {1.5: 0}}, r"optimizer\['p'\] has the key 1.5 of type float: only str and int"),
    "bool key": ({True: 0}, r"optimizer has the key True of type bool"),
    "sparse": ([torch.eye(2).to_sparse()], r"optimizer\[0\] is a tensor \(torch.sparse_coo on cpu\)"),
    "meta": ([torch.empty(2, device="meta")], r"optimizer\[0\] is a tensor \(torch.strided on meta\)"),
    "strings": ([np.array(["a"])], r"optimizer\[0\] is an array of dtype <U1"),
    "byte order": ({"x": np.array([1.0], ">f4")}, r"optimizer\['x'\] is an array of dtype >f4"),
    "objects": ([np.array([None])], r"optimizer\[0\] is an array of dtype object"),
    "dates": ([np.datetime64("2020-01-01")], r"optimizer\[0\] is a numpy.datetime64"),
    "itself": (cycle(), "nested deeper than 100 levels: does the state contain itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_values_are_named_with_their_path(name: str) -> None:
    tree, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        flatten(tree, "optimizer")


STRANGE: dict[str, tuple[Any, str]] = {
    "unknown kind": ({"$": "object", "module": "os"}, "a value has the unknown kind 'object'"),
    "no tensor": ({"$": "tensor", "name": "x"}, "KeyError: 'x'"),
    "no items": ({"$": "tuple"}, "KeyError: 'items'"),
    "not pairs": ({"$": "dict", "items": [1]}, "TypeError"),
    "no dtype": ({"$": "dtype", "name": "load"}, "'load' is not a torch dtype"),
    "object dtype": ({"$": "numpy", "dtype": "O", "hex": "00" * 8}, "dtype 'O' is not numeric"),
    "no hex": ({"$": "int", "hex": 3}, "TypeError"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_malformed_structures_are_refused(name: str) -> None:
    structure, message = STRANGE[name]
    with pytest.raises(ValueError, match=message):
        unflatten([structure], {})
