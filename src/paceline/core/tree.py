"""State trees: nested dicts, lists and tuples of tensors and plain values, taken apart for storing without pickle.

`flatten` splits a tree into named tensors and a JSON value that describes everything else; `unflatten` puts it back
together with every type as it was: tuples, int keys, infinities, 0-dim tensors, NumPy values. Tensors come back on
the CPU and contiguous; a tensor that appeared in several places appears there as one again.

In the JSON, an object with the key "$" stands for what JSON lacks; everything else stands for itself.
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

MAX_DEPTH = 100

# What tensors can be made of, by the names of the safetensors format; the name there that no tensor can have.
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

RESERVED_NAME = "__metadata__"

# What JSON readers other than Python's keep exactly.
_SAFE_INT_BITS = 53

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size"}
_TENSORS = (torch.Tensor, nn.Parameter)
_INSTANCE = "instance"


class StructureError(ValueError):
    """A structure that `flatten` cannot have written."""


class Flat(NamedTuple):
    """A tree taken apart. `tensors` are the tree's own, on their devices; one that is shared has several names."""

    tensors: dict[str, torch.Tensor]
    structure: Any


def flatten(tree: Any, name: str, *, with_classes: bool = False) -> Flat:
    """Take `tree` apart. A value that cannot be stored is a TypeError naming its path, which begins with `name`.

    `with_classes`: named tuples and data classes too, by the names of their classes. For what another process of the
    same program reads soon: files outlive classes.
    """
    flattening = _Flattening(with_classes)
    structure = flattening.encode(tree, _Path(name))
    return Flat(flattening.tensors, structure)


def unflatten(structure: Any, tensors: Mapping[str, torch.Tensor], *, with_classes: bool = False) -> Any:
    """The tree that `flatten` took apart. A structure it cannot have written is a StructureError.

    Runs no code but this module's: of a class that is named, only an object is made, and its fields are set.
    """
    try:
        if not with_classes and _has_instances(structure):
            raise StructureError(f"the structure has a value of unknown kind {_INSTANCE!r}")
        return _decode(structure, tensors)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        if isinstance(error, StructureError):
            raise
        raise StructureError(f"the structure is not one that was saved: {type(error).__name__}: {error}") from None


class _Path(NamedTuple):
    """Where in the tree we are: as Python would write it, and as a tensor's name."""

    text: str
    name: str = ""
    depth: int = 0

    def __truediv__(self, key: str | int) -> _Path:
        # Names are for people and other tools; surrogates that UTF-8 lacks would make the file unreadable to those.
        part = str(key).encode(errors="replace").decode()
        return _Path(f"{self.text}[{key!r}]", f"{self.name}.{part}" if self.name else part, self.depth + 1)


