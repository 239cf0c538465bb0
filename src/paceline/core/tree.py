"""State trees: nested dicts, lists and tuples of tensors and plain values, stored without pickle.

`flatten` splits a tree into named tensors and a JSON value that describes everything else. `unflatten` restores it with
all types: tuples, int keys, infinities, 0-dim tensors, NumPy values. Tensors come back contiguous and on the CPU; a
tensor that appeared several times is shared again.

In the JSON value, an object with the key "$" represents what JSON lacks; everything else represents itself.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

# The dtypes of the safetensors format, by their names there.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_DEPTH = 100
RESERVED_NAME = "__metadata__"  # no tensor of a safetensors file can have this name

# Larger integers are not exact in other JSON readers.
_SAFE_INT_BITS = 53

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size"}
_NUMPY_KINDS = "biufc"

# A position in the tree: the name of the tree, and the keys that lead to the value.
_Path = tuple[str | int, ...]


class Flat(NamedTuple):
    """A flattened tree. `tensors` are the tree's own, on their devices; a shared tensor has several names."""

    tensors: dict[str, torch.Tensor]
    structure: Any


def flatten(tree: Any, name: str, *, with_classes: bool = False, is_partial: bool = False) -> Flat:
    """Flatten `tree`. A value that cannot be stored is a TypeError with its path, which begins with `name`.

    `with_classes` also stores named tuples and data classes, by the names of their classes. It is meant for messages
    between processes of the same program; files outlive classes. `is_partial`: the data of tensors on the meta device
    is elsewhere.
    """
    encoder = _Encoder(with_classes, is_partial)
    structure = encoder.encode(tree, (name,))
    return Flat(encoder.tensors, structure)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


