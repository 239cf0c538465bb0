"""Imports on demand: names of a module that live elsewhere, and optional dependencies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    module: str, homes: Mapping[str, str], submodules: tuple[str, ...] = (), others: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """A module's `__getattr__`. homes: the module of each name. others: submodules to which an error refers."""

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{module}.{name}")
        if name in homes:
            value = getattr(import_module(homes[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        for other in (f"{module}.{other}" for other in others if not name.startswith("_")):
            if name in import_module(other).__all__:
                raise AttributeError(f"{module}.{name} is now {other}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def optional(module: str, *, package: str, extra: str, user: str = "this source") -> Any:
    """The module. If it is not installed, the error says how to install it; `user` is the feature that needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):  # installed, but one of its dependencies is missing
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, and {user} needs it: pip install 'paceline[{extra}]'", name=error.name
        ) from error


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its submodules."""
    return optional(module, package="pyarrow", extra="arrow")