class _Flattening:
    def __init__(self, with_classes: bool) -> None:
        self._with_classes = with_classes
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: _Path) -> Any:
        if path.depth > MAX_DEPTH:
            raise TypeError(f"{path.text} is nested deeper than {MAX_DEPTH} levels: does the state contain itself?")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= _SAFE_INT_BITS else {"$": "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if kind is list:
            return self._encode_items(value, path)
        if kind in _SEQUENCES:
            return {"$": _SEQUENCES[kind], "items": self._encode_items(value, path)}
        if kind in _MAPPINGS:
            return self._encode_mapping(value, path)
        if kind in _TENSORS:
            return self._encode_tensor(value, path)
        return self._encode_rarer(value, path)

    def _encode_items(self, values: Iterable[Any], path: _Path) -> list[Any]:
        return [self.encode(value, path / i) for i, value in enumerate(values)]

    def _encode_mapping(self, mapping: Mapping[Any, Any], path: _Path) -> dict[str, Any]:
        for key in mapping:
            if type(key) not in (str, int):
                raise TypeError(f"{path.text} has the key {key!r} of type {_name(key)}: only str and int can be stored")
        kind = _MAPPINGS[type(mapping)]
        if kind == "dict" and all(type(key) is str and key != "$" for key in mapping):
            return {key: self.encode(value, path / key) for key, value in mapping.items()}
        return {"$": kind, "items": [[key, self.encode(value, path / key)] for key, value in mapping.items()]}

    def _encode_tensor(self, tensor: torch.Tensor, path: _Path) -> dict[str, Any]:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            layout = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
            raise TypeError(f"{path.text} is a tensor ({layout}), of which only dense ones with data can be stored")
        tensor = tensor.resolve_conj().resolve_neg()
        is_complex = tensor.is_complex()
        if is_complex:
            tensor = torch.view_as_real(tensor)
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{path.text} is a tensor of {tensor.dtype}, which the safetensors format lacks")
        reference = {"$": "tensor", "name": self._add(tensor, path)}
        return {**reference, "is_complex": True} if is_complex else reference

    def _add(self, tensor: torch.Tensor, path: _Path) -> str:
        """Keep the tensor under a name of its own; the name to restore it from is the first it got."""
        own_name = self._free_name(path.name or "tensor")
        if tensor.numel() == 0:
            self.tensors[own_name] = tensor
            return own_name
        identity = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        first_name = self._names.setdefault(identity, own_name)
        self.tensors[own_name] = self.tensors.get(first_name, tensor)
        return first_name

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.tensors or name == RESERVED_NAME:
            number += 1
            name = f"{wanted}~{number}"
        return name

    def _encode_rarer(self, value: Any, path: _Path) -> Any:
        if type(value) is np.ndarray:
            return {**self._encode_tensor(_from_numpy(value, path), path), "$": "ndarray"}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$": "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "name": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$": "device", "name": str(value)}
        if type(value) in (bytes, bytearray):
            return {"$": type(value).__name__, "hex": value.hex()}
        if self._with_classes and (fields := _fields(type(value))) is not None and _is_plain_object(value, fields):
            values = [getattr(value, field) for field in fields]
            return {"$": _INSTANCE, "class": _class_name(type(value)), "fields": self._encode_items(values, path)}
        raise TypeError(
            f"{path.text} is a {_name(value)}, which cannot be stored without pickle: leave it out of state_dict(), or "
            "express it in tensors, numbers, strings, lists, tuples and dicts"
        )


def _from_numpy(array: np.ndarray[Any, Any], path: _Path) -> torch.Tensor:
    try:
        # A copy where torch cannot share the memory: read-only or with negative strides.
        shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.from_numpy(array if shareable else array.copy())
    except TypeError:
        raise TypeError(
            f"{path.text} is an array of dtype {array.dtype}, which cannot be stored: convert it to numbers"
        ) from None


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _fields(kind: type) -> Sequence[str] | None:
    """The fields of a named tuple or data class that can be found by its name; None for any other class."""
    if _found_class(_class_name(kind)) is not kind:
        return None
    if issubclass(kind, tuple):
        return getattr(kind, "_fields", None)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def _is_plain_object(value: Any, fields: Sequence[str]) -> bool:
    """Whether its fields are all there is to it."""
    own = getattr(value, "__dict__", {})
    return own.keys() <= set(fields) and all(hasattr(value, field) for field in fields)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found_class(name: str) -> type | None:
    """The class of this name in a module that is there already: nothing is imported."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None


def _has_instances(node: Any) -> bool:
    if isinstance(node, dict):
        return node.get("$") == _INSTANCE or any(map(_has_instances, node.values()))
    return isinstance(node, list) and any(map(_has_instances, node))


def _decode_object(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind = _found_class(node["class"])
    fields = None if kind is None else _fields(kind)
    if kind is None or fields is None or len(fields) != len(node["fields"]):
        raise StructureError(f"{node['class']} is not a named tuple or data class that this process knows")
    values = [_decode(value, tensors) for value in node["fields"]]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(made, field, value)
    return made


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _decode(value, tensors) for key, value in node.items()}
    decode = _DECODERS.get(node["$"])
    if decode is None:
        raise StructureError(f"the structure has a value of unknown kind {node['$']!r}: a newer version wrote it")
    return decode(node, tensors)


def _decode_mapping(kind: type) -> Callable[[Any, Mapping[str, torch.Tensor]], Any]:
    return lambda node, tensors: kind({key: _decode(value, tensors) for key, value in node["items"]})


def _decode_sequence(kind: type) -> Callable[[Any, Mapping[str, torch.Tensor]], Any]:
    return lambda node, tensors: kind([_decode(item, tensors) for item in node["items"]])


def _decode_tensor(node: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[node["name"]]
    return torch.view_as_complex(tensor) if node.get("is_complex") else tensor


def _decode_numpy(node: Any) -> Any:
    dtype = np.dtype(node["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {node['dtype']!r} is none of a number")
    return np.frombuffer(bytes.fromhex(node["hex"]), dtype)[0]


def _decode_dtype(node: Any) -> torch.dtype:
    dtype = getattr(torch, node["name"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{node['name']!r} is no torch dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    **{name: _decode_mapping(kind) for kind, name in _MAPPINGS.items()},
    **{name: _decode_sequence(kind) for kind, name in _SEQUENCES.items()},
    "tensor": _decode_tensor,
    "ndarray": lambda node, tensors: _decode_tensor(node, tensors).numpy(),
    _INSTANCE: _decode_object,
    "int": lambda node, _: int(node["hex"], 16),
    "float": lambda node, _: float(node["value"]),
    "numpy": lambda node, _: _decode_numpy(node),
    "dtype": lambda node, _: _decode_dtype(node),
    "device": lambda node, _: torch.device(node["name"]),
    "bytes": lambda node, _: bytes.fromhex(node["hex"]),
    "bytearray": lambda node, _: bytearray.fromhex(node["hex"]),
}
