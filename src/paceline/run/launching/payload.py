"""Sends functions, arguments and results between launcher and workers: by value, with cloudpickle."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

_MAX_DEPTH = 6
_REGISTRY_LOCK = threading.Lock()


def save_call(path: Path, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Write the call. A TypeError names the argument, and the part of it, that cannot be pickled."""
    parts = {"fn": fn}
    parts |= {f"args[{i}]": value for i, value in enumerate(args)}
    parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
    with _by_value(fn):
        _save(path, (fn, args, dict(kwargs)), parts, "to the workers: create it inside the function instead")


def save_result(path: Path, value: Any) -> None:
    """Write rank 0's return value. A TypeError names the part that cannot be pickled."""
    remedy = "to the caller: return plain data, tensors or state dicts"
    _save(path, value, {"the return value of rank 0": value}, remedy)


def _save(path: Path, value: Any, parts: Mapping[str, Any], remedy: str) -> None:
    unfinished = path.with_suffix(".new")
    try:
        with unfinished.open("wb") as file:
            cloudpickle.dump(value, file)
        unfinished.replace(path)  # whole, also if this process is killed meanwhile
    except Exception:
        for name, part in parts.items():
            if found := _unpicklable(name, part):
                raise TypeError(f"{found[0]} cannot be sent {remedy} ({found[1]})") from None
        raise  # not about any part: for example a full disk


def _unpicklable(name: str, value: Any, depth: int = 0) -> tuple[str, Exception] | None:
    """The innermost part of `value` that cannot be pickled, and why; None if `value` can be."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        parts = _parts(value) if depth < _MAX_DEPTH else ()
        inner = (_unpicklable(name + suffix, part, depth + 1) for suffix, part in parts)
        return next(filter(None, inner), (name, error))
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif inspect.ismethod(value):
        yield (".__self__", value.__self__)
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from ((f"'s variable {name!r}", part) for name, part in {**used.globals, **used.nonlocals}.items())
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


@contextmanager
def _by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Pickle the function's module by value if workers cannot import it, such as a file loaded by its path."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _importable(module.__name__):
        yield
        return
    with _REGISTRY_LOCK:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether `import name`, in a new process with this sys.path, finds the file of this module."""
    parent = name.rpartition(".")[0]
    if parent and (parent not in sys.modules or not _importable(parent)):
        return False
    search = getattr(sys.modules[parent], "__path__", None) if parent else None
    specs = (finder.find_spec(name, search) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    return spec is not None and spec.origin in (getattr(sys.modules[name], "__file__", None), "built-in", "frozen")