# Types of values that are stored as {"$": kind, key: text}: kind, key, and the functions to and from text.
_SCALARS: dict[type, tuple[str, str, Callable[[Any], str], Callable[[str], Any]]] = {
    int: ("int", "hex", hex, lambda text: int(text, 16)),
    float: ("float", "value", repr, float),
    bytes: ("bytes", "hex", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", "hex", bytearray.hex, bytearray.fromhex),
    torch.dtype: ("dtype", "name", lambda dtype: str(dtype).removeprefix("torch."), _dtype),
    torch.device: ("device", "name", str, torch.device),
}
_SCALAR_KINDS = {kind: (key, from_text) for kind, key, _, from_text in _SCALARS.values()}
_CONTAINER_KINDS = {name: kind for kind, name in (_MAPPINGS | _SEQUENCES).items()}


class _Encoder:
    def __init__(self, with_classes: bool, is_partial: bool) -> None:
        self._with_classes = with_classes
        self._is_partial = is_partial
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}

    def encode(self, value: Any, path: _Path) -> Any:
        if len(path) > MAX_DEPTH + 1:
            raise TypeError(f"{_text(path)} is nested deeper than {MAX_DEPTH} levels: does the state contain itself?")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if (kind is int and value.bit_length() <= _SAFE_INT_BITS) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return self._encode_items(value, path)
        if kind in _SEQUENCES:
            return {"$": _SEQUENCES[kind], "items": self._encode_items(value, path)}
        if kind in _MAPPINGS:
            return self._encode_mapping(value, path)
        if kind in (torch.Tensor, nn.Parameter):
            return self._encode_tensor(value.detach(), path)
        if kind is np.ndarray:
            return {**self._encode_tensor(_from_numpy(value, path), path), "$": "ndarray"}
        if kind in _SCALARS:
            name, key, to_text, _ = _SCALARS[kind]
            return {"$": name, key: to_text(value)}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return {"$": "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if self._with_classes and (fields := _fields(kind)) is not None and _has_only(value, fields):
            values = [getattr(value, field) for field in fields]
            return {"$": "instance", "class": _class_name(kind), "fields": self._encode_items(values, path)}
        raise TypeError(
            f"{_text(path)} is a {_type_name(value)}, which cannot be stored without pickle: leave it out, or "
            "convert it to tensors, numbers, strings, lists, tuples and dicts"
        )

    def _encode_items(self, values: Iterable[Any], path: _Path) -> list[Any]:
        return [self.encode(value, (*path, i)) for i, value in enumerate(values)]

    def _encode_mapping(self, mapping: Mapping[Any, Any], path: _Path) -> dict[str, Any]:
        for key in mapping:
            if type(key) not in (str, int):
                kind = _type_name(key)
                raise TypeError(f"{_text(path)} has the key {key!r} of type {kind}: only str and int can be stored")
        items = [[key, self.encode(value, (*path, key))] for key, value in mapping.items()]
        if type(mapping) is dict and all(type(key) is str and key != "$" for key in mapping):
            return dict(items)
        return {"$": _MAPPINGS[type(mapping)], "items": items}

    def _encode_tensor(self, tensor: torch.Tensor, path: _Path) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or (tensor.is_meta and not self._is_partial):
            layout = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise TypeError(f"{_text(path)} is a tensor ({layout}): only dense tensors with data can be stored")
        tensor = tensor.resolve_conj().resolve_neg()
        complex_mark = {"is_complex": True} if tensor.is_complex() else {}
        tensor = torch.view_as_real(tensor) if complex_mark else tensor
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{_text(path)} is a tensor of {tensor.dtype}, which the safetensors format lacks")
        return {"$": "tensor", "name": self._add(tensor, path), **complex_mark}

    def _add(self, tensor: torch.Tensor, path: _Path) -> str:
        """Add the tensor under a new name; returns the first name under which it was added."""
        # Surrogates, which UTF-8 lacks, would make the file unreadable to other tools.
        wanted = ".".join(str(key).encode(errors="replace").decode() for key in path[1:]) or "tensor"
        name, number = wanted, 1
        while name in self.tensors or name == RESERVED_NAME:
            number += 1
            name = f"{wanted}~{number}"
        # Empty tensors and tensors on the meta device have no address: each counts separately.
        identity = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        first_name = self._names.setdefault(identity if tensor.data_ptr() else name, name)
        self.tensors[name] = self.tensors.get(first_name, tensor)
        return first_name


def unflatten(structure: Any, tensors: Mapping[str, torch.Tensor], *, with_classes: bool = False) -> Any:
    """Restore the tree. A structure that `flatten` cannot have written is a ValueError.

    Calls no code of the stored classes: objects are created empty and their fields are set.
    """

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: decode(value) for key, value in node.items()}
        kind = node["$"]
        if kind in _SCALAR_KINDS:
            key, from_text = _SCALAR_KINDS[kind]
            return from_text(node[key])
        if kind in _SEQUENCES.values():
            return _CONTAINER_KINDS[kind](decode(node["items"]))
        if kind in _MAPPINGS.values():
            return _CONTAINER_KINDS[kind]({key: decode(value) for key, value in node["items"]})
        if kind in ("tensor", "ndarray"):
            tensor = tensors[node["name"]]
            tensor = torch.view_as_complex(tensor) if node.get("is_complex") else tensor
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "numpy":
            dtype = np.dtype(node["dtype"])
            if dtype.kind not in _NUMPY_KINDS:
                raise ValueError(f"dtype {node['dtype']!r} is not numeric")
            return np.frombuffer(bytes.fromhex(node["hex"]), dtype)[0]
        if kind == "instance" and with_classes:
            return _new_instance(node["class"], [decode(value) for value in node["fields"]])
        raise ValueError(f"a value has the unknown kind {kind!r}: use the version that wrote it, or a newer one")

    try:
        return decode(structure)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"the structure was not written by flatten: {type(error).__name__}: {error}") from None


def _text(path: _Path) -> str:
    """The position as a Python expression."""
    return f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


def _from_numpy(array: np.ndarray[Any, Any], path: _Path) -> torch.Tensor:
    try:
        # A copy where torch cannot share the memory: read-only or with negative strides.
        shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.from_numpy(array if shareable else array.copy())
    except (TypeError, ValueError):  # ValueError: of another byte order
        problem = f"{_text(path)} is an array of dtype {array.dtype}, which cannot be stored: convert it to numbers"
        raise TypeError(problem) from None


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> type | None:
    """The class of this name, in a module that is already imported."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None


def _fields(kind: type) -> Sequence[str] | None:
    """The fields of a named tuple or data class that can be found by its name; None for other classes."""
    if _find_class(_class_name(kind)) is not kind:
        return None
    if issubclass(kind, tuple):
        return getattr(kind, "_fields", None)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def _has_only(value: Any, fields: Sequence[str]) -> bool:
    """Whether `value` has all of these fields and no other attributes."""
    own = getattr(value, "__dict__", {})
    return own.keys() <= set(fields) and all(hasattr(value, field) for field in fields)


def _new_instance(name: str, values: Sequence[Any]) -> Any:
    kind = _find_class(name)
    fields = None if kind is None else _fields(kind)
    if kind is None or fields is None or len(fields) != len(values):
        raise ValueError(f"{name} is not a named tuple or data class that this process has defined")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    instance = object.__new__(kind)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(instance, field, value)
    return instance
