"""Modules whose names are imported from their homes on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    module: str, homes: Mapping[str, str], submodules: tuple[str, ...] = (), moved: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A module's `__getattr__`. homes: the module of each name. moved: where former names live now."""

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{module}.{name}")
        if name in homes:
            value = getattr(import_module(homes[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        if moved is not None and name in moved:
            raise AttributeError(f"{module}.{name} is now {moved[name]}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
